"""A cluster of several nodes on this machine, shared by the tests of a file."""

import pathlib

import local_cluster
import pytest
import waiting


@pytest.fixture(scope='module')
def cluster():
  """A cluster whose head has no room for samplers; tests add nodes that have."""
  here = pathlib.Path(__file__).parent
  # The variable is for coded.py.
  made = local_cluster.LocalCluster(here, here.parents[1], AGENT_R1_TEST_NODE='1')
  with made:
    yield made
  waiting.until(lambda: all(map(waiting.has_ended, made.pids)), 'the end of all')
