"""The file of wordings is of tests that exist; a changed wording is shown."""

import pathlib
import re

import pytest
import refusals

_TESTS = pathlib.Path(__file__).parent


def test_each_wording_is_of_a_test_that_exists():
  sources = {}
  for case in refusals.read():
    file, *_, name = re.split(r'[\[ ]', case)[0].split('::')
    if file not in sources:
      sources[file] = (_TESTS / file).read_text()
    assert f'def {name}(' in sources[file], case


def _refuse(refused, text, field='steps', error=ValueError):
  with refused(field):
    raise error(text)


def test_a_changed_wording_is_shown(tmp_path):
  wordings = {'test_x.py::test_y': 'ValueError: steps is 0; in TMP/x'}
  wordings['test_x.py::test_y #2'] = r'ValueError: steps at 0x...:\nmake it 1'
  refused = refusals.Refusals('test_x.py::test_y', str(tmp_path), wordings)
  _refuse(refused, f'steps is 0; in {tmp_path}/test_y0/x')
  _refuse(refused, 'steps at 0x7f00000001:\nmake it 1')
  with pytest.raises(pytest.fail.Exception) as shown:
    _refuse(refused, 'steps is 0')
  assert '\n- None\n+ ValueError: steps is 0\n' in str(shown.value)
  again = refusals.Refusals('test_x.py::test_y', str(tmp_path), wordings)
  with pytest.raises(pytest.fail.Exception) as shown:
    _refuse(again, 'steps is 1')
  for line in ('- ValueError: steps is 0; in TMP/x', '+ ValueError: steps is 1'):
    assert line in str(shown.value)
  assert 'pytest --rewrite-refusals test_x.py' in str(shown.value)


@pytest.mark.parametrize(
  ('text', 'field', 'error'),
  [('steps is 0', 'tasks', ValueError), ('steps is 0', 'steps', UnicodeError)],
)
def test_another_field_or_type_fails_whatever_the_wording(text, field, error):
  refused = refusals.Refusals('test', '/tmp/x', None)
  with pytest.raises(AssertionError, match='is not named|is no ValueError'):
    _refuse(refused, text, field, error)
  assert not refused.said


def test_wordings_are_replaced_and_dropped(tmp_path):
  file = tmp_path / 'refusals.txt'
  refusals.update('a.py::a', {'a.py::a': '1', 'a.py::a #2': '2'}, file)
  refusals.update('b.py::b[x y]', {'b.py::b[x y]': '3'}, file)
  refusals.update('a.py::a', {'a.py::a': '4'}, file)
  assert refusals.read(file) == {'a.py::a': '4', 'b.py::b[x y]': '3'}
  refusals.drop_missing({'b.py::b[z]'}, file)
  assert file.read_text() == 'a.py::a\t4\n'
