r"""Decoding guided by a value, beside controls that sample as many tokens.

  python -m experiments.miniwiki.search --workdir=runs/quickstart
  python -m experiments.guided --policy=runs/quickstart/model --workdir=runs/guided \
    --questions=100

First an implicit value (rl/implicit_value.py) is fitted to the policy's own episodes on
training questions of worlds that it was not trained on. Then the test questions are
answered with K candidates of each turn, taken by value, by mean log-prob or at random;
and with K complete episodes, of which the likeliest, the one of the highest value or the
most frequent answer is taken. Each finished line is in WORKDIR/results-*.jsonl and is not
measured again. --config.seed is also the number of the world.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import math
import pathlib
import time
from typing import Any

from absl import app, flags
import numpy as np
import optax

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.checks import sizes
from agent_r1_jax.engine import guide
from agent_r1_jax.guided import choice, critic
from agent_r1_jax.host import runtime
from agent_r1_jax.rl import implicit_value, packing, reward_model
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import evaluate, evaluation_cache, rollout
from experiments import comparison
from experiments.miniwiki import tasks as miniwiki

_POLICY = flags.DEFINE_string('policy', 'runs/quickstart/model', 'The policy.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/guided', 'Directory of the run.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Questions of each set.')
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Split of the questions.')
_MOST = flags.DEFINE_integer('most', 16, 'The most complete episodes, a power of 2.')
_TURNS = flags.DEFINE_integer('turns', 8, 'The most candidates of a turn, a power of 2.')
_CFG = fields.define_flags(
  config_lib.Config(
    limits=config_lib.Limits(max_turn_tokens=80),
    schedule=config_lib.Schedule(steps=120, tasks=1000, samples=6),
    engine=config_lib.Engine(rows=144, slots=448, decode_steps=16, replicas=2),
  ),
)
SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')
WORLDS, EPISODES, BETA = 4, 48, 0.3
SHAPE = packing.MicrobatchShape(16, 448)
# Episodes by the name of their set; of one task side by side.
Played = Mapping[str, Sequence[types.Trajectory]]


class Player:
  """Plays questions with an engine of a policy.

  Attributes:
    config: The configuration, with all sizes.
    sets: Questions by the name of their set.
    shape: The policy's shape.
    params: The policy's parameters.
  """

  def __init__(self, config: config_lib.Config, sets: comparison.Sets):
    """Loads the policy in config.model.path."""
    self.config, self.sets = sizes.resolve(config), sets
    self.shape, self.params, self.chat = train.load(self.config.model, self.config.chat)
    self.engine = train.make_engine(
      self.config, self.shape, self.params, guides=[guide.FORCED]
    )

  def play(self, make_env, decoding: rollout.Decoding, samples: int = 1) -> Played:
    """Plays every question; prints how long it took."""
    played = {}
    for name, tasks in self.sets.items():
      played[name] = rollout.collect(
        self.engine,
        self.chat,
        tasks,
        make_env,
        limits=self.config.limits,
        decoding=decoding,
        samples=samples,
        seed=self.config.seed,
      )
    return played

  def values(self, episodes: Sequence[types.Trajectory], params) -> list[np.ndarray]:
    """log π_φ/π of each episode up to the ends of its turns, float64 [turns]."""
    found = []
    for i in range(0, len(episodes), 256):
      table = table_lib.build(episodes[i : i + 256])
      ratios = implicit_value.log_ratios(params, table, config=self.shape, shape=SHAPE)
      actions = np.flatnonzero(table.action_mask)
      sums = np.cumsum(ratios[actions])
      last = table_lib.ends(table.turn[actions])
      owner = table.trajectory[actions][last]
      ends = sums[last]
      for n in range(len(episodes[i : i + 256])):
        mine = np.flatnonzero(owner == n)
        before = ends[mine[0] - 1] if mine[0] else 0.0
        found.append(ends[mine] - before)
    return found


def fit_value(config: config_lib.Config, out: pathlib.Path):
  """Fits an implicit value to episodes of the policy on training questions; saves it."""
  schedule, played = config.schedule, []
  player = Player(config, {})
  for world in range(WORLDS):
    number = 100 * config.seed + world + 1
    tool = search.search_tool(miniwiki.make_index(miniwiki.corpus(number, 'train')), k=1)
    make_env, _ = comparison.make_envs(tool, qa.em_reward)
    player.sets = {'': miniwiki.train_tasks(number, schedule.tasks // WORLDS)}
    played += player.play(make_env, rollout.ON_POLICY, schedule.samples)['']
  played = [t for t in played if t.turns]
  warmup = 1 + schedule.steps // 16
  rate = optax.warmup_cosine_decay_schedule(0, 5e-4, warmup, schedule.steps, 5e-5)
  right = np.mean([t.reward > 0.5 for t in played])
  prior = float(np.log(right / (1 - right)))
  params = implicit_value.fit(
    player.params,
    played,
    config=player.shape,
    optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
    shape=SHAPE,
    steps=schedule.steps,
    episodes=EPISODES,
    beta=BETA,
    seed=config.seed,
    on_step=print_step,
  )
  policy = config.model.path
  critic.save_implicit(out, player.shape, params, policy, beta=BETA, prior=prior)


def print_step(step: int, metrics: Mapping[str, float]) -> None:
  """Prints the loss of every tenth step."""
  if step % 10 == 0:
    print(f'step {step}: loss {metrics["loss"]:.3f}')


def sampled_tokens(episodes: Sequence[types.Trajectory]) -> float:
  """The tokens that were sampled for these episodes, candidates included."""
  own = lambda t: sum(turn.stop - turn.start for turn in t.turns)
  return sum(t.metrics.get('sampled_tokens', own(t)) for t in episodes)


def answer(episode: types.Trajectory) -> str | None:
  """The normalised answer, or None."""
  found = qa.extract_answer(episode.messages[-1]['content']) if episode.turns else None
  return found and qa.normalize_answer(found)


def select_episodes(
  groups: Sequence[Sequence[types.Trajectory]], values: Mapping[int, np.ndarray]
) -> dict[str, list[types.Trajectory]]:
  """Takes one of the K episodes of each question, in several ways."""

  def likelihood(t):
    sampled = [s.behaviour_logprobs[s.action_mask] for s in t.segments]
    return np.concatenate(sampled) if sampled else np.full(1, -math.inf)

  value = lambda t: float(values[id(t)][-1]) if id(t) in values else -math.inf

  def vote(group):
    said = [answer(t) for t in group if answer(t) is not None]
    winner = max(said, key=said.count, default=None)
    return next((t for t in group if answer(t) == winner), group[0])

  take = lambda score: [max(group, key=score) for group in groups]
  return {
    'episodes, random': [group[0] for group in groups],
    'episodes, likeliest': take(lambda t: likelihood(t).mean()),
    'episodes, majority': [vote(group) for group in groups],
    'episodes, highest value': take(value),
    'episodes, π exp(value)': take(lambda t: likelihood(t).sum() + value(t)),
    'episodes, best (oracle)': take(lambda t: t.metrics.get('em', 0.0)),
  }


def measure(chosen: Played, tokens: float, seconds: float, k: int) -> dict[str, Any]:
  """The numbers of one line."""
  episodes = sum(len(ts) for ts in chosen.values())
  return {
    'k': k,
    'sets': {name: evaluate.by_kind(ts, miniwiki.KINDS) for name, ts in chosen.items()},
    'tokens': tokens / episodes,
    'seconds': seconds / episodes,
  }


def doubles(most: int) -> Iterator[int]:
  """2, 4, 8, ... up to most."""
  return (2**i for i in range(1, int(math.log2(most)) + 1))


def play_turns(player: Player, critic_dir, make_env, path: pathlib.Path):
  """Plays with candidates of each turn, and by the value's own language model."""
  dirs = critic_dir, player.config.model.path
  own = choice.by_ratio(player.engine, *dirs, candidates=1).critic
  ways = {
    'greedy': (1, evaluate.GREEDY),
    'sampled': (1, rollout.ON_POLICY),
    'tokens, π exp(value), greedy': (1, evaluate.GREEDY._replace(policy=own)),
    'tokens, π exp(value)': (1, rollout.Decoding(policy=own)),
  }
  for k in doubles(_TURNS.value):
    choices = {
      'turns, π exp(value)': choice.Choice(k, choice.tilted, critic=own, implicit=True),
      'turns, likeliest': choice.Choice(k, choice.mean_logprob),
      'turns, random': choice.Choice(k, beta=math.inf),
    }
    ways |= {f'{n} @{k}': (k, rollout.Decoding(choice=c)) for n, c in choices.items()}
  for label, (k, decoding) in ways.items():
    key = {'method': label.split(' @')[0], 'k': k, 'seed': player.config.seed}
    if evaluation_cache.find(path, key):
      continue
    before, start = player.engine.stats.prefilled, time.time()
    played = player.play(make_env, decoding)
    seconds = time.time() - start
    tokens = sum(sampled_tokens(ts) for ts in played.values())
    line = key | measure(played, tokens, seconds, k)
    line['prefilled'] = player.engine.stats.prefilled - before
    add(path, line)


def play_episodes(player: Player, critic_dir, make_env, path: pathlib.Path):
  """Plays K episodes of each question, and takes one; then looks at the values."""
  most, seed = _MOST.value, player.config.seed
  params, how = critic.load_implicit(critic_dir, player.config.model.path)
  if evaluation_cache.find(path, {'method': 'calibration', 'seed': seed}):
    return
  start = time.time()
  played = player.play(make_env, rollout.ON_POLICY, most)
  seconds = time.time() - start
  every = [t for ts in played.values() for t in ts if t.turns]
  start = time.time()
  values = dict(zip(map(id, every), player.values(every, params), strict=True))
  reading = time.time() - start
  for k in doubles(most):
    taken: dict[str, dict[str, list]] = {}
    tokens = 0.0
    for name, ts in played.items():
      groups = [ts[i : i + k] for i in range(0, len(ts), most)]
      tokens += sum(map(sampled_tokens, groups))
      for method, chosen in select_episodes(groups, values).items():
        taken.setdefault(method, {})[name] = chosen
    for method, chosen in taken.items():
      spent = (seconds + reading * ('value' in method)) * k / most
      line = measure(chosen, tokens, spent, k)
      add(path, {'method': method, 'seed': seed} | line)
  found = calibrate(every, {i: how['prior'] + BETA * v for i, v in values.items()})
  add(path, {'method': 'calibration', 'seed': seed} | found)


def calibrate(episodes, odds: Mapping[int, np.ndarray]) -> dict[str, Any]:
  """Compares log-odds at the ends of turns with what the episodes earned from there."""
  found: dict[str, tuple[list, list]] = {}
  for t in episodes:
    for i, v in enumerate(odds[id(t)]):
      names = [f'turn {i + 1}', 'last turn' if i + 1 == len(t.turns) else 'turns before']
      for name in names:
        said, seen = found.setdefault(name, ([], []))
        said.append(1 / (1 + np.exp(-v)))
        seen.append(t.metrics.get('em', 0.0))
  result = {}
  for name, columns in found.items():
    said, seen = map(np.array, columns)
    error, bins = reward_model.calibration(said, seen > 0.5)
    result[name] = {'bins': bins, 'ece': error, 'count': len(said)}
    result[name]['auc'] = reward_model.auc(said, seen > 0.5)
  return result


def add(path: pathlib.Path, line: dict[str, Any]):
  """Keeps a line and prints it in short."""
  evaluation_cache.add(path, line)
  if 'sets' in line:
    ems = [f'{s["all"]["mean"]:.3f}' for s in line['sets'].values()]
    print(f'{line["method"]} {line["k"]}: {" ".join(ems)}, {line["tokens"]:.0f} tokens')
  else:
    print(json.dumps(line, indent=1))


def main(_):
  runtime.quiet_logging()
  workdir, seed = pathlib.Path(_WORKDIR.value), _CFG.value.seed
  config = fields.replace(_CFG.value, {'model.path': _POLICY.value})
  if not (critic_dir := workdir / 'critic').exists():
    fit_value(config, critic_dir)
  make_env, _ = comparison.make_envs(
    search.search_tool(miniwiki.index(seed), k=1), qa.em_reward
  )
  sets = {n: miniwiki.test_set(n, _QUESTIONS.value, seed, _SPLIT.value) for n in SETS}
  player = Player(config, sets)
  path = workdir / f'results-{_SPLIT.value}-{_QUESTIONS.value}.jsonl'
  play_episodes(player, critic_dir, make_env, path)
  play_turns(player, critic_dir, make_env, path)


if __name__ == '__main__':
  app.run(main)
