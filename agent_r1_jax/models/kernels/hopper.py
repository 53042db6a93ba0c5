"""When kernels for GPUs of Hopper's kind (H100, H200) are used.

Each process checks one before its first use: such a kernel is compiled for GPUs that are
not here, so that what it computes on one is not known before.
"""

import concurrent.futures
import functools
import logging
import os
import threading
from typing import Any

import jax
import numpy as np

from agent_r1_jax.models import sharding

# In the names of GPUs with the instructions that the kernels have; GH200 and H200 too.
_HOPPER = ('H100', 'H20', 'H800')
# The most that outputs of size 1, or a part of the largest number of outputs and
# gradients, may differ from XLA's: a few bits of bfloat16.
_LARGEST_GAP = 0.05
# How long that is waited for, compilation included.
_CHECK_SECONDS = 300.0
_LOGGER = logging.getLogger(__name__)


def is_here() -> bool:
  """Whether programs are for a GPU of the kind of the H100."""
  return sharding.platform() == 'gpu' and any(
    kind in sharding.device_kind() for kind in _HOPPER
  )


def find_gap(found: Any, plain: Any) -> float:
  """Finds the largest difference of arrays, as a share of the largest of the plain ones.

  The host does: XLA's maximum may leave NaN out (on a CPU, jax 0.10.2).
  """

  def compare(x, y):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    return np.abs(x - y).max() / np.abs(y).max()

  return float(np.max(jax.tree.leaves(jax.tree.map(compare, found, plain))))


@functools.cache
def passes_check(kernel: Any, *sizes) -> bool:
  """Whether a kernel for GPUs computes here what XLA does; else a warning says so.

  Args:
    kernel: A module with `measure_gap`, `VARIABLE`, which is 0 in the environment to
      leave the kernel out, and what happens `INSTEAD`.
    *sizes: What its `measure_gap` is given.
  """
  if os.environ.get(kernel.VARIABLE) == '0':
    return False
  if jax.default_backend() != 'gpu':
    return True  # Programs are only compiled, for GPUs that are not here.
  answer: concurrent.futures.Future[float] = concurrent.futures.Future()

  def measure():
    try:
      answer.set_result(kernel.measure_gap(*sizes))
    except Exception as error:  # Whatever its compiler or the driver raises.
      answer.set_exception(error)

  # A thread of its own, where no program is being traced; nobody waits for its end.
  threading.Thread(target=measure, daemon=True).start()
  try:
    gap = answer.result(_CHECK_SECONDS)
  except TimeoutError as error:
    # What hangs on a GPU holds up all that comes after it.
    raise RuntimeError(
      f'the check of {kernel.__name__} has given no answer within {_CHECK_SECONDS:g} '
      f'seconds; {kernel.VARIABLE}=0 leaves the kernel out.'
    ) from error
  except Exception as error:
    _LOGGER.warning('%s: %s', kernel.INSTEAD, error)
    return False
  if not gap < _LARGEST_GAP:
    _LOGGER.warning('%s: the kernel is off by %g', kernel.INSTEAD, gap)
  return gap < _LARGEST_GAP


def passes_everywhere(kernel: Any, *sizes) -> bool:
  """Whether the kernel passes its check, of a program that all processes run together.

  Raises:
    RuntimeError: It fails here, and there are other processes, which may use it.
  """
  passes, left_out = passes_check(kernel, *sizes), os.environ.get(kernel.VARIABLE) == '0'
  if not passes and not left_out and jax.process_count() > 1:
    raise RuntimeError(
      f'{kernel.__name__} does not pass its check in this process (see above). All '
      f'processes have to compute by the same kernel: start all of them with '
      f'{kernel.VARIABLE}=0.'
    )
  return passes
