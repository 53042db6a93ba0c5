"""The file of results that several processes write to, and that kills truncate."""

import contextlib

import pytest
import script

from experiments import tables


def test_a_key_is_found_in_a_line_that_has_all_of_it(tmp_path):
  path = tmp_path / 'a' / 'results.jsonl'
  assert not tables.contains(path, {'method': 'x'})
  tables.add_line(path, {'method': 'x', 'seed': 0})
  assert tables.contains(path, {'method': 'x', 'seed': 0})
  assert not tables.contains(path, {'method': 'x', 'seed': 1})
  assert not tables.contains(path, {'method': 'x', 'other': None})


def test_a_truncated_line_is_lost_alone(tmp_path):
  path = tmp_path / 'results.jsonl'
  tables.add_line(path, {'method': 'x'})
  path.write_text(path.read_text() + '{"method": "y", "n": [1, ')
  tables.add_line(path, {'method': 'z'})
  with pytest.warns(UserWarning, match='is no JSON and is left out'):
    assert [line['method'] for line in tables.read_lines(path)] == ['x', 'z']


def test_processes_that_write_at_the_same_time_lose_no_line(tmp_path):
  path = tmp_path / 'results.jsonl'
  code = (
    'import sys; from experiments import tables\n'
    'for i in range(50):\n'
    '  tables.add_line(sys.argv[1], {"who": sys.argv[2], "i": i})'
  )
  with contextlib.ExitStack() as stack:
    start = lambda who: stack.enter_context(script.Process('-c', code, path, who))
    writers = [*map(start, 'abc')]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0]
  written = {(line['who'], line['i']) for line in tables.read_lines(path)}
  assert written == {(who, i) for who in 'abc' for i in range(50)}
