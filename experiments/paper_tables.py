"""The paper's Tables 3 and 4, small: all methods on equal terms, several seeds.

  python -m experiments.paper_tables --out=runs/tables
  python -m experiments.paper_tables --out=runs/tables --render=docs/results/paper_tables

miniwiki by default. With `--data=DIR` (hotpotqa/, 2wikimultihopqa/ and musique/, each
with corpus.jsonl.gz and train.jsonl.gz; third_party/fetch.py with these names makes
third_party/downloads such a folder) it trains on the first two and tests on held-out rows
of all three, from an instruct model, `--config.model.path=DIR`. A search returns five
full passages, for which `--config.engine.slots` must be larger: with Qwen's tokenizer
half of the right demonstrations exceed 1,100 tokens, 1 in 100 exceeds 2,300.

Each finished (method, seed) is one line of OUT/results.jsonl. When restarted, the script
continues with the next one, and an interrupted training resumes from its checkpoint.
Processes with different --seeds or --methods may share OUT; OUT/bench.json rejects those
with other data, questions, model or config. On one CPU core a trained method takes 6 to
10 minutes per seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import pathlib
import platform
import random
import re
import shutil
import time
from typing import Any, NamedTuple

from absl import app, flags
from ml_collections import config_flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, playing, report, sft, train, types
from agent_r1_jax.host import runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models.files import weights
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.rl import algorithms
from agent_r1_jax.rollout import evaluate, rollout
from agent_r1_jax.tasks import qa, qa_data
from agent_r1_jax.tools import search
from agent_r1_jax.train import metrics
from experiments import comparison, paper_page
from experiments import tables as tables_lib
from experiments.miniwiki import tasks as miniwiki
from experiments.wikipedia import demos, settings

_OUT = flags.DEFINE_string(
  'out', 'runs/paper_tables', 'Directory of the runs and results.'
)
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds of the trained methods.')
_METHODS = flags.DEFINE_list('methods', [], 'Methods; by default those of the paper.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Questions of each set.')
_WORLD = flags.DEFINE_integer('world', 0, 'Seed of the worlds and questions of miniwiki.')
_TEACHER = flags.DEFINE_string('teacher', '', "Model that 'Distillation' learns from.")
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Which questions, ditto.')
_RENDER = flags.DEFINE_string('render', '', 'Prefix of the .md, .png, .jsonl to write.')
_DATA = flags.DEFINE_string('data', '', 'Real data; empty is miniwiki.')
_CFG = fields.define_flags(
  config_lib.Config(
    model=config_lib.Model(
      path=str(pathlib.Path(__file__).parent / 'miniwiki' / 'model')
    ),
    schedule=config_lib.Schedule(steps=40, tasks=16, samples=8),
    limits=config_lib.Limits(max_turn_tokens=80),
    optimizer=config_lib.Optimizer(learning_rate=1.5e-4, critic_learning_rate=1e-3),
    engine=config_lib.Engine(
      rows=128,
      slots=448,
      decode_steps=16,
      prefill_rows=32,
      prefill_tokens=32,
      bucket=128,
      replicas=1,
    ),
    batch=config_lib.Batch(microbatch=16),
  ),
)


class Bench(NamedTuple):
  """The settings that all methods share.

  Attributes:
    config: Configuration of the training; its seed is set for each run.
    tasks: Tasks to train on.
    sets: The held-out sets by kind of prompt: 'agent', 'direct', 'rag' and 'react'.
    agent: The environment with the search tool.
    alone: The environment without tools.
    demonstrations: From a seed to endless right conversations on the training tasks.
    kinds: Kinds of questions, for the table by kind.
  """

  config: config_lib.Config
  tasks: Sequence[types.Task]
  sets: dict[str, comparison.Sets]
  agent: rollout.MakeEnv
  alone: rollout.MakeEnv
  demonstrations: Callable[[int], Iterator[list[types.Message]]]
  kinds: Mapping[str, Callable[[types.Task], bool]]


class Outcome(NamedTuple):
  """The result of a method: trajectories by set, and each training step's reward."""

  played: Mapping[str, Sequence[types.Trajectory]]
  rewards: list[float]


def prompted(which: str, bench: Bench, seed: int, workdir: pathlib.Path) -> Outcome:
  """Plays the base policy, greedily, with one kind of prompt."""
  tools = bench.agent if which in ('agent', 'react') else bench.alone
  # A worked example needs room.
  config = fields.replace(bench.config, {'engine.slots': 2 * bench.config.engine.slots})
  rows = {which: (bench.sets[which], tools)}
  return Outcome(
    playing.play(config, config.model.path, rows, watcher=report.Watcher())[which], []
  )


def trained(
  algorithm: algorithms.Algorithm,
  bench: Bench,
  seed: int,
  workdir: pathlib.Path,
  options: Mapping[str, Any] | None = None,
) -> Outcome:
  """Trains by RL, or by any algorithm that learns from its own episodes.

  `options` are fields of the configuration that differ from the bench's.
  """
  config = fields.replace(bench.config, {'seed': seed, **(options or {})})
  train.run(
    config,
    str(workdir),
    tasks=bench.tasks,
    make_env=bench.agent,
    algorithm=algorithm,
    label=workdir.name,
    watcher=report.Watcher(),
  )
  rewards = [line['rollout/reward'] for line in metrics.read(workdir)]
  return _played(bench, config, workdir, rewards)


def supervised(bench: Bench, seed: int, workdir: pathlib.Path) -> Outcome:
  """Fine-tunes on as many right demonstrations as RL has episodes, in as many steps."""
  _fine_tune(bench, seed, workdir, bench.config.schedule.steps)
  return _played(bench, bench.config, workdir, [])


def supervised_first(bench: Bench, seed: int, workdir: pathlib.Path) -> Outcome:
  """Spends half of the steps on demonstrations, then GRPO: as many episodes in total."""
  half, start = bench.config.schedule.steps // 2, workdir / 'supervised'
  if not (start / 'model').exists():
    _fine_tune(bench, seed, start, half)
  path = str(start / 'model')
  options = {'model.path': path, 'schedule.steps': bench.config.schedule.steps - half}
  return trained(GRPO, bench, seed, workdir, options)


def distilled(bench: Bench, seed: int, workdir: pathlib.Path) -> Outcome:
  """Distils on-policy from the model in --teacher; reads no reward."""
  if not _TEACHER.value:
    raise app.UsageError("--teacher: 'Distillation' needs a model with the tokenizer.")
  options = {'model.reference': _TEACHER.value}
  return trained(algorithms.distillation(), bench, seed, workdir, options)


def _fine_tune(bench: Bench, seed: int, workdir: pathlib.Path, steps: int) -> None:
  """Fine-tunes on right demonstrations and writes the model."""
  config = bench.config
  shape, params, chat = train.load(config.model, config.chat)
  schemas = [tool.schema for tool in getattr(bench.agent(), 'tools', ())]
  text = (
    sft.segment(chat, sft.Conversation(messages, schemas))
    for messages in bench.demonstrations(seed)
  )
  # Two conversations share a row.
  options = sft.Config(
    steps=steps,
    rows=config.schedule.tasks * config.schedule.samples // 2,
    row_tokens=config.engine.slots,
    learning_rate=config.optimizer.learning_rate,
    warmup=0,
    weight_decay=0.0,
  )
  params = sft.run(shape, params, text, options)
  weights.save(workdir / 'model', shape, params, tokenizer_from=config.model.path)


def _played(bench, config, workdir, rewards) -> Outcome:
  rows = {'': (bench.sets['agent'], bench.agent)}
  played = playing.play(config, workdir / 'model', rows, watcher=report.Watcher())['']
  return Outcome(played, rewards)


_NO_KL: dict[str, Any] = {'kl_coef': 0.0}
PPO, GRPO = algorithms.ppo(**_NO_KL), algorithms.grpo(**_NO_KL)
METHODS = {
  'Direct answer': functools.partial(prompted, 'direct'),
  'Naive RAG': functools.partial(prompted, 'rag'),
  'ReAct prompting': functools.partial(prompted, 'react'),
  'Base Tool Call': functools.partial(prompted, 'agent'),
  'Supervised fine-tuning': supervised,
  'Rejection sampling': functools.partial(trained, algorithms.rejection()),
  'PPO': functools.partial(trained, PPO),
  'GRPO': functools.partial(trained, GRPO),
  'REINFORCE++': functools.partial(trained, algorithms.reinforce_plus_plus(**_NO_KL)),
  'REINFORCE++-baseline': functools.partial(
    trained, algorithms.reinforce_plus_plus_baseline(**_NO_KL)
  ),
  'RLOO': functools.partial(trained, algorithms.rloo(**_NO_KL)),
}
_MASKS = {
  'loss mask off': {'loss_mask': False},
  'advantage mask off': {'advantage_mask': False},
  'both masks off': {'loss_mask': False, 'advantage_mask': False},
}
METHODS |= {
  f'{name} ({what})': functools.partial(trained, algorithm._replace(**off))
  for name, algorithm in (('PPO', PPO), ('GRPO', GRPO))
  for what, off in _MASKS.items()
}
# Settings that may keep GRPO exploring.
STEADY = {
  f'GRPO with {what}': functools.partial(trained, algorithm, options=options)
  for what, algorithm, options in (
    ('an entropy bonus', GRPO._replace(entropy_coef=0.01), {}),
    ('a KL penalty', algorithms.grpo(kl_coef=0.01), {}),
    ('dynamic sampling', GRPO, {'schedule.max_refills': 2}),
    ('groups of 16', GRPO, {'schedule.tasks': 8, 'schedule.samples': 16}),
  )
}
# Methods that also learn from others' right answers.
TAUGHT = {'Fine-tuning before GRPO': supervised_first, 'Distillation': distilled}
# The tables and their methods. The first two run by default.
GROUPS = {
  'Table 3: methods': [m for m in METHODS if '(' not in m],
  'Table 4: masks': [m for m in METHODS if m in ('PPO', 'GRPO') or '(' in m],
  'Against collapse': ['GRPO', *STEADY],
  'Taught': ['Supervised fine-tuning', 'GRPO', *TAUGHT],
}
_UNTRAINED = ('Direct answer', 'Naive RAG', 'ReAct prompting', 'Base Tool Call')


def miniwiki_bench(config: config_lib.Config) -> Bench:
  """Makes the bench of the quickstart's worlds and questions."""
  world, split = _WORLD.value, _SPLIT.value
  retriever, tasks = miniwiki.index(world), miniwiki.train_tasks(world, 4096)
  names = [name for name in miniwiki.SETS if '4hop' not in name]
  sets = {n: miniwiki.test_set(n, _QUESTIONS.value, world, split) for n in names}
  tool = search.search_tool(retriever, k=1)
  find = lambda query: documents.render(retriever.search([query], 1)[0])
  demonstrations = lambda seed: miniwiki.demonstrations(tasks, world, seed, find)
  rag = _with_passages(sets, retriever, miniwiki.rag_task)
  prompts = {'agent': sets, 'direct': sets, 'rag': rag}
  return _make_bench(config, tasks, prompts, tool, demonstrations, miniwiki.KINDS)


def real_bench(config: config_lib.Config) -> Bench:
  """Makes the bench that trains on HotpotQA and 2Wiki, and also tests on MuSiQue."""
  data = pathlib.Path(_DATA.value)
  found, tasks, held = {}, [], {}
  for name in ('hotpotqa', '2wikimultihopqa', 'musique'):
    corpus, _ = qa_data.find(data / name)
    for document in documents.read_corpus(corpus):
      found.setdefault((document.title, document.text), document)
    rows = list(qa_data.read_questions(data / name))
    held[name], rest = settings.split(rows, _QUESTIONS.value, seed=0)
    tasks += [] if name == 'musique' else map(qa.agent_task, rest)
  retriever = bm25.BM25(list(found.values()))
  tool = search.search_tool(retriever, k=settings.PASSAGES)
  by_title = {document.title: document for document in found.values()}
  find = functools.cache(lambda query: retriever.search([query], settings.PASSAGES)[0])

  def demonstrations(seed):
    order = random.Random(f'demonstrations {seed}')
    while True:
      for task in order.sample(tasks, len(tasks)):
        if messages := demos.demonstrate(task, by_title, find, documents.render):
          yield messages

  ask = lambda prompt: {name: [*map(prompt, rows)] for name, rows in held.items()}
  rag = _with_passages(held, retriever, qa.rag_task)
  prompts = {'agent': ask(qa.agent_task), 'direct': ask(qa.direct_task)}
  return _make_bench(config, tasks, prompts | {'rag': rag}, tool, demonstrations, {})


def _with_passages(sets: comparison.Sets, retriever, rag_task) -> comparison.Sets:
  """Adds the three passages found for each question to its prompt."""
  return {
    name: comparison.with_passages(tasks, retriever, rag_task)
    for name, tasks in sets.items()
  }


def _make_bench(config, tasks, prompts, tool, demonstrations, kinds) -> Bench:
  """Adds ReAct prompting (arXiv 2210.03629): a worked example of thought and action."""
  example = next(demonstrations(0))
  react = {
    name: [dataclasses.replace(t, messages=[*example, *t.messages]) for t in tasks]
    for name, tasks in prompts['agent'].items()
  }
  environments = comparison.make_envs(tool, qa.paper_reward)
  prompts = prompts | {'react': react}
  return Bench(config, tasks, prompts, *environments, demonstrations, kinds)


def main(_):
  runtime.quiet_logging()
  out = pathlib.Path(_OUT.value)
  if _RENDER.value:
    found = tables_lib.read_lines(out / 'results.jsonl')
    if not found:
      raise app.UsageError(f'--out={out} has no results yet: run without --render first')
    target = pathlib.Path(_RENDER.value)
    return paper_page.render(found, target, GROUPS)
  out.mkdir(parents=True, exist_ok=True)
  methods = METHODS | STEADY | TAUGHT
  if unknown := set(_METHODS.value) - set(methods):
    raise app.UsageError(f'--methods: {sorted(unknown)}; there are {list(methods)}')
  given = config_flags.get_override_values(flags.FLAGS['config'])
  if _DATA.value and not given.get('model.path'):
    raise app.UsageError(
      '--data: the policy to start from is missing; give --config.model.path=DIR.'
    )
  claim(out)
  bench = (real_bench if _DATA.value else miniwiki_bench)(_CFG.value)
  for seed in map(int, _SEEDS.value):
    for method in _METHODS.value or METHODS:
      # One policy's greedy episodes do not depend on the seed.
      seed_of = 0 if method in _UNTRAINED else seed
      key, path = {'method': method, 'seed': seed_of}, out / 'results.jsonl'
      if tables_lib.contains(path, key):
        continue
      workdir = out / re.sub(r'\W+', '-', f'{method} seed {seed_of}')
      before, start, cpu = _seconds(workdir), time.time(), time.process_time()
      outcome = methods[method](bench, seed_of, workdir)
      result = key | {
        'sets': {
          name: evaluate.by_kind(played, bench.kinds)
          for name, played in outcome.played.items()
        },
        'rewards': [round(r, 4) for r in outcome.rewards],
        'seconds': round(before + time.time() - start),
        'cpu_seconds': round(time.process_time() - cpu),
        'machine': f'{platform.machine()}, {platform.python_version()}',
        'steps': bench.config.schedule.steps,
      }
      tables_lib.add_line(path, result)
      print(method, seed_of, {n: s['all']['mean'] for n, s in result['sets'].items()})
      shutil.rmtree(workdir / 'checkpoints', ignore_errors=True)


def claim(out: pathlib.Path) -> None:
  """Records what all results in a directory have in common, if that is not done yet.

  Raises:
    ValueError: It was recorded for another bench; names the fields that differ.
  """
  real, place = bool(_DATA.value), lambda path: str(pathlib.Path(path).resolve())
  # Each run has its own seed, and the model's path is made absolute.
  config = fields.replace(_CFG.value, {'seed': 0, 'model.path': ''})
  bench = {
    'data': place(_DATA.value) if real else f'miniwiki {_WORLD.value} {_SPLIT.value}',
    'model': place(_CFG.value.model.path),
    'questions': _QUESTIONS.value,
    'config': dataclasses.asdict(config),
  }
  workdir_lib.check_config(out, bench, name='bench.json')


def _seconds(workdir: pathlib.Path) -> float:
  """Returns the seconds that an interrupted training had taken."""
  lines = metrics.read(workdir) if (workdir / 'metrics.jsonl').exists() else []
  return sum(v for line in lines for k, v in line.items() if k.startswith('time/'))


if __name__ == '__main__':
  app.run(main)
