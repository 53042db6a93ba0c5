"""Writes one HTML page of a run, even while it runs: curves, episodes, and their tokens.

agent-r1-jax report --workdir=runs/quickstart
"""

import pathlib

from absl import app, flags

from agent_r1_jax.report import page

_WORKDIR = flags.DEFINE_string('workdir', 'runs/quickstart', 'Directory of the run.')
_OUT = flags.DEFINE_string('out', '', 'The HTML file (default: WORKDIR/report.html).')


def main(_):
  workdir = pathlib.Path(_WORKDIR.value)
  try:
    print(page.write_page(workdir, _OUT.value or workdir / 'report.html'))
  except (OSError, ValueError) as error:
    raise SystemExit(str(error)) from None


if __name__ == '__main__':
  app.run(main)
