"""Responses that later requests may go on from, by `previous_response_id`."""

import collections
from collections.abc import Sequence
import contextlib
import json
from typing import Any

from agent_r1_jax.web import http

_MOST_KEPT, _MOST_CHARACTERS = 4096, 1 << 26


class KeptResponses:
  """The newest responses of a source, each with the items that came before it.

  There are _MOST_KEPT at most, and no more of them than have _MOST_CHARACTERS in all. One
  that is gone on from counts as new.
  """

  def __init__(self):
    # The items of a conversation and their number of characters, by the response's id.
    self._kept: collections.OrderedDict[str, tuple[list[Any], int]]
    self._kept = collections.OrderedDict()
    self._characters = 0

  def recall(self, name: str) -> list[Any]:
    """Returns the items up to the end of a response; raises RefusedError.

    It may be called in any thread.
    """
    if (found := self._kept.get(name)) is None:
      text = f'there is no response {name!r:.80}, or it is not kept any longer; send the '
      text += 'whole conversation as input'
      raise http.RefusedError(400, text, 'previous_response_not_found')
    with contextlib.suppress(KeyError):  # It may have been dropped since.
      self._kept.move_to_end(name)
    return found[0]

  def keep(self, name: str, items: Sequence[Any], previous: str | None) -> None:
    """Keeps the items up to the end of a response, and forgets the oldest ones.

    Args:
      name: The response's id.
      items: All items, those of the previous response first.
      previous: The id of the response that it goes on from, if it does.
    """
    before, size = self._kept.get(previous or '', ((), 0))
    size += len(json.dumps(items[len(before) :]))
    self._kept[name] = [*items], size
    self._characters += size
    while len(self._kept) > _MOST_KEPT or self._characters > _MOST_CHARACTERS:
      _, (_, size) = self._kept.popitem(last=False)
      self._characters -= size
