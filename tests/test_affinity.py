"""affinity.py: which file a worker gets next."""

import pathlib

import affinity
import pytest

FILES = {'a': '', 'b': 'runs', 'c': 'clients', 'd': 'runs'}


@pytest.mark.parametrize(
  ('own', 'others', 'expected'),
  [
    ('', set(), 'a'),
    ('runs', {'clients'}, 'b'),
    ('clients', {'clients'}, 'c'),
    ('plain', {'runs'}, 'a'),
  ],
)
def test_a_worker_goes_on_with_files_of_its_group(own, others, expected):
  assert affinity.choose(FILES, own, others) == expected


def test_a_group_of_another_worker_comes_last():
  rest = {name: group for name, group in FILES.items() if group}
  assert affinity.choose(rest, '', {'runs'}) == 'c'
  assert affinity.choose({'b': 'runs'}, '', {'runs'}) == 'b'


def test_a_file_is_in_the_group_of_what_it_imports():
  folder = pathlib.Path(__file__).parent
  find = lambda name: affinity.find_group(folder / f'test_{name}.py')
  assert (find('train'), find('quantization'), find('calls')) == ('runs', 'runs', '')
  for helper in affinity.SHARED:
    assert [*folder.rglob(f'{helper}.py')]
