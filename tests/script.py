"""Experiments as their users start them, in processes of their own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def one_program(slots: int) -> tuple[str, ...]:
  """Flags of a run with one program to decode and one to prefill: most time is theirs."""
  sizes = {'slots': slots, 'bucket': slots, 'narrow': False, 'replicas': 1}
  return tuple(f'--config.engine.{name}={value}' for name, value in sizes.items())


def run(
  *args: str, timeout: float = 900.0, cwd: pathlib.Path = ROOT
) -> subprocess.CompletedProcess[str]:
  """`python ...` with this checkout's packages."""
  return subprocess.run(
    [sys.executable, *args],
    cwd=cwd,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=timeout,
  )
