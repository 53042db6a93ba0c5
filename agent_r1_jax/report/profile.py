"""Traces single training steps with JAX's profiler."""

from collections.abc import Collection, Iterator
import contextlib
import os
import pathlib
import warnings

import jax


@contextlib.contextmanager
def trace_step(
  steps: Collection[int], workdir: str | os.PathLike, step: int
) -> Iterator[None]:
  """Traces all threads inside `with`, if `step` is one of `steps`.

  Writes to WORKDIR/profile/step-<step>: perfetto_trace.json.gz for ui.perfetto.dev, and
  plugins/profile/ for XProf and TensorBoard's profile plugin. A trace that cannot be
  written is only a warning.
  """
  if step not in steps:
    yield
    return
  folder = pathlib.Path(workdir) / 'profile' / f'step-{step:05d}'
  with contextlib.ExitStack() as trace:
    with _warn_of_failure(folder):
      # If JAX cannot write a trace, it stays open and blocks all later ones.
      folder.mkdir(parents=True, exist_ok=True)
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0  # Python calls would be most of the trace.
      jax.profiler.start_trace(
        str(folder), create_perfetto_trace=True, profiler_options=options
      )
      trace.callback(_stop, folder)
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      yield


def _stop(folder: pathlib.Path) -> None:
  with _warn_of_failure(folder):
    jax.profiler.stop_trace()


@contextlib.contextmanager
def _warn_of_failure(folder: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except Exception as error:
    warnings.warn(f'there is no complete trace in {folder}: {error}', stacklevel=4)
