r"""Decoding guided by a critic, beside controls that sample as many tokens.

  python -m experiments.miniwiki.search --workdir=runs/quickstart
  python -m experiments.guided --policy=runs/quickstart/model --workdir=runs/guided

First the policy gets a value head, fitted to the returns of its own episodes on training
questions; --critic=DIR takes the critic/ of a run of PPO in its place. Then the test
questions are answered with K candidates of each turn, taken by the critic's value, by
their mean log-prob or at random; and with K complete episodes, of which the likeliest,
the one of the highest value or the most frequent answer is taken. Each finished line is
in WORKDIR/results-*.jsonl and is not measured again.
"""

from collections.abc import Mapping, Sequence
import functools
import json
import math
import pathlib
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, weights
from agent_r1_jax.rl import algorithms, credit, packing
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import choice, critic, evaluate, evaluation_cache, rollout, sizes
from experiments import comparison
from experiments.miniwiki import tasks as miniwiki

_POLICY = flags.DEFINE_string('policy', 'runs/quickstart/model', 'The policy.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/guided', 'Directory of the run.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Questions of each set.')
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Split of the questions.')
_CRITIC = flags.DEFINE_string('critic', '', 'A critic of its own, from a PPO run.')
_BETA = flags.DEFINE_float('beta', 0.1, 'The temperature of the values, β.')
_MOST = flags.DEFINE_integer('most', 8, 'The largest K, a power of 2.')
_CFG = fields.define_flags(
  config_lib.Config(
    limits=config_lib.Limits(max_turn_tokens=80),
    engine=config_lib.Engine(rows=144, slots=448, decode_steps=16, replicas=2),
  ),
)
SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')
# The returns that the values predict: of gamma 1, after each token.
PPO = algorithms.ppo(kl_coef=0.0)
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
    self.engine = train.make_engine(self.config, self.shape, self.params)

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
    """A critic's values at the ends of each episode's turns, float64 [turns]."""
    episodes = [t for t in episodes if t.turns]
    shape = packing.MicrobatchShape(16, self.config.engine.slots)
    models = credit.Models(self.params, self.shape, params)
    table = credit.score(table_lib.build(episodes), PPO, models, shape=shape)
    actions = table.take(table.action_mask)
    last = table_lib.ends(actions.turn)
    owner, values = actions.trajectory[last], actions.column('values')[last]
    return [values[owner == i] for i in range(len(episodes))]


def fit_head(config: config_lib.Config, out: pathlib.Path, make_env, tasks: int):
  """Saves the policy with a value head that predicts its own episodes' exact match.

  The layers stay those of the policy. The head is the ridge regression of the returns on
  the hidden states in which the last tokens of turns were chosen. States and returns are
  centred on the same turn of the same question: without that, the head learns which
  questions are easy, and prefers the turns that look like theirs.

  Args:
    config: The configuration; model.path is the policy.
    out: Where the policy with the head is written.
    make_env: Makes an environment whose reward is exact match.
    tasks: The number of training questions, of each of which 4 episodes are played.
  """
  player = Player(config, {'train': miniwiki.train_tasks(0, 4096)[:tasks]})
  episodes = player.play(make_env, rollout.ON_POLICY, 4)['train']
  x, y, turns = read_states(player, [t for t in episodes if t.turns])
  centre = lambda a: a - (np.bincount(turns, a) / np.bincount(turns))[turns]
  moved = np.stack([centre(column) for column in x.T], 1)
  gram = moved.T @ moved / len(x) + 1e-3 * np.eye(x.shape[1])
  kernel = np.linalg.solve(gram, moved.T @ centre(y) / len(x))
  head = {'kernel': kernel[:, None], 'bias': np.array([(y - x @ kernel).mean()])}
  params = player.params | {'value_head': {k: jnp.float32(a) for k, a in head.items()}}
  how = critic.describe(PPO, config.model.path, privileged=False) or {}
  how |= {'rewards': ['less the mean of the question']}
  source = config.model.path
  weights.save(out, player.shape, params, tokenizer_from=source, value_head=how)


def read_states(player: Player, episodes: Sequence[types.Trajectory]):
  """Reads the hidden states in which the last tokens of turns were chosen.

  Returns:
    The states, float64 [turns, D]; the reward of each turn's episode; and a number that
    is the same for the same turn of one question's episodes.
  """
  forward = jax.jit(functools.partial(decoder.hidden, config=player.shape))
  shape = packing.MicrobatchShape(16, player.config.engine.slots)
  states, returns = [], []
  for i in range(0, len(episodes), 256):
    table = table_lib.build(episodes[i : i + 256])
    batches, layout = packing.pack_microbatches(table, shape)
    texts = [
      {name: getattr(b, name) for name in ('tokens', 'positions', 'segment_ids')}
      for b in batches
    ]
    hidden = np.concatenate([forward(player.params, **text) for text in texts])
    x = hidden.reshape(-1, player.shape.embed_dim)[layout.index]
    actions = np.flatnonzero(table.action_mask)
    last = actions[table_lib.ends(table.turn[actions])]
    states.append(x[last - 1].astype(np.float64))
    returns.append(table.scores[table.trajectory[last]])
  numbers = [(t.group, i) for t in episodes for i in range(len(t.turns))]
  _, turns = np.unique(numbers, axis=0, return_inverse=True)
  return np.concatenate(states), np.concatenate(returns), turns


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
    sampled = [s.logprobs[s.action_mask] for s in t.segments]
    return float(np.concatenate(sampled).mean()) if sampled else -math.inf

  def value(t):
    return float(values[id(t)][-1]) if id(t) in values else -math.inf

  def vote(group, weight):
    votes: dict[str, float] = {}
    for t in group:
      if (said := answer(t)) is not None:
        votes[said] = votes.get(said, 0.0) + weight(t)
    if not votes:
      return group[0]
    winner = max(votes, key=lambda said: votes[said])
    return next(t for t in group if answer(t) == winner)

  return {
    'episodes, likeliest': [max(g, key=likelihood) for g in groups],
    'episodes, majority': [vote(g, lambda t: 1.0) for g in groups],
    'episodes, highest value': [max(g, key=value) for g in groups],
    'episodes, majority by value': [
      vote(g, lambda t: max(value(t), 1e-6)) for g in groups
    ],
    'episodes, best (oracle)': [
      max(g, key=lambda t: t.metrics.get('em', 0.0)) for g in groups
    ],
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


def tilted(candidate: choice.Candidate) -> float:
  """log π(turn) + V / β, for the likeliest turn under π exp(V / β)."""
  return float(candidate.reply.logprobs.sum()) + candidate.value / _BETA.value


def play_turns(player: Player, critic_dir, make_env, path: pathlib.Path):
  """Plays with candidates of each turn."""
  ways = {'greedy': (1, evaluate.GREEDY), 'sampled': (1, rollout.ON_POLICY)}
  for k in [2**i for i in range(int(math.log2(_MOST.value)), 0, -1)]:
    dirs = critic_dir, player.config.model.path
    by_value = choice.by_value(player.engine, *dirs, candidates=k, gamma=1.0)
    choices = {
      'turns, highest value': by_value,
      'turns, likeliest by π exp(V / β)': by_value._replace(score=tilted),
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
  params, _ = critic.load(critic_dir, player.config.model.path, gamma=1.0)
  if evaluation_cache.find(path, {'method': 'calibration', 'seed': seed}):
    return
  start = time.time()
  played = player.play(make_env, rollout.ON_POLICY, most)
  seconds = time.time() - start
  every = [t for ts in played.values() for t in ts if t.turns]
  values = dict(zip(map(id, every), player.values(every, params), strict=True))
  for k in [2**i for i in range(1, int(math.log2(most)) + 1)]:
    taken: dict[str, dict[str, list]] = {}
    tokens = 0.0
    for name, ts in played.items():
      groups = [ts[i : i + k] for i in range(0, len(ts), most)]
      tokens += sum(map(sampled_tokens, groups))
      for how, chosen in select_episodes(groups, values).items():
        taken.setdefault(how, {})[name] = chosen
    for how, chosen in taken.items():
      line = measure(chosen, tokens, seconds * k / most, k)
      add(path, {'method': how, 'seed': seed} | line)
  add(path, {'method': 'calibration', 'seed': seed} | calibrate(every, values))


def calibrate(episodes, values) -> dict[str, Any]:
  """Compares values at the ends of turns with what the episodes earned from there."""
  found = {'last turn': ([], []), 'turns before': ([], [])}
  for t in episodes:
    for i, v in enumerate(values[id(t)]):
      where = found['last turn' if i + 1 == len(t.turns) else 'turns before']
      where[0].append(v)
      where[1].append(t.metrics.get('em', 0.0))
  result = {}
  for name, (v, r) in found.items():
    v, r = np.array(v), np.array(r)
    bins = np.clip((v * 10).astype(int), 0, 9)
    result[name] = {
      'bins': [
        [float(v[bins == b].mean()), float(r[bins == b].mean()), int((bins == b).sum())]
        for b in range(10)
        if (bins == b).any()
      ],
      'correlation': float(np.corrcoef(v, r)[0, 1]),
      'auc': float(_auc(v, r)),
      'ece': float(
        sum(abs((v - r)[bins == b].sum()) for b in range(10)) / max(len(v), 1)
      ),
    }
  return result


def _auc(v: np.ndarray, r: np.ndarray) -> float:
  """The chance that a right state has a higher value than a wrong one."""
  from scipy import stats

  ranks, right = stats.rankdata(v), r > 0.5
  n = right.sum()
  return (ranks[right].sum() - n * (n + 1) / 2) / max(n * (~right).sum(), 1)


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
  workdir = pathlib.Path(_WORKDIR.value)
  config = fields.replace(_CFG.value, {'model.path': _POLICY.value})
  tool = search.search_tool(miniwiki.index(0), k=1)
  make_env, _ = comparison.make_envs(tool, qa.em_reward)
  critic_dir = pathlib.Path(_CRITIC.value or workdir / 'critic')
  if not critic_dir.exists():
    fit_head(config, critic_dir, make_env, tasks=1500)
  if not _CRITIC.value:  # The policy with the head is the policy.
    config = fields.replace(config, {'model.path': str(critic_dir)})
  sets = {n: miniwiki.test_set(n, _QUESTIONS.value, 0, _SPLIT.value) for n in SETS}
  player = Player(config, sets)
  path = workdir / f'results-{_SPLIT.value}-{_QUESTIONS.value}.jsonl'
  play_episodes(player, critic_dir, make_env, path)
  play_turns(player, critic_dir, make_env, path)


if __name__ == '__main__':
  app.run(main)
