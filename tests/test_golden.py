"""No array of golden/ref_algos.npz is kept that no test compares."""

import pathlib
import subprocess
import sys

_TESTS = pathlib.Path(__file__).parent
# The names of the tests that compare with the peers have one of these words.
_PEERS = 'verl or peer or trl or agent_r1s or search_r1s or skyrl or ragen or author'
# Runs tests in a process that notes what they read, and saves what they did not.
_COUNT = """
import pathlib, sys
import pytest

unread = set()

class Noted(dict):
  def __getitem__(self, key):
    unread.discard(key)
    return super().__getitem__(key)

class Plugin:
  def pytest_collection_finish(self):
    import episodes  # Not before conftest.py has prepared the imports.
    arrays = Noted(episodes.golden())
    unread.update(arrays)
    assert unread
    episodes.golden = lambda: arrays

saved, *options = sys.argv[1:]
status = pytest.main(['-q', '-p', 'no:cacheprovider', *options], plugins=[Plugin()])
pathlib.Path(saved).write_text(' '.join(sorted(unread)))
sys.exit(status)
"""


def test_every_kept_array_is_read_by_a_test_of_the_peers_numbers(tmp_path):
  """What no test compares is left out by name in golden/make_ref_algos.py."""
  files = [p for p in _TESTS.glob('test_*.py') if 'episodes.golden' in p.read_text()]
  files = sorted(str(p) for p in files if p.name != pathlib.Path(__file__).name)
  saved = tmp_path / 'unread'
  command = [sys.executable, '-c', _COUNT, saved, '-k', _PEERS, *files]
  out = subprocess.run(command, cwd=_TESTS.parent, capture_output=True, text=True)
  assert out.returncode == 0, out.stdout + out.stderr
  assert saved.read_text().split() == [], 'add a test of these, or to _DROPPED'
