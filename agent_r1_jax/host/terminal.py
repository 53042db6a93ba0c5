"""Makes terminal output safe, and shows rejected input as one line.

Output of a model, a tool or a program may contain escape sequences, which set a
terminal's title, colours or clipboard. `printable` shows them as pictures.
"""

import contextlib
from importlib import metadata
import linecache
import logging
import os
import pathlib
import re
import sys
import traceback
import warnings

from absl import flags

_PACKAGE = f'{pathlib.Path(__file__).parents[1]}{os.sep}'
_OURS = (_PACKAGE, f'{pathlib.Path(__file__).parents[2] / "experiments"}{os.sep}')
# The types that this project raises with a message that names the remedy.
_REFUSALS = (ValueError, OSError, RuntimeError, ModuleNotFoundError)
# Newline and tab stay. Unicode has pictures of ASCII's control characters (ESC is ␛), but
# not of control characters from 0x80 on; some terminals read 0x9b as ESC [. Direction
# marks reorder other text, and two more characters begin a line.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in '\n\t'}
_PICTURES |= {0x7F: '\u2421'} | dict.fromkeys(range(0x80, 0xA0), '\ufffd')
_PICTURES |= dict.fromkeys((0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F)), '\ufffd')
_PICTURES |= dict.fromkeys(range(0x2066, 0x206A), '\ufffd')


def printable(text: str, encoding: str | None = 'utf-8') -> str:
  """Replaces control characters by pictures of them, except newlines and tabs.

  The text may have lone surrogates. Characters that the terminal's encoding lacks become
  '?'.
  """
  encoding = encoding or 'utf-8'
  return text.translate(_PICTURES).encode(encoding, errors='replace').decode(encoding)


def install() -> None:
  """Makes this process's log records, warnings and fatal errors printable.

  It also sets sys.excepthook, to print rejected input without a traceback; --verbosity
  shows the traceback.
  """
  logging.setLogRecordFactory(_Record)
  if not isinstance(warnings.formatwarning, _WarningFormat):
    warnings.formatwarning = _WarningFormat(warnings.formatwarning)
  if sys.excepthook is sys.__excepthook__:  # Unless a debugger or notebook has set one.
    sys.excepthook = _print_error


class _Record(logging.LogRecord):
  def getMessage(self) -> str:  # noqa: N802
    return printable(super().getMessage())


class _WarningFormat:
  def __init__(self, formatwarning):
    self._format = formatwarning

  def __call__(self, *args, **kwargs) -> str:
    return printable(self._format(*args, **kwargs))


def _print_error(kind, error, trace) -> None:
  """Prints a fatal error; rejected input is one line without a traceback.

  Input is rejected by a `raise` statement of this project. Other errors are bugs and keep
  their traceback; so do a ValueError raised inside Python's own functions and a
  RuntimeError with a cause. Our OSErrors say what could not be written, such as a
  checkpoint on a full disk, and the remedy.
  """
  calls = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
  path, line = calls[-1] if calls else ('', 0)
  pin = _find_pin(error) if isinstance(error, ModuleNotFoundError) else None
  raised = linecache.getline(path, line).lstrip().startswith('raise ')
  refused = isinstance(error, _REFUSALS) and path.startswith(_OURS) and raised
  refused = refused and not (isinstance(error, RuntimeError) and error.__cause__)
  verbose = flags.FLAGS.is_parsed() and 'verbosity' in flags.FLAGS
  verbose = verbose and flags.FLAGS['verbosity'].present
  if verbose or not (refused or pin):
    lines = traceback.format_exception(kind, error, trace)
    return print(printable(''.join(lines)), end='', file=sys.stderr)
  # Names the line of the user's script that called us; an installed script has none.
  libraries, programs = (
    os.path.dirname(x) for x in (contextlib.__file__, sys.executable)
  )
  ours = (_PACKAGE, libraries, programs, '<frozen ')
  outside = [
    f'{file}:{number}: '
    for file, number in calls
    if not file.startswith(ours) and 'site-packages' not in file
  ]
  remedy = f"; pip install '{pin}'" if pin else ''
  # An OSError's text begins with a number that means nothing to a user.
  said = isinstance(error, OSError) and not error.filename and error.strerror or error
  place = outside[-1] if outside else ''
  print(printable(f'{place}{said}{remedy}'), file=sys.stderr)


def _find_pin(error: ModuleNotFoundError) -> str | None:
  """Returns the requirement in our extras that provides a missing module, or None."""
  try:
    known = metadata.requires('agent_r1_jax') or ()
  except metadata.PackageNotFoundError:  # Run from a checkout that is not installed.
    return None
  name = re.escape((error.name or '').partition('.')[0]).replace('_', '-')
  found = (re.match(rf'{name}\b[^;\s]*', line) for line in known if 'extra ==' in line)
  return next((match[0] for match in found if name and match), None)
