"""No array of golden/ref_algos.npz is kept that no test compares."""

import pathlib
import subprocess
import sys

_TESTS = pathlib.Path(__file__).parent
# The names of the tests that compare with the peers have one of these words.
_PEERS = 'verl or peer or trl or agent_r1s or search_r1s or skyrl or ragen or author'
# Runs tests in a process that notes what each reads. A test that reads a peer's output
# runs again with another value there, and must fail: so it compares, and not only reads.
_COUNT = """
import pathlib, sys
import pytest

class Noted(dict):
  def __getitem__(self, key):
    read.add(key)
    value = super().__getitem__(key)
    return 1.001 * value + 0.001 if key == changed else value

changed, read, missing = None, set(), set()

class Plugin:
  def pytest_collection_finish(self):
    import episodes  # Not before conftest.py has prepared the imports.
    arrays = Noted(episodes.golden())
    missing.update(arrays)
    assert missing
    episodes.golden = lambda: arrays

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self, item):
    global changed
    read.clear()
    result = yield
    for key in sorted(read & missing):
      changed = key
      try:
        if not key.startswith('in/'):
          item.runtest()
          continue
      except AssertionError:
        pass
      finally:
        changed = None
      missing.discard(key)
    return result

saved, *options = sys.argv[1:]
status = pytest.main(['-q', '-p', 'no:cacheprovider', *options], plugins=[Plugin()])
pathlib.Path(saved).write_text(' '.join(sorted(missing)))
sys.exit(status)
"""


def test_every_kept_array_is_compared(tmp_path):
  """What no test compares is left out by name in golden/make_ref_algos.py."""
  files = [p for p in _TESTS.glob('test_*.py') if 'episodes.golden' in p.read_text()]
  files = sorted(str(p) for p in files if p.name != pathlib.Path(__file__).name)
  saved = tmp_path / 'missing'
  command = [sys.executable, '-c', _COUNT, saved, '-k', _PEERS, *files]
  out = subprocess.run(command, cwd=_TESTS.parent, capture_output=True, text=True)
  assert out.returncode == 0, out.stdout + out.stderr
  missing = saved.read_text().split()
  assert not missing, f'compare these in a test, or name them in _DROPPED: {missing}'
