r"""Rewards where success is rare: the outcome, a reward model, and both together.

  python -m experiments.train_reward_model --workdir=runs/reward_model
  python -m experiments.miniwiki.rewards --reward_model=runs/reward_model/model

Questions of three hops, and a policy that answers them hardly ever: the quickstart's
base, fine-tuned on demonstrations that all stop after the first hop (OUT/base). The
reward model knows the episodes of the base itself. Each finished (reward, seed) is two
lines of OUT/results.jsonl: what GRPO's policy answers greedily after 256 and 2,560
episodes, and what the reward model predicts of these answers. Started again, the script
goes on with the next, and prints the table of all.
"""

import pathlib
import time

from absl import app, flags
import numpy as np

from agent_r1_jax import fields, playing, report, sft, train
from agent_r1_jax.agent import env
from agent_r1_jax.guided import reward_model
from agent_r1_jax.host import runtime
from agent_r1_jax.models.files import weights
from agent_r1_jax.report import tables as report_tables
from agent_r1_jax.retrieval import documents
from agent_r1_jax.rl import algorithms
from agent_r1_jax.tasks import qa, rewards
from agent_r1_jax.tools import search
from agent_r1_jax.train import metrics
from experiments import tables
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

_MODEL = flags.DEFINE_string(
  'reward_model', 'runs/reward_model/model', 'The reward model.'
)
_OUT = flags.DEFINE_string('out', 'runs/rewards', 'Directory of the runs and results.')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2', '3', '4'], 'Seeds.')
_REWARDS = flags.DEFINE_list('rewards', [], 'Rewards; by default all.')
_STEPS = flags.DEFINE_list('steps', ['4', '40'], 'When answers are counted.')
_QUESTIONS = flags.DEFINE_integer('questions', 100, 'Held-out questions.')
_WEIGHT = flags.DEFINE_float('weight', 0.5, 'Weight of the model in the hybrid reward.')
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Which questions.')
_WORLD = flags.DEFINE_integer('world', 0, 'Seed of the world and the questions.')
_LESSONS = 12  # Steps of 8 rows; two conversations share a row.
_CFG = fields.define_flags(
  fields.replace(shapes.CONFIG, {'schedule.tasks': 8, 'schedule.eval_every': 0})
)


def main(_):
  runtime.quiet_logging()
  out = pathlib.Path(_OUT.value)
  retriever = miniwiki.index(_WORLD.value)
  tool = search.search_tool(retriever, k=1)
  make_base(out / 'base', tool.schema, retriever)
  model = reward_model.load(_MODEL.value, tools=[tool.schema])
  outcome = (1.0, qa.em_reward)
  kinds = {
    'sparse': rewards.hybrid(outcome=outcome),
    'hybrid': rewards.hybrid(outcome=outcome, model=(_WEIGHT.value, model)),
    'model alone': rewards.hybrid(model=(1.0, model)),
  }
  for seed in map(int, _SEEDS.value):
    for kind in _REWARDS.value or kinds:
      make_env = lambda kind=kind: env.ToolEnv([tool], kinds[kind], metrics=qa.metrics)
      run(kind, seed, make_env, model, out)
  print(format_table(tables.read_lines(out / 'results.jsonl')))


def make_base(out: pathlib.Path, schema, retriever: documents.Retriever) -> None:
  """Fine-tunes the configured policy on demonstrations that stop too early."""
  if (out / 'config.json').exists():
    return
  config = _CFG.value
  shape, params, chat = train.load(config.model, config.chat)
  tasks = miniwiki.three_hops(_WORLD.value, 2048, 'train')
  find = lambda query: documents.render(retriever.search([query], 1)[0])
  shown = miniwiki.demonstrations(tasks, _WORLD.value, 0, find, 'stop')
  lessons = (sft.segment(chat, sft.Conversation(m, [schema])) for m in shown)
  options = sft.Config(_LESSONS, 8, config.engine.slots, 1e-4, 0, 0.0)
  params = sft.run(shape, params, lessons, options)
  weights.save(out, shape, params, tokenizer_from=config.model.path)


def run(kind: str, seed: int, make_env, model, out: pathlib.Path) -> None:
  """Trains with a reward; after some of the steps counts what the policy answers."""
  tasks = miniwiki.three_hops(_WORLD.value, 2048, 'train')
  asked = {'': miniwiki.three_hops(_WORLD.value, _QUESTIONS.value, _SPLIT.value)}
  workdir, results = out / f'{kind} {seed}'.replace(' ', '-'), out / 'results.jsonl'
  for steps in map(int, _STEPS.value):
    changes = {'seed': seed, 'schedule.steps': steps, 'model.path': str(out / 'base')}
    config = fields.replace(_CFG.value, changes)
    episodes = steps * config.schedule.tasks * config.schedule.samples
    key = {'reward': kind, 'seed': seed, 'episodes': episodes}
    if tables.contains(results, key):
      continue
    start = time.process_time()
    train.run(
      config,
      str(workdir),
      tasks=tasks,
      make_env=make_env,
      algorithm=algorithms.grpo(kl_coef=0.0),
      label=f'{kind}, seed {seed}',
      watcher=report.Watcher(),
    )
    methods = {'': (asked, make_env)}
    played = playing.play(config, workdir / 'model', methods, watcher=report.Watcher())
    played = played['']['']
    right = np.array([t.metrics['em'] for t in played])
    paid = [line['rollout/em'] for line in metrics.read(workdir)]
    started = [step for step, em in enumerate(paid, 1) if em >= 0.25]
    measured = {
      # The episodes after which a quarter of a rollout is right; None if none is.
      'quarter': started[0] * episodes // steps if started else None,
      'right': float(right.mean()),
      'predicted': float(model.score(played).mean()),
      'auc': tables.auc(model.score(played), right > 0),
      'turns': float(np.mean([len(t.turns) for t in played])),
      'cpu_seconds': round(time.process_time() - start),
    }
    tables.add_line(results, key | measured)
    print(key, measured, flush=True)


def format_table(lines) -> str:
  """Formats the means over seeds, and the differences from the sparse reward by seed."""
  found = {(r['reward'], r['seed'], r['episodes']): r for r in lines}
  counts = sorted({r['episodes'] for r in lines})
  rows: dict[str, dict[str, report_tables.Cell]] = {}
  for kind in dict.fromkeys(r['reward'] for r in lines):
    row = rows[kind] = {}
    for n in counts:
      of = [r for r in lines if (r['reward'], r['episodes']) == (kind, n)]
      pairs = [(r, found.get(('sparse', r['seed'], n))) for r in of]
      columns = {
        'right': [r['right'] for r in of],
        'predicted': [r['predicted'] for r in of],
        'above sparse': [r['right'] - s['right'] for r, s in pairs if s],
      }
      for name, values in columns.items():
        if values:
          row[f'{name}, {n}'] = report_tables.Interval(*tables.mean_interval(values))
    if quarters := [r['quarter'] for r in of if r['quarter']]:
      until, half = tables.mean_interval(quarters)
      row['episodes until .25'] = f'{until:.0f} ± {half:.0f}'
    row['CPU-seconds'] = str(sum(r['cpu_seconds'] for r in lines if r['reward'] == kind))
  names = [f'{name}, {n}' for n in counts for name in columns]
  names += ['episodes until .25', 'CPU-seconds']
  return report_tables.format_table(rows, names, corner='reward')


if __name__ == '__main__':
  app.run(main)
