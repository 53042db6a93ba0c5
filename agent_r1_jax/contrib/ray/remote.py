"""A sampler as the learner sees it: a process somewhere, which can be lost."""

import dataclasses
from typing import Any, Protocol


class LostError(Exception):
  """A sampler has ended, or does not answer."""


class RaisedError(Exception):
  """A call raised on the sampler; the text says what."""


class RefusedError(Exception):
  """A sampler has other code or another machine than the learner."""


class Remote(Protocol):
  """A process that samples, somewhere (sampler.py has its methods)."""

  async def call(self, method: str, *args: Any) -> Any:
    """Calls a method; cancels it there if it is cancelled here.

    Raises:
      LostError, RaisedError: See there.
    """
    ...

  def kill(self) -> None:
    """Ends the process, if it is still there; does not wait for that."""
    ...


@dataclasses.dataclass(frozen=True)
class Policy:
  """Parameters that are published.

  Attributes:
    version: How many there have been before.
    step: The policy step of its tokens.
    learned: What `Sampler.sync` takes as `learned`.
    frozen: What it takes as `frozen`, which is the same in all versions.
  """

  version: int
  step: int
  learned: Any
  frozen: Any
