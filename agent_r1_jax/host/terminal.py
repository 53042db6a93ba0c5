"""Text for a terminal: nothing in it can control the terminal.

What a model, a tool or a program writes may contain escape sequences, which set the
title, the colours or the clipboard of a terminal. `printable` shows them as pictures.
"""

import logging
import warnings

# Newline and tab stay. Unicode has pictures of ASCII's control characters (ESC is ␛), and
# none of those from 0x80 on, of which some terminals take 0x9b for ESC [. Marks of
# direction change the order in which other text is shown; two more begin a line.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in '\n\t'}
_PICTURES |= {0x7F: '\u2421'} | dict.fromkeys(range(0x80, 0xA0), '\ufffd')
_PICTURES |= dict.fromkeys((0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F)), '\ufffd')
_PICTURES |= dict.fromkeys(range(0x2066, 0x206A), '\ufffd')


def printable(text: str, encoding: str | None = 'utf-8') -> str:
  """Replaces control characters by pictures of them, newlines and tabs aside.

  The text may have half a surrogate. Characters that the terminal's encoding lacks become
  '?'.
  """
  encoding = encoding or 'utf-8'
  return text.translate(_PICTURES).encode(encoding, errors='replace').decode(encoding)


def install() -> None:
  """Makes log records and warnings of this process printable, whoever shows them."""
  logging.setLogRecordFactory(_Record)
  if not isinstance(warnings.formatwarning, _WarningFormat):
    warnings.formatwarning = _WarningFormat(warnings.formatwarning)


class _Record(logging.LogRecord):
  def getMessage(self) -> str:  # noqa: N802
    return printable(super().getMessage())


class _WarningFormat:
  def __init__(self, formatwarning):
    self._format = formatwarning

  def __call__(self, *args, **kwargs) -> str:
    return printable(self._format(*args, **kwargs))
