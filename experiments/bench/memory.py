r"""Measures the memory of a whole run by phase, and makes a model of a real size for it.

  python -m experiments.bench.memory make SHAPE.json TOKENIZER_DIRECTORY MODEL [LAYERS]
  python -m experiments.bench.memory run MODULE [FLAGS OF THE MODULE ...]

`make` writes a model of the shape in SHAPE.json (a config.json of Hugging Face) with
random weights in bfloat16, as models are published. `run` runs a script of ours, prints a
line where a phase ends, and at the end a table: for each phase the highest resident
memory, in GB (10^9 bytes), what was resident when it ended last, and how often it came.
The kernel keeps the highest number (VmHWM, which is set back every tenth of a second and
where phases change), so that nothing is missed between two samples. Linux only.

docs/results/performance.md has the command to run by hand when memory code changes.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import runpy
import shutil
import sys
import threading

import jax
import jax.numpy as jnp

from agent_r1_jax.engine import engine
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import hf_config, peft_files, weights
from agent_r1_jax.rl import learner, scoring
from agent_r1_jax.rollout import evaluate
from agent_r1_jax.train import run_files, schedule

# Phase -> the function that it consists of. The innermost one that runs counts.
_PHASES = {
  'load': (weights, 'load'),
  'compile and warm up': (engine.Engine, 'warm_up'),
  "the engine's copy": (engine.Engine, '_copy_params'),
  'rollout': (schedule.Rollouts, 'next_groups'),
  'score': (scoring, 'score'),
  'gradient': (learner, '_gradient'),
  'update': (learner, '_apply'),
  'evaluate': (evaluate, 'run'),
  'play': (evaluate, 'play'),
  'checkpoint': (run_files.RunFiles, 'save'),
  'export': (weights, 'save'),
  'export of adapters': (peft_files, 'save'),
}


class Meter:
  """Knows the highest resident memory of each phase, in GB (10^9 bytes)."""

  def __init__(self):
    self._phases, self._found = ['else'], {}
    self._lock, self._ended = threading.Lock(), threading.Event()
    _forget_highest()  # What was before is of no phase.
    threading.Thread(target=self._sample, daemon=True).start()

  @contextlib.contextmanager
  def phase(self, name: str):
    """Counts what is resident inside `with` to this phase."""
    with self._lock:
      self._note()
      self._phases.append(name)
    try:
      yield
    finally:
      with self._lock:
        self._note()
        self._phases.remove(name)
        numbers = self._found[name]
        numbers[1:] = [_resident('VmRSS'), numbers[2] + 1]
        print(f'memory: {name} {numbers[0]:.2f} {numbers[1]:.2f}', flush=True)

  def table(self) -> str:
    """Ends the sampling and returns a line for each phase, and one for the run."""
    self._ended.set()
    with self._lock:
      self._note()
    lines = [f'{"phase":<22} {"highest":>8} {"at its end":>10} {"times":>6}']
    for name, (most, end, times) in self._found.items():
      lines.append(f'{name:<22} {most:8.2f} {end:10.2f} {times:6}')
    most = max(numbers[0] for numbers in self._found.values())
    return '\n'.join([*lines, f'{"the run":<22} {most:8.2f}'])

  def _sample(self):
    while not self._ended.wait(0.1):
      with self._lock:
        self._note()

  def _note(self):
    numbers = self._found.setdefault(self._phases[-1], [0.0, 0.0, 0])
    numbers[0] = max(numbers[0], _resident('VmHWM'))
    _forget_highest()


def _forget_highest():
  pathlib.Path('/proc/self/clear_refs').write_text('5')  # Sets VmHWM to VmRSS.


def _resident(name: str) -> float:
  text = pathlib.Path('/proc/self/status').read_text()
  found = re.search(rf'^{name}:\s+(\d+) kB', text, re.MULTILINE)
  assert found, f'/proc/self/status has no {name}'
  return int(found[1]) * 1024 / 1e9


def make(shape: str, tokenizer: str, directory: str, layers: str = '') -> None:
  """Writes a model of this shape with random weights."""
  folder, config = pathlib.Path(directory), hf_config.read(shape)
  if layers:
    config = dataclasses.replace(config, num_layers=int(layers))
  params = jax.jit(decoder.init, static_argnums=0)(config, jax.random.key(0))
  weights.save(folder, config, params, dtype=jnp.bfloat16)
  for file in pathlib.Path(tokenizer).glob('tokenizer*.json'):
    shutil.copyfile(file, folder / file.name)


def run(module: str, *flags: str) -> None:
  """Runs a script with its flags, and prints the table."""
  runtime.retain_freed_memory()  # Before the first thread, as in a run without a meter.
  meter = Meter()
  for name, (owner, attribute) in _PHASES.items():
    setattr(owner, attribute, _measured(meter, name, getattr(owner, attribute)))
  sys.argv = [module, *flags]
  try:
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  finally:
    print(meter.table(), flush=True)


def _measured(meter: Meter, name: str, function):
  @functools.wraps(function)
  def inside(*args, **kwargs):
    with meter.phase(name):
      return jax.block_until_ready(function(*args, **kwargs))

  return inside


if __name__ == '__main__':
  {'make': make, 'run': run}[sys.argv[1]](*sys.argv[2:])
