"""Fixtures for what runs untrusted code; they skip where a machine cannot confine it."""

import pytest

from agent_r1_jax.tools import sandbox, shell


@pytest.fixture(scope='module')
def needs_sandbox():
  """Skips, with the reason, where Landlock or seccomp are missing."""
  _skip_if_unconfined(sandbox.Sandbox)


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


@pytest.fixture(scope='module')
def needs_shell():
  """Skips, with the reason, where no layers can confine a shell."""
  _skip_if_unconfined(shell.Shell)


def _skip_if_unconfined(make):
  try:
    make().close()
  except RuntimeError as error:
    if 'cannot be confined' not in str(error):
      raise  # A worker that is broken must not skip its own tests.
    pytest.skip(str(error))


def copy_worker(monkeypatch, folder, old, new):
  """Has shells use a copy of their worker, in which a text is replaced."""
  texts = {name: (shell._FOLDER / name).read_text() for name in shell._FILES}
  assert any(old in text for text in texts.values())
  for name, text in texts.items():
    (folder / name).write_text(text.replace(old, new))
  monkeypatch.setattr(shell, '_FOLDER', folder)


@pytest.fixture(params=['namespaces', 'namespaces without Landlock', 'kernel alone'])
def layers(request, monkeypatch, tmp_path_factory):
  """Has shells confined by these layers, and seccomp; skips where one is missing."""
  if request.param == 'kernel alone':
    monkeypatch.setattr(shell, '_isolate', lambda *_: [])
    _skip_if_unconfined(shell.Shell)
  elif not shell._isolate(shell.LIMITS.disk_mb):
    pytest.skip('bubblewrap is not installed, or namespaces are not allowed here')
  elif 'without' in request.param:
    copy_worker(
      monkeypatch, tmp_path_factory.mktemp('worker'), '_SCOPED = 6', '_SCOPED = 99'
    )
    monkeypatch.setattr(shell, '_isolate', shell._isolate.__wrapped__)
  return request.param


@pytest.fixture
def open_session(layers):
  """Opens shells, with limits by name, and closes them in the end."""
  opened = []

  def open_one(**limits):
    opened.append(shell.Shell(shell.ShellLimits(**limits)))
    return opened[-1]

  yield open_one
  for session in opened:
    session.close()
