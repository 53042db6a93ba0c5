"""The server that the tests of a file ask together."""

import pytest


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return tmp_path_factory.mktemp('tinker')


@pytest.fixture(scope='module')
def asked(workdir):
  """A client of a server with room for many runs."""
  import tinker_service  # It imports the package, so not before the hook is there.

  with tinker_service.serve(workdir, clients=32) as asked:
    yield asked
