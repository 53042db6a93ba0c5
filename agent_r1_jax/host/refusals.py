"""Ends a script whose input is refused with one line instead of a traceback."""

import contextlib
from importlib import metadata
import linecache
import os
import pathlib
import re
import sys
import traceback

from absl import flags

from agent_r1_jax.host import terminal

_PACKAGE = f'{pathlib.Path(__file__).parents[1]}{os.sep}'
_OURS = (_PACKAGE, f'{pathlib.Path(__file__).parents[2] / "experiments"}{os.sep}')
# The types that this project raises with a message that says what to change.
_REFUSALS = (ValueError, OSError, RuntimeError, ModuleNotFoundError)


def install() -> None:
  """Sets sys.excepthook to a function that prints no traceback of refused input.

  --verbosity shows the traceback.
  """
  if sys.excepthook is sys.__excepthook__:  # Unless a debugger or notebook has set one.
    sys.excepthook = _print_error


def _print_error(kind, error, trace) -> None:
  """Prints an error that ends the program; refused input is one line without traceback.

  Input is refused by a `raise` statement of this project. Other errors are bugs and keep
  their traceback; so do a ValueError that a function of Python raised when we called it,
  and a RuntimeError that another error caused. An OSError that is raised so says what
  could not be written, such as a checkpoint on a full disk, and what to do.
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
    return print(terminal.printable(''.join(lines)), end='', file=sys.stderr)
  # Name the line of the user's script that called us.
  between = (_PACKAGE, os.path.dirname(contextlib.__file__))
  outside = [
    call
    for call in calls
    if not call[0].startswith(between) and 'site-packages' not in call[0]
  ]
  path, line = (outside or calls)[-1]
  remedy = f"; pip install '{pin}'" if pin else ''
  # The text of an OSError begins with a number that says nothing to a user.
  said = isinstance(error, OSError) and not error.filename and error.strerror or error
  print(terminal.printable(f'{path}:{line}: {said}{remedy}'), file=sys.stderr)


def _find_pin(error: ModuleNotFoundError) -> str | None:
  """Returns the requirement of our extras that brings a missing module, or None."""
  try:
    known = metadata.requires('agent_r1_jax') or ()
  except metadata.PackageNotFoundError:  # Run from a checkout that is not installed.
    return None
  name = re.escape((error.name or '').partition('.')[0]).replace('_', '-')
  found = (re.match(rf'{name}\b[^;\s]*', line) for line in known if 'extra ==' in line)
  return next((match[0] for match in found if name and match), None)
