"""Adapters of several targets and ranks on the tiny policy, for the tests of adapters."""

import functools

import clients
import tiny

from agent_r1_jax.models import families, lora

RANK, NAMES = 4, ('all', 'few', 'one')
# Of several targets and ranks, each below or at that of the engine.
KINDS = {
  'all': (tuple(families.TARGETS), 4),
  'few': (('q', 'o', 'down'), 3),
  'one': (('v',), 1),
}


@functools.cache
def add(name, seed=0):
  """The base with an adapter that changes what is sampled."""
  targets, rank = KINDS[name]
  b = 0.6 if name == 'one' else 0.2
  return tiny.add_adapters(clients.params(), rank, targets, 2.0 * rank, b, seed)


def make(name, seed=0):
  return lora.take(add(name, seed))


def make_engine(names=NAMES, count=4, rank=RANK, **sizes):
  sizes = {'bucket': clients.SLOTS} | sizes
  engine = clients.engine(adapters=count, adapter_rank=rank, **sizes)
  for name in names:
    engine.adapters.set(name, make(name))
  return engine
