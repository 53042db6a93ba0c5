"""A fixture for what runs untrusted code: it skips where a machine cannot confine it."""

import pytest

from agent_r1_jax.tools import sandbox


@pytest.fixture(scope='module')
def needs_sandbox():
  """Skips, with the reason, where Landlock or seccomp are missing."""
  try:
    sandbox.Sandbox().close()
  except RuntimeError as error:
    if 'cannot be confined' not in str(error):
      raise  # A worker that is broken must not skip its own tests.
    pytest.skip(str(error))
