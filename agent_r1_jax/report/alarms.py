"""Alarms: metrics that show a failing run long before its reward does."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import statistics

from agent_r1_jax import config, types
from agent_r1_jax.agent import env

# Alarm -> its message, and a remedy.
_MESSAGES = {
  'entropy_collapse': (
    'the entropy of the policy is {value:.3g} nats a token, below {limit:g}',
    'Lower optimizer.learning_rate, or add an entropy bonus or a KL.',
  ),
  'kl_blow_up': (
    'the KL of the policy is {value:.3g}, above {limit:g}',
    'Lower optimizer.learning_rate or raise the KL coefficient.',
  ),
  'dead_groups': (
    'in {value:.0%} of the groups all rewards are equal, above {limit:.0%}',
    'Nothing is learned from them: look at trajectories, take tasks that are sometimes '
    'solved, more samples, or a reward with parts.',
  ),
  'truncated': (
    '{value:.0%} of the episodes ran out of tokens or turns, above {limit:.0%}',
    'Raise limits.max_turn_tokens, limits.max_turns or engine.slots: rollout/status/* '
    'and rollout/prompt_too_long in metrics.jsonl say which.',
  ),
  'invalid_calls': (
    '{value:.0%} of the tool calls could not be read or run, above {limit:.0%}',
    "Look at the tools' answers in the trajectories and at what the prompt says of them.",
  ),
  'tool_failures': (
    'at {value:.0%} of the tool calls the tool raised or was late, above {limit:.0%}',
    'Fix the tool, or say in its description what it takes: the lines of faults have its '
    'exceptions.',
  ),
  'isolated_calls': (
    '{value:.0%} of the tool calls were not made, above {limit:.0%}, because their tool '
    'failed 20 times in a row',
    "Look at that tool's errors in the trajectories; rollout/isolated/* in metrics.jsonl "
    'names it.',
  ),
  'action_share': (
    'the policy chose {value:.1%} of the tokens, below {limit:.1%}',
    'Lower chat.max_tool_tokens or shorten the prompts.',
  ),
  'reward_fall': (
    'the reward of the last two steps is {value:.0%} below the best mean of five before, '
    'more than {limit:.0%}',
    'Go back to a checkpoint before it, with a lower optimizer.learning_rate.',
  ),
  'reward_hacking': (
    'the reward rose by {value:.1f} standard errors, above {limit:g}, and '
    'alarms.true_metric did not',
    'Look at trajectories for what the reward pays by mistake. Lower the weight of '
    'reward models and judges, or let it decay.',
  ),
}
# The alarms for values that are too small.
_BELOW = ('entropy_collapse', 'action_share')
# Metrics that AlarmMonitor adds: the rise of the reward, or 0 if the true metric rose
# too, and the fall of the reward.
_HACKING, _FALL = 'hacking', 'fall'
# A metric has risen if its rise is at least this many standard errors.
_LEAST_RISE = 1.0


class AlarmMonitor:
  """Checks alarms; prints a line when an alarm begins or ends."""

  def __init__(
    self,
    limits: config.Alarms,
    print_line: Callable[[str], None],
    before: Iterable[Mapping[str, float]] = (),
  ):
    """Begins without alarms; `before` has the metrics of a resumed run's steps."""
    self._limits, self._print_line = limits, print_line
    self._active: set[str] = set()
    # (reward, true metric) of the last steps.
    self._history = collections.deque(maxlen=limits.window)
    self._rewards: list[float] = []
    for numbers in before:
      self._remember(numbers)

  def check(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns 'alarm/NAME' (1 or 0) for a step; prints alarms that began or ended."""
    self._remember(numbers)
    added = {_HACKING: self._measure_hacking(), _FALL: fall(self._rewards)}
    numbers = {**numbers, **added}
    alarms = compare(numbers, self._limits)
    for name, (value, limit, active) in alarms.items():
      if active and name not in self._active:
        message, remedy = _MESSAGES[name]
        message = message.format(value=value, limit=limit)
        self._print_line(f'Alarm at step {step}, {name}: {message}. {remedy}')
      elif name in self._active and not active:
        self._print_line(f'Alarm over at step {step}: {name}.')
    self._active = {name for name, (_, _, active) in alarms.items() if active}
    return {f'alarm/{name}': float(active) for name, (_, _, active) in alarms.items()}

  def _remember(self, numbers: Mapping[str, float]):
    """Adds a step's reward and true metric to the history, if it has them."""
    if 'rollout/reward' in numbers:
      self._rewards.append(numbers['rollout/reward'])
    pair = [numbers.get(x) for x in ('rollout/reward', self._limits.true_metric)]
    if None not in pair:
      self._history.append(pair)

  def _measure_hacking(self) -> float:
    """Returns the rise of the reward if the true metric did not rise, else 0."""
    if len(self._history) < self._limits.window:
      return 0.0
    reward, metric = (rise(column) for column in zip(*self._history, strict=True))
    return reward if metric < _LEAST_RISE else 0.0


# Prefixes of a trajectory's metrics that count faults of users' code.
_TOOLS = ('tool_error/', 'outage/')
_FAULTS = ('error/', 'abandoned/', 'isolated/', 'tool_timeouts', *_TOOLS)


class FaultCounter:
  """Prints each new kind of fault in users' code, and all counts at the end."""

  def __init__(self, print_line: Callable[[str], None]):
    """Begins without faults; `print_line` prints a line."""
    self._print_line = print_line
    self._counts: collections.Counter[str] = collections.Counter()

  def count(self, step: int, trajectories: Iterable[types.Trajectory]) -> None:
    """Counts the faults in a step's trajectories; prints each new kind."""
    examples: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
      for name, value in trajectory.metrics.items():
        # An environment's own metric may have such a name, and be NaN.
        if name.startswith(_FAULTS) and math.isfinite(value) and value:
          counts[name] += int(value)
          example = trajectory.error if name.startswith('error/') else ''
          if name.startswith(_TOOLS):
            example = env.find_tool_error(trajectory.messages, name)
          examples[name] = examples.get(name) or example or ''
    for name in sorted(counts.keys() - self._counts.keys()):
      text = f': {examples[name][:300]}' if examples[name] else ''
      self._print_line(
        f'Fault at step {step}, {name}: {counts[name]} so far{text} '
        '(counted in metrics.jsonl; said once)'
      )
    self._counts += counts

  def report_totals(self) -> None:
    """Prints the number of faults of each kind since this start, if any."""
    if self._counts:
      each = ', '.join(f'{name} {n}' for name, n in sorted(self._counts.items()))
      self._print_line(f'Faults since this start: {each}')


def rise(numbers: Sequence[float]) -> float:
  """Returns (mean of the second half - mean of the first half) / its standard error.

  Of an odd number, the middle value is left out.
  """
  half = len(numbers) // 2
  parts = numbers[:half], numbers[-half:]
  earlier, later = map(statistics.fmean, parts)
  error = math.sqrt(sum(map(statistics.variance, parts)) / half)
  # Equal rewards may have means that differ by rounding.
  return (later - earlier) / (error + 1e-9)


def fall(rewards: Sequence[float]) -> float:
  """Returns how far the last two are below the best five in a row before them.

  It is relative to the mean of these five; 0 if there are fewer, or the mean is not
  positive.
  """
  if len(rewards) < 7:
    return 0.0
  best = max(statistics.fmean(rewards[i - 5 : i]) for i in range(5, len(rewards) - 1))
  return 1 - statistics.fmean(rewards[-2:]) / best if best > 0 else 0.0


def compare(
  numbers: Mapping[str, float], limits: config.Alarms
) -> dict[str, tuple[float, float, bool]]:
  """Returns each alarm's metric, its limit, and whether it is beyond the limit.

  `numbers` has a step's metrics by the names that train.run writes; a missing metric
  raises no alarm.
  """
  get = lambda name: numbers.get(f'rollout/{name}', 0.0)
  kls = (numbers.get(f'train/{name}', 0.0) for name in ('kl', 'behaviour_kl'))
  truncated = sum(get(f'status/{status}') for status in types.BUDGET_STATUSES)
  calls, unread = get('tool_calls'), get('format_errors')
  failed = get('tool_failures')
  invalid = (get('tool_errors') - failed + unread) / max(calls + unread, 1e-9)
  share = get('action_tokens') / get('tokens') if get('tokens') else 1.0
  measured = {
    'kl_blow_up': (max(map(abs, kls)), limits.kl),
    'dead_groups': (get('dead_groups'), limits.dead_groups),
    'truncated': (truncated, limits.truncated),
    'invalid_calls': (invalid, limits.invalid_calls),
    'tool_failures': (failed / max(calls, 1e-9), limits.tool_failures),
    'isolated_calls': (get('isolated_calls') / max(calls, 1e-9), limits.isolated_calls),
    'reward_fall': (numbers.get(_FALL, 0.0), limits.reward_fall),
    'reward_hacking': (numbers.get(_HACKING, 0.0), limits.hacking),
    'entropy_collapse': (numbers.get('train/entropy', limits.entropy), limits.entropy),
    'action_share': (share, limits.action_share),
  }
  return {
    name: (value, limit, value < limit if name in _BELOW else value > limit)
    for name, (value, limit) in measured.items()
  }
