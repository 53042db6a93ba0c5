"""Eight devices compute what one does, by feature: the rows of eight.py."""

import functools
import pickle

import eight
import numpy as np
import pytest
import script

# Relative to the largest number of a leaf, by what a row returns.
_TOLERANCES = {
  'loss': 1e-6,
  'change': 1e-3,
  'through pictures': 2e-5,
  'over 4 bits': 2e-5,
  # Norms around each part, and bounds, make rounding errors larger.
  'through pooled pictures': 2e-4,
  'model': 2e-5,
  'states': 5e-5,
  # A number between two integers may be rounded to the other one on two chips.
  'int8': 1e-3,
  # The kernel multiplies as a TPU does.
  'bfloat16': 0.01,
  'tokens': 0.0,
}


@pytest.fixture(scope='module')
def on_eight(request, tmp_path_factory):
  """What each row that is asked for computes on its meshes, all in one process."""
  path = tmp_path_factory.mktemp('eight') / 'found'
  tests = [item for item in request.session.items if 'on_eight' in item.fixturenames]
  names = dict.fromkeys(test.callspec.params['name'] for test in tests)
  done = script.run(eight.__file__, path, *names, JAX_NUM_CPU_DEVICES='8')
  assert done.returncode == 0, done.stderr[-4000:]
  return pickle.loads(path.read_bytes())


@functools.cache
def _on_one(name):
  found = eight.ROWS[name].compute(None)
  return {key: eight.list_leaves(tree) for key, tree in found.items()}


@pytest.mark.parametrize(
  ('name', 'number'),
  [(name, i) for name, row in eight.ROWS.items() for i in range(len(row.meshes))],
)
def test_eight_devices_compute_what_one_does(name, number, on_eight):
  found, expected = on_eight[name, number], _on_one(name)
  assert not isinstance(found, str), found
  assert found.keys() == expected.keys()
  for key, leaves in expected.items():
    for (path, x), (other, y) in zip(leaves, found[key], strict=True):
      assert path == other
      atol = _TOLERANCES.get(key, 1e-5) * max(np.abs(x).max(initial=0), 1e-6)
      np.testing.assert_allclose(y, x, rtol=0, atol=atol, err_msg=f'{key}{path}')
