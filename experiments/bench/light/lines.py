"""Shared by the parts of first light: their lines of JSON, their flags, a timer.

A part is a module with `MEASUREMENTS`, functions that yield lines. A line has

  what       the name of the measurement, unique within its part
  measured   a number, with its `unit`
  bound      the best that the hardware allows, in the same unit, if known
  ratio      the fraction of the bound that was reached; 1 is perfect; see `make`
  published  the MFU that others publish for it
  failed     instead of a number: why there is none

and further fields. It is written as soon as it is known.
"""

from collections.abc import Callable, Iterator, Sequence
import json
import os
import pathlib
import statistics
import time
from typing import Any

from absl import app, flags
import jax

from agent_r1_jax.host import runtime

Line = dict[str, Any]
# Values of --shape: the sizes to measure, and tiny ones for a rehearsal on a CPU.
SHAPES = ('full', 'tiny')
FILE = 'lines.jsonl'
# Measurements below this ratio are profiled.
LEAST_RATIO = 0.6

# Not in absl's global flags until a script starts: a program may also import other
# scripts with flags of these names.
FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string('out', '', 'The folder of lines.jsonl.', FLAGS)
_PART = flags.DEFINE_string('part', '', 'The name of this part.', FLAGS)
_SHAPE = flags.DEFINE_enum(
  'shape', 'full', SHAPES, 'Sizes, or those of a rehearsal.', FLAGS
)
_END = flags.DEFINE_float(
  'end', float('inf'), 'When this part is ended, Unix time.', flag_values=FLAGS
)


def run_app(main: Callable[[Any], None]) -> None:
  """Runs `main` as absl does, with the flags of first light."""

  def begin(argv):
    FLAGS.mark_as_parsed()
    main(argv)

  flags.FLAGS.append_flag_values(FLAGS)
  app.run(begin)


def run(
  measurements: Sequence[Callable[[], Iterator[Line]]], *, device: bool = True
) -> None:
  """Runs a part; a measurement that raises becomes one line, and the next one runs.

  Without `device`, the part leaves the accelerator to another process or library.
  """

  def main(_):
    runtime.quiet_logging()
    if device:
      runtime.initialize()
    for measure in measurements:
      try:
        for line in measure():
          write(_OUT.value, _PART.value, line)
      except Exception as error:  # Compilers, drivers and libraries raise any type.
        name = measure.__name__.replace('_', ' ')
        write(_OUT.value, _PART.value, {'what': name, 'failed': describe_error(error)})
    # Do not wait for threads that still compile, or drivers that hang.
    os._exit(0)

  run_app(main)


def write(out: str | os.PathLike, part: str, line: Line) -> None:
  """Appends a part's line to the file, and prints it."""
  text = json.dumps({'part': part} | line)
  with pathlib.Path(out, FILE).open('a') as file:
    print(text, file=file)
  print(text, flush=True)


def read(path: str | os.PathLike) -> list[Line]:
  """Reads the lines of a folder or a file; skips truncated lines."""
  path = pathlib.Path(path)
  path = path / FILE if path.is_dir() else path
  found = []
  for text in path.read_text().splitlines() if path.exists() else ():
    try:
      found.append(json.loads(text))
    except ValueError:  # The process was killed while writing.
      continue
  return found


def make(
  what: str,
  measured: float,
  unit: str,
  bound: float | None = None,
  *,
  higher_is_better: bool = False,
  **more: Any,
) -> Line:
  """Makes a line, with the ratio of the measurement to the hardware's bound."""
  line: Line = {'what': what, 'measured': measured, 'unit': unit}
  if bound:
    ratio = measured / bound if higher_is_better else bound / measured
    line |= {'bound': bound, 'ratio': round(ratio, 4)}
  return line | more


def describe_error(error: BaseException) -> str:
  """Returns an error as one line of at most 400 characters."""
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text}'[:400]


def get_part() -> str:
  """Returns the value of --part."""
  return _PART.value


def is_tiny() -> bool:
  """Whether this is a rehearsal."""
  return _SHAPE.value == 'tiny'


def get_shape() -> str:
  """Returns the value of --shape."""
  return _SHAPE.value


def has_out() -> bool:
  """Whether --out is given."""
  return bool(_OUT.value)


def out() -> pathlib.Path:
  """Returns the folder of this first light."""
  return pathlib.Path(_OUT.value)


def count_seconds_left() -> float:
  """Returns the seconds until this part is ended; without --end, 600."""
  return min(600.0, _END.value - time.time())


def find(part: str, what: str) -> float | None:
  """Returns an earlier part's latest measurement, or None if it has none."""
  found = (x for x in read(out()) if (x['part'], x['what']) == (part, what))
  return next((x.get('measured') for x in reversed([*found])), None)


def measure_seconds(
  call: Callable[[], Any], repeats: int = 3, calls: int = 1
) -> tuple[float, float]:
  """Times a call that returns arrays.

  Args:
    call: The call to time.
    repeats: How often it is timed.
    calls: How many calls are timed together, which keeps the device's queue full.

  Returns:
    The seconds of the first call, with compilation, and the median seconds per call of
    the repetitions.
  """
  start = time.perf_counter()
  jax.block_until_ready(call())
  first, times = time.perf_counter() - start, []
  for _ in range(repeats):
    start = time.perf_counter()
    last = None
    for _ in range(calls):
      last = call()
    jax.block_until_ready(last)
    times.append((time.perf_counter() - start) / calls)
  return first, statistics.median(times)
