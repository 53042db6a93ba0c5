"""Separates a policy's thoughts, <think>...</think>, from its answer.

Dialects with a field for thoughts show them there if the client asks, and read them from
there. `join` restores exactly what was split, apart from white space before it.
"""

from agent_r1_jax.serve import replies

_OPENING, _CLOSING = '<think>', '</think>'


class Split:
  """Splits a reply while it is sampled.

  Attributes:
    is_closed: Whether the thoughts have ended.
  """

  def __init__(self, wanted: bool):
    """Begins; if not `wanted`, everything is text."""
    self._state, self._held = 'start' if wanted else 'text', ''
    self.is_closed = False

  def add(self, text: str, is_last: bool) -> list[tuple[str, str]]:
    """Adds text; returns pairs of kind, 'thinking' or 'text', and new text.

    A 'thinking' pair with an empty text means that the thoughts have begun.
    """
    self._held += text
    found = []
    if self._state == 'start':
      begun = self._held.lstrip()
      if begun.startswith(_OPENING):
        self._state, self._held = 'thinking', begun.removeprefix(_OPENING)
        found.append(('thinking', ''))
      elif is_last or not _OPENING.startswith(begun):
        self._state = 'text'
    if self._state == 'thinking':
      thought, closing, after = self._held.partition(_CLOSING)
      if closing:
        self._state, self._held, self.is_closed = 'text', after, True
      else:
        kept = 0 if is_last else replies.count_beginning(thought, [_CLOSING])
        thought, self._held = thought[: len(thought) - kept], thought[-kept:] * bool(kept)
      found.append(('thinking', thought))
    if self._state == 'text':
      found.append(('text', self._held))
      self._held = ''
    return [(kind, more) for kind, more in found if more or kind == 'thinking']


def join(thoughts: str, is_closed: bool) -> str:
  """Returns the beginning of a reply with these thoughts."""
  return _OPENING + thoughts + _CLOSING * is_closed
