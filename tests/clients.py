"""Clients of an engine on the tiny policy, for the tests of the engine."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
import functools
import random
from typing import Any

import numpy as np
import tiny

from agent_r1_jax import types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import decoder

STOPS = tuple(range(5, 25))
SLOTS, STEPS, ROWS = (tiny.SIZES[name] for name in ('slots', 'decode_steps', 'rows'))
# One program for each step, so that log-probs repeat to the last bit.
EXACT: dict[str, Any] = {'bucket': SLOTS, 'narrow': False}
# No automaton ends these replies.
ENDLESS: dict[str, Any] = {'automata': ()}
# The parts of a text, in order; parts that were given have no log-probs.
Parts = list[tuple[np.ndarray, ...]]


@functools.cache
def params() -> decoder.Params:
  """The policy of most tests."""
  return tiny.params(tiny.config())


@functools.cache
def other_params() -> decoder.Params:
  """Another policy, which samples other tokens."""
  return tiny.params(tiny.config(), likely={100: 0.5})


@functools.cache
def stop() -> types.Automaton:
  """Ends a reply at STOPS."""
  return tiny.stop(STOPS)


def engine(**sizes: Any) -> engine_lib.Engine:
  """An engine on `params`."""
  return tiny.engine(params(), **sizes)


def tokens(seed: int, n: int) -> np.ndarray:
  """Random tokens that end no reply, int32 [n]."""
  return np.random.default_rng(seed).integers(25, tiny.VOCAB, n).astype(np.int32)


def request(
  given: np.ndarray,
  parent: request_lib.Sequence | request_lib.Fork | None = None,
  most: int = 12,
  key: Any = 0,
  **fields: Any,
) -> request_lib.Request:
  """A request whose reply may end at STOPS."""
  fields = {'automata': (stop(),)} | fields
  return request_lib.Request(
    given, parent, max_tokens=most, key=request_lib.make_key('test', str(key)), **fields
  )


def segment(parts: Parts) -> types.Segment:
  """Joins (tokens,) that were given and (tokens, log-probs[, policy steps])."""
  zeros = lambda part: np.zeros(len(part[0]), np.float32)
  steps = [part[2] if len(part) > 2 else np.int32(zeros(part)) for part in parts]
  return types.Segment(
    np.concatenate([part[0] for part in parts]),
    np.concatenate([np.full(len(part[0]), len(part) > 1) for part in parts]),
    np.concatenate([part[1] if len(part) > 1 else zeros(part) for part in parts]),
    np.concatenate(steps),
  )


def prompt(group: int) -> np.ndarray:
  """The beginning of a group's texts."""
  return tokens(group, 9 + 5 * group)


async def play(
  engine: engine_lib.Engine,
  number: int,
  *,
  latency: Callable[[], float] | None = None,
  group: int = 4,
  turns: int = 3,
  reply: int = 12,
  **fields: Any,
) -> types.Segment:
  """Plays a group's prompt, then answers that depend on the replies."""
  parts: Parts = []
  async with engine.reserve(number // group) as replica:
    given, text = prompt(number // group), None
    for _ in range(turns):
      generation = replica.submit(request(given, text, reply, number, **fields))
      answer, text = await generation, generation.sequence
      parts += [(given,), answer[:3]]
      if latency:
        await asyncio.sleep(latency())
      given = tokens(int(answer.tokens.sum()), 1 + int(answer.tokens.sum()) % 11)
    if text is not None:
      text.close()
  return segment(parts)


def run(
  engine: engine_lib.Engine, numbers: Iterable[int], **kwargs: Any
) -> dict[int, types.Segment]:
  """Plays each number and returns its segment."""
  numbers = list(numbers)
  played = [play(engine, number, **kwargs) for number in numbers]
  return dict(zip(numbers, tiny.within(engine.run, played), strict=True))


@functools.cache
def reference() -> Mapping[int, types.Segment]:
  """The segments of 16 numbers."""
  return run(engine(), range(16))


def random_latency(seconds: float = 0.004) -> Callable[[], float]:
  """Latencies of tools; three of ten answer at once."""
  rng = random.Random(0)
  return lambda: rng.random() * seconds if rng.random() < 0.7 else 0


def assert_same(
  played: Mapping[int, types.Segment],
  expected: Mapping[int, types.Segment],
  exactly: bool = False,
):
  """The same tokens, with the same log-probs up to the program's last bits."""
  assert played.keys() == expected.keys()
  for number, one in played.items():
    np.testing.assert_array_equal(one.tokens, expected[number].tokens)
    np.testing.assert_array_equal(one.action_mask, expected[number].action_mask)
    np.testing.assert_allclose(
      one.behaviour_logprobs,
      expected[number].behaviour_logprobs,
      atol=0 if exactly else 2e-5,
    )


def assert_reference(played: Mapping[int, types.Segment]):
  """Each number's segment is that of `reference`."""
  assert_same(played, {number: reference()[number] for number in played})


def assert_plays(engine: engine_lib.Engine, numbers: Iterable[int] = range(16), **kwargs):
  """The engine plays `reference`, also after an earlier run failed."""
  assert_reference(run(engine, numbers, **kwargs))
