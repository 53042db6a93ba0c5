"""A cluster of several nodes on this machine, shared by the tests of a file."""

import nodes
import pytest


@pytest.fixture(scope='module')
def cluster():
  """A cluster whose head has no room for samplers; tests add nodes that have."""
  with nodes.Cluster() as made:
    yield made
  made.check_ended()
