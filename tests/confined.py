"""Fixtures for what runs untrusted code; they skip where a machine cannot confine it."""

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


@pytest.fixture(scope='module', params=['namespaces', 'kernel alone'])
def box(request):
  """A sandbox, with bubblewrap's namespaces where there are any, and without."""
  patch = pytest.MonkeyPatch()
  if request.param == 'kernel alone':
    patch.setattr(sandbox, '_isolate', lambda *_: [])
  elif not sandbox._isolate():
    pytest.skip('bubblewrap is not installed, or namespaces are not allowed here')
  made = sandbox.Sandbox(memory_mb=256, max_output=1000)
  patch.undo()
  yield made
  made.close()


@pytest.fixture
def outside(request, box):
  """What opening a file outside of the sandbox raises; namespaces do not have it."""
  names = {'namespaces': 'FileNotFoundError', 'kernel alone': 'PermissionError'}
  return names[request.node.callspec.params['box']]
