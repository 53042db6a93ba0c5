"""Converts logs of episodes for Inspect's viewer, and to ATIF.

  agent-r1-jax convert --to=atif runs/quickstart/trajectories
  agent-r1-jax convert --to=inspect runs/quickstart/trajectories

The arguments are logs (agent_r1_jax/report/episodes.py), or folders of them.
agent_r1_jax/contrib/logs describes the formats. Only absl-py is needed. `--to=inspect`
needs inspect_ai, which brings 80 packages and is better in its own environment:
pip install 'agent_r1_jax[inspect]', or in a checkout `make test-with-inspect`, which
creates .venv-inspect.
"""

from collections.abc import Callable
import functools
import pathlib

from absl import app, flags

from agent_r1_jax.contrib.logs import atif, inspect_logs

_TO = flags.DEFINE_enum('to', None, ['atif', 'inspect'], 'The format.', required=True)
_OUT = flags.DEFINE_string('out', '', 'Where it writes (default: FORMAT/ beside a log).')
_SCORES = flags.DEFINE_list('scores', ['em'], "Metrics that are Inspect's scores.")


def main(argv):
  if len(argv) == 1:
    raise app.UsageError('Name the logs, or folders of them.')
  write: Callable[[pathlib.Path, pathlib.Path], pathlib.Path]
  write_inspect = functools.partial(inspect_logs.write_log, scores=_SCORES.value)
  write = {'atif': atif.write_log, 'inspect': write_inspect}[_TO.value]
  try:
    for path in map(pathlib.Path, argv[1:]):
      logs = sorted(path.glob('*.jsonl')) if path.is_dir() else [path]
      if not logs:
        raise ValueError(f'{path}: there is no log (*.jsonl) in it')
      for log in logs:
        folder = pathlib.Path(_OUT.value or log.parent / _TO.value)
        folder.mkdir(parents=True, exist_ok=True)
        print(write(log.absolute(), folder))
  except ModuleNotFoundError:
    raise SystemExit(
      'There is no inspect_ai here: install it as `agent-r1-jax convert --help` says, in '
      'an environment of its own.'
    ) from None
  except ValueError as error:
    raise SystemExit(str(error)) from None


if __name__ == '__main__':
  app.run(main)
