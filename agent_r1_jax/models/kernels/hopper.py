"""Decides when kernels for Hopper GPUs (H100, H200) are used.

Each process checks a kernel before its first use: the kernels were developed by
ahead-of-time compilation, and their results on a GPU are not known in advance.
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

# Parts of the names of GPUs with the kernels' instructions, including GH200 and H200.
_HOPPER = ('H100', 'H20', 'H800')
# The largest allowed difference to XLA, for outputs of size 1 or relative to the largest
# output or gradient: a few bits of bfloat16.
_LARGEST_GAP = 0.05
# The time limit of a check, compilation included.
_CHECK_SECONDS = 300.0
_LOGGER = logging.getLogger(__name__)


def is_here() -> bool:
  """Whether programs are compiled for a Hopper GPU."""
  return sharding.platform() == 'gpu' and any(
    kind in sharding.device_kind() for kind in _HOPPER
  )


def find_gap(found: Any, plain: Any) -> float:
  """Finds the largest difference of arrays, relative to the largest plain number.

  Computed on the host, because XLA's maximum may ignore NaN (on a CPU, jax 0.10.2).
  """

  def compare(x, y):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    return np.abs(x - y).max() / np.abs(y).max()

  return float(np.max(jax.tree.leaves(jax.tree.map(compare, found, plain))))


@functools.cache
def passes_check(kernel: Any, *sizes) -> bool:
  """Whether a GPU kernel gives XLA's results on this device; warns if not.

  Args:
    kernel: A module with `measure_gap`, `VARIABLE`, which is 0 in the environment to
      disable the kernel, and `INSTEAD`, which names the fallback.
    *sizes: The arguments of `measure_gap`.
  """
  if os.environ.get(kernel.VARIABLE) == '0':
    return False
  if jax.default_backend() != 'gpu':
    return True  # Ahead-of-time compilation, without a GPU.
  answer: concurrent.futures.Future[float] = concurrent.futures.Future()

  def measure():
    try:
      answer.set_result(kernel.measure_gap(*sizes))
    except Exception as error:  # From the kernel's compiler or the driver.
      answer.set_exception(error)

  # In a separate thread, where no program is being traced; it need not end.
  threading.Thread(target=measure, daemon=True).start()
  try:
    gap = answer.result(_CHECK_SECONDS)
  except TimeoutError as error:
    # A kernel that hangs blocks everything queued after it on the GPU.
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
  """Whether a kernel passes its check, for programs that all processes run together.

  Raises:
    RuntimeError: The check fails here, while other processes may use the kernel.
  """
  passes, left_out = passes_check(kernel, *sizes), os.environ.get(kernel.VARIABLE) == '0'
  if not passes and not left_out and jax.process_count() > 1:
    raise RuntimeError(
      f'{kernel.__name__} does not pass its check in this process (see above). All '
      f'processes have to compute by the same kernel: start all of them with '
      f'{kernel.VARIABLE}=0.'
    )
  return passes
