"""First light, last part: profiles the measurements below .6 of their bound.

Each runs again under JAX's profiler. Device events are sorted into kinds by the names of
kernels and HLO instructions. The time of an event excludes the events inside it.
"""

import collections
from collections.abc import Callable, Iterator
import functools
import pathlib
import re
import tempfile
from typing import Any, NamedTuple
import warnings

import jax

from experiments.bench.light import lines, sampler
from experiments.bench.light import update as update_lib

# The first kind counts whose pattern matches the name of a kernel or its instruction.
_KINDS = {
  'attention': r'attention|fmha|flash|splash|cudnn',
  'products': r'gemm|cublas|cutlass|nvjet|xmma|\bdot|dot_|_dot|conv(?!ert)|ynn',
  'sorts and scatters': r'sort|scatter',
  'copies': r'copy|memcpy|transpose|memset|concatenate|slice|pad|gather',
  'reductions': r'reduce|norm|softmax|cumsum',
  'elementwise': r'fusion|add|multiply|select|convert|exp|tanh|wrapped|broadcast',
}


class Event(NamedTuple):
  """An event on a device from `start` to `end`, in nanoseconds."""

  name: str
  start: float
  end: float


def profile() -> Iterator[lines.Line]:
  """Yields a line for each measurement below LEAST_RATIO, as long as time is left."""
  calls = {}
  cases = update_lib.REHEARSAL if lines.is_tiny() else update_lib.CASES
  for case in cases:
    calls[case.name] = functools.partial(_make_update, case)
  decodes = sampler.REHEARSAL if lines.is_tiny() else sampler.CASES
  for case in decodes:
    for used in case.used:
      calls[case.name_line(used)] = functools.partial(_make_decode, case, used)
  # Other parts use the same names for other programs. The newest line counts.
  parts, found = ('update', 'sampler'), lines.read(lines.out())
  newest = {line['what']: line for line in found if line['part'] in parts}
  for what, line in newest.items():
    if what not in calls or line.get('ratio', 1) >= lines.LEAST_RATIO:
      continue
    try:
      yield {'what': what, 'of': line['part'], **describe(trace(calls[what]()))}
    except Exception as error:
      yield {'what': what, 'failed': lines.describe_error(error)}


def trace(call: Callable[[], Any]) -> list[list[Event]]:
  """Traces one call, after one that compiles; returns the events of each stream."""
  jax.block_until_ready(call())
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
      jax.block_until_ready(call())
    finally:
      jax.profiler.stop_trace()
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    return read_events(path)


def read_events(path: pathlib.Path) -> list[list[Event]]:
  """Reads the events of instructions, one list per stream or thread."""
  planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
  devices = [plane for plane in planes if plane.name.startswith('/device:')]
  found = []
  for plane in devices or planes:
    for line in plane.lines:
      # Other lines of a device's plane repeat the same events.
      if plane in devices and not line.name.startswith(('Stream', 'XLA Ops')):
        continue
      events = []
      for event in line.events:
        with warnings.catch_warnings():  # About a type without a module.
          warnings.simplefilter('ignore')
          stats: dict[str, Any] = {key: value for key, value in event.stats}
        name = f'{event.name} {stats.get("hlo_op", "")}'
        if devices or 'hlo_op' in stats:
          start = event.start_ns
          events.append(Event(name, start, start + event.duration_ns))
      if events:
        found.append(events)
  if not found:
    raise RuntimeError('the trace has no events of a device')
  return found


def describe(streams: list[list[Event]]) -> lines.Line:
  """Describes a trace: the share of each kind of event, and the largest events."""
  times: collections.Counter[str] = collections.Counter()
  for events in streams:
    for name, nanoseconds in count_own_time(events):
      times[name] += nanoseconds  # pyright: ignore[reportArgumentType]
  total = sum(times.values())
  kinds: collections.Counter[str] = collections.Counter()
  for name, nanoseconds in times.items():
    kinds[find_kind(name)] += nanoseconds
  every = [event for events in streams for event in events]
  passed = max(e.end for e in every) - min(e.start for e in every)
  shares = {kind: round(x / total, 3) for kind, x in kinds.most_common()}
  largest = {name.strip()[:60]: round(x / total, 3) for name, x in times.most_common(5)}
  return {
    'shares': shares,
    'largest': largest,
    'idle': round(max(0.0, 1 - total / passed), 3),
    'milliseconds': round(passed / 1e6, 3),
  }


def count_own_time(events: list[Event]) -> Iterator[tuple[str, float]]:
  """Yields each event's name, and its time without the events inside it."""
  own, around = {}, []
  ordered = sorted(events, key=lambda e: (e.start, -e.end))
  for number, event in enumerate(ordered):
    while around and ordered[around[-1]].end <= event.start:
      around.pop()
    own[number] = event.end - event.start
    if around:
      own[around[-1]] -= own[number]
    around.append(number)
  for number, nanoseconds in own.items():
    yield ordered[number].name, max(0.0, nanoseconds)


def find_kind(name: str) -> str:
  """Finds the kind of an event by the names of its kernel and its instruction."""
  matches = (k for k, pattern in _KINDS.items() if re.search(pattern, name, re.I))
  return next(matches, 'other')


def _make_update(case: update_lib.Case) -> Callable[[], Any]:
  return update_lib.make_update(case)[0]


def _make_decode(case: sampler.Case, used: int) -> Callable[[], Any]:
  return functools.partial(sampler.make_decoder(case).call, used)


MEASUREMENTS = (profile,)

if __name__ == '__main__':
  lines.run(MEASUREMENTS)
