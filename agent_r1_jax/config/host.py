"""Settings of the chips and of checkpoints."""

import dataclasses

from agent_r1_jax import fields


@dataclasses.dataclass
class Mesh:
  """How the chips share training and sampling; see models/sharding.py.

  Attributes:
    data: The number of copies of the training state.
    fsdp: Chips over which each copy is sharded; 0 is the number of chips divided by the
      other axes.
    tensor: Chips that share each layer, in training and in sampling.
    context: Chips that share each training row.
    samplers: Chips of each process that only sample, while the others only train; with 0
      all chips do both.
  """

  data: int = 1
  fsdp: int = 0
  tensor: int = 1
  context: int = 1
  samplers: int = 0

  def axes(self, chips: int) -> dict[str, int]:
    """Returns the sizes of the mesh's axes on this number of chips, in their order."""
    other_axes = self.data * self.tensor * self.context
    fsdp = self.fsdp or max(1, chips // other_axes)
    axes = {'data': self.data, 'fsdp': fsdp}
    return axes | {'tensor': self.tensor, 'context': self.context}

  def count_groups(self, chips: int) -> int:
    """Returns how many groups of chips the rows of a micro-batch are split over."""
    axes = self.axes(chips)
    return axes['data'] * axes['fsdp']

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(self, 'mesh', at_least_1=('data', 'tensor', 'context'))


@dataclasses.dataclass
class Checkpoint:
  """How often the run is saved, so that it can be resumed.

  Attributes:
    every: Steps between checkpoints.
    keep: How many checkpoints are kept.
    keep_rollouts: Whether finished episodes are written, and kept until there is a
      checkpoint after their update: after a kill they are not played again.
  """

  every: int = 20
  keep: int = 3
  keep_rollouts: bool = False

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(self, 'checkpoint', at_least_1=('every', 'keep'))
