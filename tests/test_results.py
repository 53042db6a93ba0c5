"""The file of results that several processes write to, and that kills truncate."""

import contextlib

import pytest
import script

from experiments import results


def test_a_key_is_found_in_a_line_that_has_all_of_it(tmp_path):
  path = tmp_path / 'a' / 'results.jsonl'
  assert not results.contains(path, {'method': 'x'})
  results.add(path, {'method': 'x', 'seed': 0})
  assert results.contains(path, {'method': 'x', 'seed': 0})
  assert not results.contains(path, {'method': 'x', 'seed': 1})
  assert not results.contains(path, {'method': 'x', 'other': None})


def test_a_truncated_line_is_lost_alone(tmp_path):
  path = tmp_path / 'results.jsonl'
  results.add(path, {'method': 'x'})
  path.write_text(path.read_text() + '{"method": "y", "n": [1, ')
  results.add(path, {'method': 'z'})
  with pytest.warns(UserWarning, match='is no JSON and is left out'):
    assert [line['method'] for line in results.read(path)] == ['x', 'z']


def test_processes_that_write_at_the_same_time_lose_no_line(tmp_path):
  path = tmp_path / 'results.jsonl'
  code = (
    'import sys; from experiments import results\n'
    'for i in range(50):\n'
    '  results.add(sys.argv[1], {"who": sys.argv[2], "i": i})'
  )
  with contextlib.ExitStack() as stack:
    start = lambda who: stack.enter_context(script.Process('-c', code, path, who))
    writers = [*map(start, 'abc')]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0]
  written = {(line['who'], line['i']) for line in results.read(path)}
  assert written == {(who, i) for who in 'abc' for i in range(50)}
