"""Alarms: what goes wrong in a run long before its reward says so, as metrics."""

from collections.abc import Mapping
import dataclasses

from agent_r1_jax import types


@dataclasses.dataclass
class Limits:
  """Beyond which a number rings.

  Attributes:
    entropy: The least mean entropy of the policy, in nats a token.
    kl: The greatest mean KL, to the reference and of the update to its rollout.
    dead_groups: The greatest share of groups whose rewards are all equal, of those that
      were played.
    truncated: The greatest share of episodes that a budget ended.
    invalid_calls: The greatest share of calls that could not be read or run.
    action_share: The least share of a trajectory's tokens that the policy chose.
  """

  entropy: float = 0.01
  kl: float = 1.0
  dead_groups: float = 0.9
  truncated: float = 0.3
  invalid_calls: float = 0.5
  action_share: float = 0.02


def ring(numbers: Mapping[str, float], limits: Limits) -> dict[str, float]:
  """'alarm/<name>' is 1 where a number is beyond its limit, else 0.

  Args:
    numbers: Of one step, by the names that train.run writes; what is absent rings not.
    limits: Of the run.
  """
  beyond = {
    'entropy_collapse': numbers.get('train/entropy', limits.entropy) < limits.entropy,
    'kl_blow_up': any(
      abs(numbers.get(f'train/{name}', 0.0)) > limits.kl
      for name in ('kl', 'behaviour_kl')
    ),
    'dead_groups': numbers.get('rollout/dead_groups', 0.0) > limits.dead_groups,
    'truncated': _truncated(numbers) > limits.truncated,
    'invalid_calls': _invalid(numbers) > limits.invalid_calls,
    'action_share': _share(numbers) < limits.action_share,
  }
  return {f'alarm/{name}': float(rings) for name, rings in beyond.items()}


def _truncated(numbers) -> float:
  return sum(numbers.get(f'rollout/status/{status}', 0.0) for status in types.BUDGETS)


def _invalid(numbers) -> float:
  of = lambda name: numbers.get(f'rollout/{name}', 0.0)
  failed = of('tool_errors') + of('format_errors')
  return failed / max(of('tool_calls') + of('format_errors'), 1e-9)


def _share(numbers) -> float:
  tokens = numbers.get('rollout/tokens', 0.0)
  return numbers.get('rollout/action_tokens', 0.0) / tokens if tokens else 1.0
