"""Refusals: a test asserts the type and the field; refusals.txt holds the wordings.

The fixture `refused` of conftest.py is one `Refusals` per test:

  with refused('sampling.top_p'):
    config.check()

Each refusal is one line of refusals.txt. After a wording was changed on purpose,
`pytest --rewrite-refusals FILES` writes those of the tests that ran.
"""

from collections.abc import Callable, Collection, Iterator
import contextlib
import fcntl
import functools
import pathlib
import re
import tempfile

import pytest

FILE = pathlib.Path(__file__).with_name('refusals.txt')
_ROOT = str(pathlib.Path(__file__).parents[1])


@functools.cache
def read(file: pathlib.Path = FILE) -> dict[str, str]:
  """Reads the wording of each case: of a test, its parameters and its count."""
  lines = file.read_text().splitlines() if file.exists() else []
  return dict(line.split('\t') for line in lines)


def update(test: str, said: dict[str, str], file: pathlib.Path = FILE):
  """Replaces the cases of a test that ran."""
  _rewrite(lambda case: _get_test(case) != test, said, file)


def drop_missing(tests: Collection[str], file: pathlib.Path = FILE):
  """Drops the cases of the files of some tests that are of none of them."""
  files = {_get_file(test) for test in tests}
  _rewrite(
    lambda case: _get_test(case) in tests or _get_file(case) not in files, {}, file
  )


def _rewrite(keeps: Callable[[str], bool], said: dict[str, str], file: pathlib.Path):
  with open(file, 'a') as opened:
    fcntl.flock(opened, fcntl.LOCK_EX)  # Each worker writes its own.
    read.cache_clear()
    cases = {case: text for case, text in read(file).items() if keeps(case)} | said
    file.write_text(''.join(f'{case}\t{cases[case]}\n' for case in sorted(cases)))
    read.cache_clear()


def _get_test(case: str) -> str:
  """The test of a case; a later one of a test has its number after it."""
  return case.split(' #')[0]


def _get_file(test: str) -> str:
  return test.split('::')[0]


class Refusals:
  """What one test is refused.

  Args:
    test: Its name, with its file and parameters.
    folder: The temporary folder, which has another name in each session.
    wordings: What `read` returns, or None where they are written anew.
  """

  def __init__(self, test: str, folder: str, wordings: dict[str, str] | None):
    self._test, self._folder, self._wordings = test, folder, wordings
    self.said: dict[str, str] = {}

  @contextlib.contextmanager
  def __call__(
    self, field: str, error: type[BaseException] = ValueError
  ) -> Iterator[pytest.ExceptionInfo]:
    """Expects an error of this very type that names a field."""
    with pytest.raises(error) as caught:
      yield caught
    assert caught.type is error, f'{caught.type.__name__} is no {error.__name__}'
    assert field in str(caught.value), f'{field} is not named: {caught.value}'
    self.check(f'{error.__name__}: {caught.value}')

  def check(self, text: str):
    """Compares the next wording with that of refusals.txt."""
    case = self._test + (f' #{len(self.said) + 1}' if self.said else '')
    self.said[case] = text = self._write(text)
    if self._wordings is None:
      return
    if (before := self._wordings.get(case)) != text:
      pytest.fail(
        f'The wording of a refusal has changed:\n- {before}\n+ {text}\n'
        f'If it is meant: pytest --rewrite-refusals {case.partition("::")[0]}',
        pytrace=False,
      )

  def _write(self, text: str) -> str:
    """In one line, without what differs between sessions."""
    text = re.sub(re.escape(self._folder) + r'(/[^/\s]*)?', 'TMP', text)
    text = re.sub(re.escape(tempfile.gettempdir()) + r'/tmp\w+', 'TMP', text)
    text = re.sub(r'\b0x[0-9a-f]{6,}', '0x...', text.replace(_ROOT, 'ROOT'))
    return text.encode('unicode_escape').decode()
