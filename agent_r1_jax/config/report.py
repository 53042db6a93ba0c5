"""Settings of alarms."""

import dataclasses


@dataclasses.dataclass
class Alarms:
  """Limits of metrics beyond which an alarm is logged.

  Attributes:
    entropy: The least mean entropy of the policy, in nats per token.
    kl: The greatest mean KL, to the reference and to the policy that sampled.
    dead_groups: The greatest share of played groups whose rewards are all equal.
    truncated: The greatest share of episodes that ran out of tokens or turns.
    invalid_calls: The greatest share of tool calls that could not be parsed or run.
    tool_failures: The greatest share of tool calls whose tool raised or was late.
    isolated_calls: The greatest share of tool calls that are not made because their tool
      keeps failing (agent/breaker.py).
    action_share: The least share of a trajectory's tokens that the policy sampled.
    hacking: The greatest rise of the reward over the last `window` steps while
      `true_metric` does not rise, in standard errors: the mean of the later half less
      that of the earlier one.
    true_metric: The name in metrics.jsonl of the metric that the reward should improve.
    window: The number of steps over which a rise is measured; at least 4.
  """

  entropy: float = 0.01
  kl: float = 1.0
  dead_groups: float = 0.9
  truncated: float = 0.3
  invalid_calls: float = 0.5
  tool_failures: float = 0.5
  isolated_calls: float = 0.0
  action_share: float = 0.02
  hacking: float = 2.0
  true_metric: str = 'rollout/em'
  window: int = 20

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    if self.window < 4:
      raise ValueError(f'alarms.window is {self.window}; it must be at least 4.')
