"""Pallas' interpreter of kernels for GPUs, which here compiles each kernel once."""

import threading

import jax
from jax._src.pallas.mosaic.interpret import thread_map

try:
  from jax.experimental.pallas.mosaic_gpu import (
    InterpretGPUParams,  # pyright: ignore[reportAttributeAccessIssue]
  )
except ImportError:  # Before jax 0.11 it has no public name.
  from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

__all__ = ['InterpretGPUParams']

_lock, _programs = threading.Lock(), {}


def _run_once_compiled(jaxpr, consts, *args):
  """Runs what a group of threads does.

  The interpreter's own function compiles it again for each group of each program of the
  grid (jax 0.10.2), or lowers it again (jax 0.11.2).
  """
  with _lock:
    if jaxpr not in _programs:
      _programs[jaxpr] = _evaluate.lower(jaxpr, consts, *args).compile()
  _programs[jaxpr](consts, *args)


@jax.jit(static_argnums=0)
def _evaluate(jaxpr, consts, *args):
  jax.core.eval_jaxpr(jaxpr, consts, *args)


thread_map._run_jaxpr = _run_once_compiled
