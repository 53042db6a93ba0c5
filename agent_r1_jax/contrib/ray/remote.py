"""The learner's view of a sampler: a remote process, which can be lost."""

import dataclasses
from typing import Any, Protocol


class LostError(Exception):
  """A sampler has ended, or does not answer."""


class RaisedError(Exception):
  """A call raised on the sampler; the text is the error."""


class RefusedError(Exception):
  """A sampler's code or machine differs from the learner's."""


class Remote(Protocol):
  """A remote process that samples (its methods are in sampler.py)."""

  async def call(self, method: str, *args: Any) -> Any:
    """Calls a method; cancelling the call here cancels it there.

    Raises:
      LostError, RaisedError: See these classes.
    """
    ...

  def kill(self) -> None:
    """Ends the process, if it still runs, without waiting."""
    ...


@dataclasses.dataclass(frozen=True)
class Policy:
  """Published parameters.

  Attributes:
    version: How many have been published before.
    step: The policy step of its tokens.
    learned: The argument `learned` of `Sampler.sync`.
    frozen: The argument `frozen`, which is the same in all versions.
  """

  version: int
  step: int
  learned: Any
  frozen: Any
