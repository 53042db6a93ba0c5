"""Rewards that fit any task: parts to mix, and shaping that keeps the best policy."""

from collections.abc import Awaitable, Callable, Sequence
import math

from agent_r1_jax import types
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import workers

Messages = list[types.Message]
# How promising a conversation looks; the same for the same conversation.
Potential = Callable[[types.Task, Messages], float | Awaitable[float]]


def hybrid(**parts: tuple[float, env_lib.Reward]) -> env_lib.Reward:
  """r = Σₖ wₖ · rₖ, each part logged as 'reward/<name>' with its weight.

    hybrid(outcome=(1.0, qa.em_reward), format=(0.2, well_formed))

  Args:
    **parts: Of each name a weight and a reward, sync or async, that returns a number.
  """
  for name, part in parts.items():
    if not (isinstance(part, tuple) and len(part) == 2 and callable(part[1])):
      raise ValueError(f'{name}={part!r}: give a weight and a reward.')
    if not math.isfinite(part[0]):
      raise ValueError(f'{name}: the weight {part[0]} must be finite.')

  async def reward(
    task: types.Task, messages: Messages, status: str = 'done'
  ) -> dict[str, float]:
    return {
      name: weight * await _number(env_lib.bind_status(part, status), task, messages)
      for name, (weight, part) in parts.items()
    }

  return reward


def well_formed(
  task: types.Task,
  messages: Messages,
  *,
  parse: Callable[[str], Sequence[env_lib.Call]] = calls_lib.parse_hermes,
) -> float:
  """The share of the agent's tool calls that can be read; 1 where it made none."""
  calls = _calls(task, messages, parse)
  return (
    sum(isinstance(c, calls_lib.ToolCall) for c in calls) / len(calls) if calls else 1.0
  )


def potential_based(potential: Potential, gamma: float = 1.0) -> env_lib.ProcessReward:
  """F(s, s') = γ Φ(s') - Φ(s) of each turn, with Φ = 0 when the episode is over.

    ToolEnv(tools, reward, process_reward=potential_based(found_share))

  Ng, Harada and Russell (ICML 1999): the only shaping that leaves the best policy as it
  is, whatever Φ. The last turn pays -Φ(s), so the episode's Σ γᵗ F is -Φ(s₀), whatever
  the agent did; only when it is paid differs. Three things follow:

  - With γ = 1, what looks at an episode's sum alone (GRPO, RLOO) sees no difference in a
    group. It helps estimators with a return for each turn.
  - An episode that its budget cut short (truncated, max_turns) gets no last payment, and
    keeps Φ of where it was: bound Φ, or let the budget be ample.
  - γ is for a turn here. Where an estimator discounts by the token, only γ = 1 is exact.

  Args:
    potential: Φ of the task and the conversation, sync or async. It is asked twice a
      turn, so that it needs no memory.
    gamma: Of the return that is maximised, for a turn.
  """

  async def process_reward(env: env_lib.ToolEnv, calls, results) -> float:
    messages = env.messages
    acted = max(i for i, m in enumerate(messages) if m['role'] == 'assistant')
    before = await _number(potential, env.task, messages[:acted])
    # The turn without a call is the last.
    after = await _number(potential, env.task, messages[:]) if calls else 0.0
    return gamma * after - before

  return process_reward


async def _number(
  reward: env_lib.Reward, task: types.Task, messages: Sequence[types.Message]
) -> float:
  """What a reward gives; each gets copies, a plain function in a thread."""
  value = await workers.call(
    reward, env_lib.copy_containers(task), env_lib.copy_containers(messages)
  )
  if isinstance(value, dict):
    raise ValueError(f'{value} has parts; here a reward must be one number.')
  return float(value)


def _calls(task, messages, parse) -> list[env_lib.Call]:
  """The calls that the agent made; what the task itself shows is an example."""
  replies = messages[len(task.messages) :]
  return [c for m in replies if m['role'] == 'assistant' for c in parse(m['content'])]
