"""Rewards that fit any task: mixtures, the format of calls, and potential shaping."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import math

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, scoring
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import workers

Messages = list[types.Message]
# The value Φ of a conversation; it must be deterministic.
Potential = Callable[[types.Task, Messages], float | Awaitable[float]]
# A weight, or its schedule: from the number of rollouts trained on to the weight.
Weight = float | Callable[[int], float]


def hybrid(**parts: tuple[Weight, env_lib.Reward]) -> env_lib.Reward:
  """r = Σₖ wₖ · rₖ; each weighted part is logged as 'reward/<name>'.

    hybrid(outcome=(1.0, qa.em_reward), format=(0.2, well_formed))

  A weight may be a schedule over the run, such as one of optax's:

    hybrid(outcome=(1.0, em), model=(optax.linear_schedule(0.3, 0.0, 40), model))

  The parts are computed concurrently.

  Args:
    **parts: A weight and a reward function, sync or async, which returns a number.
  """
  for name, part in parts.items():
    if not (isinstance(part, tuple) and len(part) == 2 and callable(part[1])):
      raise ValueError(f'{name}={part!r}: give a weight and a reward.')
    if not callable(part[0]) and not math.isfinite(part[0]):
      raise ValueError(f'{name}: the weight {part[0]} must be finite.')

  def weigh(weight: Weight) -> float:
    return float(weight(scoring.policy_step.get()) if callable(weight) else weight)

  async def reward(
    task: types.Task, messages: Messages, status: str = 'done'
  ) -> dict[str, float]:
    calls = [
      asyncio.ensure_future(
        _call_reward(env_lib.bind_status(part, status), task, messages)
      )
      for _, part in parts.values()
    ]
    try:
      values = await asyncio.gather(*calls)
    finally:
      for call in calls:  # If one fails, the others are not needed.
        call.cancel()
    weights = [weigh(weight) for weight, _ in parts.values()]
    return {n: w * v for n, w, v in zip(parts, weights, values, strict=True)}

  return reward


def well_formed(
  task: types.Task,
  messages: Messages,
  *,
  parse: Callable[[str], Sequence[env_lib.Call]] | None = None,
) -> float:
  """Returns the share of the agent's tool calls that can be parsed; 1 without calls.

  By default calls are parsed in the chat's format. Schemas are not known here, so bare
  string arguments are malformed, even if a ToolEnv understands them.
  """
  calls = []
  parse = parse or call_formats.chat_format.get().parse
  # Calls in the task's own messages are examples.
  for message in messages[len(task.messages) :]:
    if message['role'] == 'assistant':
      calls += parse(message['content'])
  parsed = sum(isinstance(call, calls_lib.ToolCall) for call in calls)
  return parsed / len(calls) if calls else 1.0


def potential_based(potential: Potential, gamma: float = 1.0) -> env_lib.ProcessReward:
  """F(s, s') = γ Φ(s') - Φ(s) for each turn, with Φ = 0 when the episode is over.

    ToolEnv(tools, reward, process_reward=potential_based(found_share))

  Ng, Harada and Russell (ICML 1999) show that this is the only shaping that preserves the
  optimal policy for every Φ. The last turn gets -Φ(s), so that an episode's Σ γᵗ F is
  -Φ(s₀), whatever the agent did; only the timing of rewards differs:

  - With γ = 1, estimators that use only an episode's sum (GRPO, RLOO) see no difference
    within a group. It helps estimators with a return per turn.
  - An episode that a budget ended (truncated, max_turns) gets no last reward and keeps Φ
    of its last state: bound Φ, or set an ample budget.
  - γ discounts turns. If an estimator discounts tokens, only γ = 1 is exact.

  Args:
    potential: Φ of the task and the conversation, sync or async. It is called twice per
      turn, so it needs no state.
    gamma: The discount per turn of the return that is maximised.
  """

  async def process_reward(env: env_lib.ToolEnv, calls, results) -> float:
    messages = env.messages
    # The messages before the turn's reply are the state s, all messages now are s'.
    acted = max(i for i, m in enumerate(messages) if m['role'] == 'assistant')
    before = await _call_reward(potential, env.task, messages[:acted])
    # A turn without a call is the last one.
    after = await _call_reward(potential, env.task, messages[:]) if calls else 0.0
    return gamma * after - before

  return process_reward


async def _call_reward(
  reward: env_lib.Reward, task: types.Task, messages: Sequence[types.Message]
) -> float:
  """Calls a reward function with copies; plain functions run in a thread."""
  value = await workers.call(
    reward, env_lib.copy_containers(task), env_lib.copy_containers(messages)
  )
  if isinstance(value, dict):
    raise ValueError(f'{value} has parts; here a reward must be one number.')
  return float(value)
