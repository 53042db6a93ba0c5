"""The parts that say which chips are used and what is written to be resumed from."""

import dataclasses

from agent_r1_jax import fields


@dataclasses.dataclass
class Mesh:
  """Over which chips training and sampling are split; see host/sharding.py.

  Attributes:
    data: How many copies of the training state there are.
    fsdp: Chips that each copy is split over; 0 is all that the other axes leave.
    tensor: Chips that share each layer, in training and in sampling.
    context: Chips that share each training row.
    samplers: Chips of each process that only sample, while the others only train; with 0
      all do both in turn.
  """

  data: int = 1
  fsdp: int = 0
  tensor: int = 1
  context: int = 1
  samplers: int = 0

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(self, 'mesh', at_least_1=('data', 'tensor', 'context'))


@dataclasses.dataclass
class Checkpoint:
  """What a run writes to disk to be resumed from.

  Attributes:
    every: Steps between checkpoints.
    keep: How many checkpoints are kept.
    keep_rollouts: Whether finished episodes are written, until a checkpoint has learned
      from them: after a kill they are not played again.
  """

  every: int = 20
  keep: int = 3
  keep_rollouts: bool = False

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(self, 'checkpoint', at_least_1=('every', 'keep'))
