r"""Decoding guided by a value, beside controls that sample as many tokens.

  python -m experiments.miniwiki.search --workdir=runs/quickstart
  python -m experiments.guided --policy=runs/quickstart/model --workdir=runs/guided

First an implicit value (guided/implicit_value.py) is fitted to the policy's own episodes
on practice questions: training rows, or tasks that it was not trained on. Then the test
questions are answered with K candidates of each turn, and with K complete episodes,
of which one is taken. Each finished line is in WORKDIR/results-*.jsonl and is not
measured again. --config.seed is also the number of miniwiki's world.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import math
import pathlib
import time
from typing import Any, NamedTuple

from absl import app, flags
from ml_collections import config_flags
import numpy as np
import optax

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.engine import guide
from agent_r1_jax.guided import choice, implicit_value, search
from agent_r1_jax.host import runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import packing
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import evaluate, rollout
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.train import identity, sizes
from experiments import guided_data, selection
from experiments import results as results_lib
from experiments import scores as scores_lib

_TASK = flags.DEFINE_enum('task', 'miniwiki', [*guided_data.CONFIGS], 'The task.')
_POLICY = flags.DEFINE_string('policy', 'runs/quickstart/model', 'The policy.')
_BETA = flags.DEFINE_float('beta', 0.3, 'How far log-odds follow log-probs, β.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/guided', 'Directory of the run.')
_QUESTIONS = flags.DEFINE_integer('questions', 100, 'Questions of each set.')
_PART = flags.DEFINE_enum('part', 'test', ['dev', 'test'], 'Which questions.')
_MOST = flags.DEFINE_integer('most', 16, 'The most complete episodes, a power of 2.')
_TURNS = flags.DEFINE_integer('turns', 8, 'The most candidates of a turn, a power of 2.')
_SEARCH = flags.DEFINE_bool('search', False, 'Also play beams and trees.')
_CFG = fields.define_flags(config_lib.Config())
EPISODES = 48
SCALES = 'scales.json'
# Episodes by the name of their set; of one task side by side.
Played = Mapping[str, Sequence[types.Trajectory]]


class Player:
  """Plays questions with an engine of a policy.

  Attributes:
    config: The configuration, with all sizes.
    shape: The policy's shape.
    params: The policy's parameters.
    chat: Encodes messages for it.
    engine: Samples from it.
  """

  def __init__(self, config: config_lib.Config):
    """Loads the policy in config.model.path."""
    self.config = sizes.resolve(config)
    self.shape, self.params, self.chat = train.load(self.config.model, self.config.chat)
    self.engine = train.make_engine(
      self.config, self.shape, self.params, guides=[guide.FORCED]
    )
    # The rows of the learner's micro-batches.
    self.rows = packing.MicrobatchShape(16, self.engine.sizes.slots)

  def play(
    self, label, tasks, make_env, decoding=decoding_lib.ON_POLICY, samples=1, store=None
  ):
    """Plays every question; episodes of one question are side by side."""
    with progress_lib.Progress(len(tasks) * samples, label=label) as progress:
      return rollout.collect(
        self.engine,
        self.chat,
        tasks,
        make_env,
        limits=self.config.limits,
        decoding=decoding,
        samples=samples,
        seed=self.config.seed,
        store=store,
        on_done=progress.step_counter(),
      )

  def sum_logprobs(
    self, episodes: Sequence[types.Trajectory], params
  ) -> list[np.ndarray]:
    """Σ log π_φ of each episode up to the ends of its turns, float64 [turns]."""
    found = []
    for i in range(0, len(episodes), 256):
      some = episodes[i : i + 256]
      table = table_lib.build(some)
      logprobs = implicit_value.logprobs(
        params, table, config=self.shape, shape=self.rows
      )
      actions = table.action_mask
      turns = np.bincount(table.turn[actions], logprobs[actions])
      ends = np.cumsum([len(t.turns) for t in some])
      found += [np.cumsum(x) for x in np.split(turns, ends[:-1])]
    return found


def fit_value(player: Player, data: guided_data.Data, workdir: pathlib.Path):
  """Fits an implicit value to episodes of practice questions; writes WORKDIR/critic."""
  config, schedule, played = player.config, player.config.schedule, []
  for part, (tasks, make_env) in enumerate(data.practice(schedule.tasks)):
    # What was played before a kill is not played again.
    kept = store_lib.EpisodeStore(workdir / 'practice' / str(part))
    label = f'practice, part {part}'
    played += player.play(label, tasks, make_env, samples=schedule.samples, store=kept)
  played = [t for t in played if t.turns]
  print(f'{len(played)} episodes, {np.mean([t.reward for t in played]):.3f} are right')
  warmup = 1 + schedule.steps // 40
  rate = optax.warmup_cosine_decay_schedule(0, 5e-4, warmup, schedule.steps, 2.5e-5)
  with progress_lib.Progress(schedule.steps, label='value') as bar:
    params, odds = implicit_value.fit(
      train.load(config.model, config.chat)[1],
      played,
      config=player.shape,
      optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
      shape=player.rows,
      steps=schedule.steps,
      episodes=EPISODES,
      beta=_BETA.value,
      seed=config.seed,
      on_step=lambda step, metrics: bar.update(step, loss=metrics['loss']),
    )
  out = workdir / 'critic'
  implicit_value.save(out, player.shape, params, config.model.path, odds)
  # Before the last turn the same sums say other odds.
  played = played[-1500:]
  sums, scales = player.sum_logprobs(played, params), []
  for k in range(config.limits.max_turns - 1):
    on = [
      (s[k], t.reward > 0.5) for s, t in zip(sums, played, strict=True) if s[k + 1 :].size
    ]
    scales.append(selection.fit_odds(*np.array(on, float).reshape(-1, 2).T))
  (out / SCALES).write_text(json.dumps(scales))


class Results(NamedTuple):
  """The lines that were measured.

  Attributes:
    path: Their file.
    seed: The seed of new lines.
    data: Says which kinds of question there are, and which metric counts.
  """

  path: pathlib.Path
  seed: int
  data: guided_data.Data

  def has(self, method: str, k: int = 0) -> bool:
    """Returns whether a line is there."""
    key = {'method': method, 'k': k, 'seed': self.seed}
    return results_lib.contains(self.path, key)

  def add(self, method: str, k: int, chosen: Played, tokens: float, seconds: float):
    """Keeps what a method came to, and prints it in short."""
    n = sum(map(len, chosen.values()))
    sets = {
      name: evaluate.by_kind(ts, self.data.kinds, self.data.score)
      for name, ts in chosen.items()
    }
    self.add_line(method, k, sets=sets, tokens=tokens / n, seconds=seconds / n)
    ems = [f'{s["all"]["mean"]:.3f}' for s in sets.values()]
    print(f'{method}, K = {k}: {" ".join(ems)}, {tokens / n:.0f} tokens', flush=True)

  def add_line(self, method: str, k: int = 0, **numbers: Any):
    """Keeps a line."""
    line = {'method': method, 'k': k, 'seed': self.seed, **numbers}
    results_lib.add(self.path, line)


def doubles(most: int) -> Iterator[int]:
  """2, 4, 8, ... up to most."""
  return (2**i for i in range(1, int(math.log2(most)) + 1))


def list_ways(own: Any) -> dict[tuple[str, int], decoding_lib.Decoding]:
  """Lists the ways to decode, by name and K; `own` is π_φ as a policy of the engine."""
  ways = {
    ('greedy', 1): evaluate.GREEDY,
    ('greedy by π_φ', 1): evaluate.GREEDY._replace(policy=own),
  }
  for k in doubles(_TURNS.value):
    choices: dict[str, Any] = {
      'turns, highest value': choice.Choice(k, critic=own, implicit=True),
      'turns, likeliest': choice.Choice(k, choice.mean_logprob),
    }
    if _SEARCH.value and k > 2:
      choices['beams of 2'] = search.Beams(2, k // 2, own, implicit=True)
      choices['tree'] = search.Tree(k, k, own, implicit=True)
    ways |= {(n, k): decoding_lib.Decoding(choice=c) for n, c in choices.items()}
  return ways


def play_turns(player: Player, data: guided_data.Data, params, results: Results):
  """Plays with candidates of each turn, and by the value's own language model."""
  for (name, k), decoding in list_ways(player.engine.make_policy(params, 0)).items():
    if results.has(name, k):
      continue
    start = time.time()
    played = {
      set_: player.play(set_, tasks, data.make_env, decoding)
      for set_, tasks in data.sets.items()
    }
    seconds = time.time() - start
    results.add(
      name, k, played, sum(map(selection.sampled_tokens, played.values())), seconds
    )


def play_episodes(
  player: Player, data: guided_data.Data, critic_dir, params, odds, results: Results
):
  """Plays K episodes of each question, and takes one; then looks at the values."""
  most = _MOST.value
  if results.has('calibration'):
    return
  start = time.time()
  played = {
    name: player.play(name, tasks, data.make_env, samples=most)
    for name, tasks in data.sets.items()
  }
  seconds = time.time() - start
  every = [t for ts in played.values() for t in ts if t.turns]
  start = time.time()
  sums = player.sum_logprobs(every, params)
  reading = time.time() - start
  said = odds.prior + odds.beta * np.array([s[-1] for s in sums])
  judged = {
    'log-prob': np.exp([selection.mean_logprob(t) for t in every]),
    'value': 1 / (1 + np.exp(-said)),
  }
  weights = {n: dict(zip(map(id, every), w, strict=True)) for n, w in judged.items()}
  for k in doubles(most):
    taken: dict[str, dict[str, list]] = {}
    tokens = 0.0
    for name, ts in played.items():
      groups = [ts[i : i + k] for i in range(0, len(ts), most)]
      tokens += sum(map(selection.sampled_tokens, groups))
      for method, chosen in selection.select_episodes(
        groups, weights, data.is_solved, data.answer
      ).items():
        taken.setdefault(method, {})[name] = chosen
    for method, chosen in taken.items():
      spent = (seconds + reading * method.endswith('value')) * k / most
      results.add(method, k, chosen, tokens, spent)
  scales = [
    implicit_value.Odds(*x) for x in json.loads((critic_dir / SCALES).read_text())
  ]
  compare(every, judged, results)
  found = selection.calibrate(every, sums, scales, odds, data.is_solved)
  results.add_line('calibration', **found)


def play_own_episodes(player: Player, data: guided_data.Data, params, results: Results):
  """Plays K episodes of each question by π_φ, and takes that of the highest value."""
  most, method = _MOST.value, 'episodes by π_φ, highest value'
  if results.has(method, most):
    return
  start = time.time()
  decoding = decoding_lib.ON_POLICY._replace(policy=player.engine.make_policy(params, 0))
  played = {
    name: player.play(f'{name} by π_φ', tasks, data.make_env, decoding, most)
    for name, tasks in data.sets.items()
  }
  every = [t for ts in played.values() for t in ts if t.turns]
  sums = player.sum_logprobs(every, params)
  values = {id(t): s[-1] for t, s in zip(every, sums, strict=True)}
  value = lambda t: values.get(id(t), -math.inf)
  seconds, tokens = time.time() - start, selection.sampled_tokens(every)
  for k in doubles(most):
    chosen = {
      name: [max(ts[i : i + k], key=value) for i in range(0, len(ts), most)]
      for name, ts in played.items()
    }
    results.add(method, k, chosen, tokens * k / most, seconds * k / most)


def compare(episodes, judged: Mapping[str, np.ndarray], results: Results):
  """Measures how well weights tell right episodes from wrong ones."""
  right = np.array([*map(results.data.is_solved, episodes)])
  tasks = np.unique([t.task.id for t in episodes], return_inverse=True)[1]
  for name, weights in judged.items():
    margins = scores_lib.pair_margins(weights, right, tasks)
    auc, ordered = scores_lib.auc(weights, right > 0.5), float(np.mean(margins > 0))
    results.add_line('order', judge=name, auc=auc, ordered=ordered, pairs=len(margins))
    print(f'{name}: AUC {auc:.3f}; {ordered:.3f} of {len(margins)} pairs of one question')


def main(_):
  runtime.quiet_logging()
  given = config_flags.get_override_values(flags.FLAGS['config'])
  config = fields.replace(
    guided_data.CONFIGS[_TASK.value], given | {'model.path': _POLICY.value}
  )
  workdir, seed = pathlib.Path(_WORKDIR.value), config.seed
  made_of = {'task': _TASK.value, 'policy': identity.model_digest(_POLICY.value)}
  workdir_lib.check_config(workdir, made_of | {'seed': seed}, name='made_of.json')
  data = guided_data.read(_TASK.value, seed, _QUESTIONS.value, _PART.value)
  player, critic_dir = Player(config), workdir / 'critic'
  if not (critic_dir / SCALES).exists():
    fit_value(player, data, workdir)
  params, odds = implicit_value.load(critic_dir, _POLICY.value)
  path = workdir / f'results-{_PART.value}-{_QUESTIONS.value}.jsonl'
  results = Results(path, seed, data)
  play_episodes(player, data, critic_dir, params, odds, results)
  play_own_episodes(player, data, params, results)
  play_turns(player, data, params, results)


if __name__ == '__main__':
  app.run(main)
