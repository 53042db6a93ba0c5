"""Arrays that are not as a signature says are found while the tests run."""

import dataclasses

from jaxtyping import Float
import numpy as np
import pytest
import shapes

from agent_r1_jax.rl import advantages


@dataclasses.dataclass
class Pair:
  x: Float[np.ndarray, 'n']
  y: Float[np.ndarray, 'n'] | None

  def take(self, x: Float[np.ndarray, 'n']) -> tuple['Pair', Float[np.ndarray, 'n']]:
    return Pair(x, x), x[1:]


def add(
  x: Float[np.ndarray, 'n'], times: int, y: Float[np.ndarray, 'n']
) -> Float[np.ndarray, 'n']:
  return x[:times] + y[:times]


@pytest.mark.parametrize(
  ('call', 'named'),
  [
    (lambda x: shapes.check(add)(x, 1, y=x), 'return'),
    (lambda x: shapes.check(add)(x, 3, y=x[:2]), 'y'),
    (lambda x: shapes.check(add)(x[None], 3, x), 'x'),
    (lambda x: shapes.check(Pair)(x, x[:2]), 'y'),
    (lambda x: shapes.check(Pair.take)(Pair(x, x), x), 'return'),
    # As the hook has been installed.
    (lambda x: advantages._normalized(x[None], divide_by_std=True, eps=0.1), 'x'),
  ],
)
def test_an_array_of_another_shape_is_named(call, named):
  with pytest.raises(TypeError, match=rf', {named}: .*array'):
    call(np.ones(3))


def test_what_fits_is_computed():
  x = np.ones(3)
  assert (shapes.check(add)(x, 3, y=x) == 2).all()
  assert shapes.check(Pair)(x, None).x is x
