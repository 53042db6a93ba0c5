"""The adapters of an engine by name, and the slots of the device in which they are.

A request names an adapter. While the request is under way it uses that adapter's slot,
which then belongs to no other name: an adapter that is removed answers the requests that
have begun. New weights under a name come to its slot, and to the requests under way. A
name that was removed and comes again is another adapter.
"""

from collections.abc import Sequence
import itertools
import threading
from typing import Any, NamedTuple

from jax.sharding import Mesh
import numpy as np

from agent_r1_jax.models import decoder, lora, stacked_adapters


class Weights(NamedTuple):
  """What a slot holds."""

  version: int  # A number that differs where the weights do.
  step: int  # The policy_step of Engine.set_adapter, reported with each token.
  adapter: int  # The first version of the name; 0 is no adapter.


class Slots(NamedTuple):
  """What all slots hold at one time; other weights make another one."""

  weights: tuple[Weights, ...]
  # The stacks on each chip (or on `tensor` of them); none if there are no adapters.
  copies: list[stacked_adapters.Stacks]

  def select(self, copy_index: int, slots: np.ndarray) -> lora.Adapters | None:
    """Selects the slot of each entry of a call; None if there are no adapters."""
    index: Any = slots  # jit takes numpy arrays too.
    return lora.Adapters(self.copies[copy_index], index) if self.copies else None


class AdapterTable:
  """The named adapters; any thread may call it.

  Attributes:
    count: The most adapters; 0 leaves them out of all programs.
    rank: The highest rank of one.
    slots: What the slots hold now. Slot 0 stands for no adapter.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    count: int,
    rank: int,
    meshes: Sequence[Mesh | None],
  ):
    """Allocates the stacks on each mesh.

    Raises:
      ValueError: A number is too small.
    """
    if count < 0 or rank < 1:
      raise ValueError(
        f'adapters is {count} and adapter_rank {rank}; they must be at least 0 and 1.'
      )
    self.count, self.rank, self._config = count, rank, config
    copies = [
      stacked_adapters.make(config, count + 1, rank, mesh)
      for mesh in (meshes if count else ())
    ]
    self.slots = Slots((Weights(0, 0, 0),) * (count + 1), copies)
    self._names: dict[str, int] = {}
    self._users = [0] * (count + 1)
    self._versions = itertools.count(1)
    # The first is held while weights are copied, the second only while names change: the
    # event loop waits for no copy.
    self._setting, self._naming = threading.Lock(), threading.Lock()

  @property
  def names(self) -> list[str]:
    """The names in the order in which they came."""
    return [*self._names]

  @property
  def free(self) -> int:
    """How many slots neither a name nor a request has."""
    with self._naming:
      return len(self._list_free_slots())

  @property
  def unused(self) -> list[str]:
    """The names that no request uses, in the order in which they came."""
    with self._naming:
      return [name for name, slot in self._names.items() if not self._users[slot]]

  def set(self, name: str, adapter: dict[str, Any], policy_step: int | None):
    """Gives a name these weights; see Engine.set_adapter."""
    if not isinstance(name, str) or not name:
      raise ValueError(f'an adapter is named {name!r}; give it a text.')
    if not self.count:
      raise ValueError('the engine has no room for adapters: make it with adapters=n.')
    values = stacked_adapters.prepare(self._config, adapter, self.rank)
    with self._setting:
      weights, version = [*self.slots.weights], next(self._versions)
      if name in self._names:
        slot = self._names[name]
        _, step, first = weights[slot]
      else:
        slot, step, first = self._find_free_slot(name), -1, version
      step = step + 1 if policy_step is None else policy_step
      weights[slot] = Weights(version, step, first)
      copies = [stacked_adapters.put(x, slot, values) for x in self.slots.copies]
      # Before the name, which a request may use from then on.
      self.slots = Slots(tuple(weights), copies)
      with self._naming:
        self._names[name] = slot

  def remove(self, name: str):
    """Removes a name; see Engine.remove_adapter."""
    with self._setting, self._naming:
      self._find_slot(name)
      del self._names[name]

  def acquire(self, name: str | None) -> int:
    """Adds a user to an adapter and returns its slot; `release` takes it in the end.

    Raises:
      ValueError: No adapter has the name.
    """
    if name is None:
      return 0
    with self._naming:
      slot = self._find_slot(name)
      self._users[slot] += 1
    return slot

  def release(self, slot: int):
    """Removes the user that `acquire` has added."""
    with self._naming:
      self._users[slot] -= 1 if slot else 0

  def _find_slot(self, name: str) -> int:
    if name not in self._names:
      names = ', '.join(self._names) or 'none'
      raise ValueError(
        f'there is no adapter {name!r:.80}; there are: {names}. Engine.set_adapter adds '
        'one.'
      )
    return self._names[name]

  def _find_free_slot(self, name: str) -> int:
    """Finds a slot that no name and no request has."""
    free = self._list_free_slots()
    if not free:
      raise ValueError(
        f'there is no room for the adapter {name!r:.80}: {", ".join(self._names)} and '
        f'requests of removed ones use all {self.count} slots. Remove one, wait until '
        'its requests have ended, or make the engine with more adapters.'
      )
    return free[0]

  def _list_free_slots(self) -> list[int]:
    used = {0, *self._names.values()}
    return [slot for slot, n in enumerate(self._users) if not (n or slot in used)]
