"""First light, part 6: twenty steps of the quickstart, with evaluations.

It runs as for a user; the lines come from the metrics that it writes.
"""

from collections.abc import Callable, Iterator
import json
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

from experiments.bench.light import lines

_STEPS, _QUESTIONS, _EVERY = 20, 64, 10
_KEPT = ('rollout/reward', 'train/behaviour_kl')


def run() -> Iterator[lines.Line]:
  """Yields a line per step, and one for the complete run."""
  steps, questions, every = (1, 1, 1) if lines.is_tiny() else (_STEPS, _QUESTIONS, _EVERY)
  workdir, begun = make_workdir('quickstart'), time.monotonic()
  command = [sys.executable, '-m', 'experiments.miniwiki.search', f'--workdir={workdir}']
  command += [f'--config.schedule.steps={steps}', f'--questions={questions}']
  command += [f'--config.schedule.eval_every={every}', f'--watched={questions}']
  # As few programs as possible, because compilation would take most of the time.
  command += ['--config.engine.narrow=False', '--config.engine.bucket=448']
  command += ['--config.engine.replicas=1']
  with subprocess.Popen(command) as process:
    yield from follow('the quickstart', workdir, lambda: process.poll() is None)
  seconds = time.monotonic() - begun
  if process.returncode:
    raise RuntimeError(f'the quickstart ended with status {process.returncode}')
  yield lines.make(f'the quickstart, {steps} steps and its tables', seconds, 's')


def make_workdir(name: str) -> pathlib.Path:
  """Returns the path of a new run; deletes an old run, which would resume."""
  workdir = lines.out() / name
  shutil.rmtree(workdir, ignore_errors=True)
  return workdir


def follow(
  name: str, workdir: pathlib.Path, is_running: Callable[[], bool]
) -> Iterator[lines.Line]:
  """Yields a line for each step of a run as soon as the step is over."""
  seen, running = 0, True
  while running:
    running = is_running()  # Asked first, so that the last read sees all metrics.
    new = list_metrics(workdir)[seen:]
    seen += len(new)
    yield from describe_steps(name, new)
    if running:
      time.sleep(0.2)


def list_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the complete lines of a run's metrics.jsonl."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return []
  return [json.loads(x) for x in path.read_text().splitlines(True) if x.endswith('\n')]


def describe_steps(name: str, steps: list[dict[str, Any]]) -> Iterator[lines.Line]:
  """Yields a line for each step: its times, rewards and scores."""
  for metrics in steps:
    times = {k.removeprefix('time/'): x for k, x in metrics.items() if _is_of(k, 'time')}
    if times:  # The evaluation before the first step has none.
      kept = {k: x for k, x in metrics.items() if _is_of(k, 'machine') or k in _KEPT}
      kept |= {k: x for k, x in metrics.items() if k.endswith('/em')}
      what = f'{name}, step {metrics["step"]}'
      yield lines.make(what, sum(times.values()), 's', times=times, **kept)


def _is_of(key: str, part: str) -> bool:
  return key.startswith(f'{part}/')


MEASUREMENTS = (run,)

if __name__ == '__main__':
  lines.run(MEASUREMENTS, device=False)
