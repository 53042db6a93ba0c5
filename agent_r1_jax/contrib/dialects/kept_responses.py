"""Stored responses that later requests may continue, by `previous_response_id`."""

import collections
from collections.abc import Sequence
import contextlib
import json
from typing import Any

from agent_r1_jax.web import http

_MOST_KEPT, _MOST_CHARACTERS = 4096, 1 << 26


class KeptResponses:
  """The newest responses of a source, each with the items before it.

  Limited to _MOST_KEPT responses with _MOST_CHARACTERS in total. Continuing a response
  makes it the newest.
  """

  def __init__(self):
    # A conversation's items and their number of characters, by the response's id.
    self._kept: collections.OrderedDict[str, tuple[list[Any], int]]
    self._kept = collections.OrderedDict()
    self._characters = 0

  def recall(self, name: str) -> list[Any]:
    """Returns the items up to the end of a response; raises RefusedError.

    Thread-safe.
    """
    if (found := self._kept.get(name)) is None:
      text = f'there is no response {name!r:.80}, or it is not kept any longer; send the '
      text += 'whole conversation as input'
      raise http.RefusedError(400, text, 'previous_response_not_found')
    with contextlib.suppress(KeyError):  # It may have been dropped since.
      self._kept.move_to_end(name)
    return found[0]

  def keep(self, name: str, items: Sequence[Any], previous: str | None) -> None:
    """Stores the items up to the end of a response, and drops the oldest responses.

    Args:
      name: The response's id.
      items: All items, beginning with the previous response's.
      previous: The id of the response that it continues, if any.
    """
    before, size = self._kept.get(previous or '', ((), 0))
    size += len(json.dumps(items[len(before) :]))
    self._kept[name] = [*items], size
    self._characters += size
    while len(self._kept) > _MOST_KEPT or self._characters > _MOST_CHARACTERS:
      _, (_, size) = self._kept.popitem(last=False)
      self._characters -= size
