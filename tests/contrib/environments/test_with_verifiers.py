"""test_verifiers.py in an environment with verifiers: `make test-with-verifiers`.

The adapter runs in the trainer's process, and verifiers requires other versions of some
packages than the rest of the suite.
"""

import os
import subprocess

import pytest
from test_episodes import ROOT

PYTHON = os.environ.get('PACKAGE_PYTHON')


@pytest.mark.skipif(not PYTHON, reason='`make test-with-verifiers` installs verifiers')
def test_environments_of_verifiers_are_played():
  # Its configuration of pytest is the project's, and so are warnings as errors.
  tests = 'tests/contrib/environments/test_verifiers.py'
  command = [PYTHON, '-m', 'pytest', '-p', 'no:cacheprovider', tests]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
  assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
  assert ' passed' in done.stdout and 'skipped' not in done.stdout
