"""Estimates from several samples, by hand and against enumeration."""

import itertools

import numpy as np
import pytest

from experiments import tables


@pytest.mark.parametrize('n, k', [(1, 1), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k(n, k):
  for correct in range(n + 1):
    samples = [1] * correct + [0] * (n - correct)
    choices = [max(chosen) for chosen in itertools.combinations(samples, k)]
    assert tables.pass_at_k(n, correct, k) == pytest.approx(np.mean(choices))


@pytest.mark.parametrize('n, correct, k', [(5, 2, 0), (5, 2, 6), (5, 6, 1), (5, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(n, correct, k):
  with pytest.raises(ValueError, match=f'k={k} must be in'):
    tables.pass_at_k(n, correct, k)


@pytest.mark.parametrize(
  ('right', 'answers', 'expected'),
  [
    ([0, 1, 0, 0], ['a', 'b', 'a', 'c'], 0.0),
    ([0, 1, 1, 0], ['a', 'b', 'b', 'c'], 1.0),
    # One of two that are equally frequent is drawn.
    ([0, 1, 1, 0], ['a', 'b', 'b', 'a'], 0.5),
    ([0, 1, 0], ['a', 'b', 'c'], 1 / 3),
    # Who does not answer does not vote.
    ([0, 1, 0, 0], [None, 'b', None, None], 1.0),
    ([0, 0], [None, None], 0.0),
  ],
)
def test_majority(right, answers, expected):
  assert tables.majority(right, answers) == pytest.approx(expected)


def test_the_estimates_of_two_tasks_by_hand():
  right = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
  answers = [['x', 'y', 'y', None], ['x', 'x', 'y', 'z']]
  assert tables.estimate(right, answers) == pytest.approx(
    {
      'mean': 3 / 8,
      'best': 1.0,
      # Of the means 1/4 and 1/2: their deviation is (1/4) / √2, over √2.
      'error': 1 / 8,
      'majority': 0.5,
      'pass@1': 3 / 8,
      # One of two: 1 - C(3, 2) / C(4, 2) and 1 - C(2, 2) / C(4, 2).
      'pass@2': (1 / 2 + 5 / 6) / 2,
      'pass@4': 1.0,
    }
  )


def test_one_task_has_no_standard_error_and_three_samples_no_pass_at_4():
  found = tables.estimate(np.array([[0.0, 0.5, 1.0]]))
  assert found == pytest.approx(
    {'mean': 0.5, 'best': 1.0, 'pass@1': 1 / 3, 'pass@2': 2 / 3}
  )
