"""Layers of several kinds: attention and recurrent layers, or layers of different heads.

A leaf is stacked over the layers that have it. The kinds repeat, for example three
recurrent layers and one attention layer; the scan is over these groups, so XLA compiles
one. Layers that share the keys and values of earlier layers have a scan of their own.
"""

import functools
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from agent_r1_jax.models.block import Block
from agent_r1_jax.models.decoder_config import DecoderConfig, LayerShape, layer_kinds
from agent_r1_jax.models.layers import REMAT_POLICIES, UNROLLED_LAYERS

_LEAF = 'a leaf of one layer'
# Keys and values [B, T, K, H] to share, by whether their layer attends to all tokens.
_Kept = dict[bool, tuple[Array, ...]]


class Layers(nn.Module):
  """All layers of a decoder, over packed rows."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BTD, rows, angles, inputs_LBTi, route_LBTk):
    """Returns the residual stream, and the experts' loads [L, E], if any."""
    c = self.config
    if self.is_initializing():
      for place, leaves in self._init(x_BTD, rows, angles).items():
        self.param(place, lambda _, leaves=leaves: leaves)
      return x_BTD, None
    first = c.num_layers - c.shared_layers
    given = rows, angles
    kept, loads = {}, []
    for layers in filter(None, (range(first), range(first, c.num_layers))):
      own = [
        None if x is None else x[layers[0] : layers[-1] + 1]
        for x in (inputs_LBTi, route_LBTk)
      ]
      x_BTD, kept, load_LE = self._scan(layers, x_BTD, kept, own, given)
      loads.append(load_LE)
    return x_BTD, None if loads[0] is None else jnp.concatenate(loads)

  def _scan(self, layers: range, x_BTD: Array, kept: _Kept, own: list, given: tuple):
    """Applies layers group by group; also returns the keys and values to share."""
    c = self.config
    kinds = layer_kinds(c) or [None] * c.num_layers
    facts = [(c.layer_shapes[i], kinds[i]) for i in layers]
    size = _find_period(facts)
    groups = len(layers) // size
    divide = lambda x: x.reshape(groups, -1, *x.shape[1:])
    stacked = {path: divide(x) for path, x in self._cut(layers).items()}
    policy = REMAT_POLICIES[c.remat]
    # The stacked leaf is in memory anyway; saving a layer's leaf would copy it.
    policy = policy or jax.checkpoint_policies.save_anything_except_these_names(_LEAF)

    def apply_group(carry, xs):
      (x_BTD, new), (group, own) = carry, xs
      loads = []
      for i, (shape, kind) in enumerate(facts[:size]):
        leaves = functools.partial(self._take, layers[:size], i)

        def apply(x_BTD, group, own, shared, leaves=leaves, shape=shape, kind=kind):
          inputs_BTi, route_BTk = own
          kind = kind and kind._replace(inputs=inputs_BTi, shared=shared)
          return _apply(c, shape, leaves(group), x_BTD, *given, kind, route_BTk)

        compute: Any = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        mine = [None if x is None else x[i] for x in own]
        shared = kept[shape.sees_all] if shape.shares else None
        x_BTD, load_E = compute(x_BTD, group, mine, shared)
        if c.shared_layers:
          load_E, pair = load_E
          new = new if shape.shares else new | {shape.sees_all: pair}
        loads.append(load_E)
      return (x_BTD, new), None if loads[0] is None else jnp.stack(loads)

    own = [None if x is None else divide(x) for x in own]
    unroll = groups if c.num_layers <= UNROLLED_LAYERS else 1
    carry = x_BTD, self._make_kept(layers, x_BTD)
    (x_BTD, new), loads = jax.lax.scan(apply_group, carry, (stacked, own), unroll=unroll)
    loads = None if loads is None else loads.reshape(len(layers), -1)
    return x_BTD, new, loads

  def _make_kept(self, layers: range, x_BTD: Array) -> _Kept:
    """Makes zeros for the keys and values that later layers share."""
    c = self.config
    if not c.shared_layers or c.layer_shapes[layers[0]].shares:
      return {}
    kinds = {c.layer_shapes[i].sees_all for i in layers}
    heads = {kind: (*x_BTD.shape[:2], *c.get_heads(kind)) for kind in kinds}
    return {kind: (jnp.zeros(x, c.dtype),) * 2 for kind, x in heads.items()}

  def _cut(self, layers: range) -> dict[str, Array]:
    """Slices the stacked leaves to these layers; returns them by path."""
    flat: Any = traverse_util.flatten_dict(self.variables['params'], sep='/')
    parts = {}
    for path, x in flat.items():
      having = self.config.list_layers(f'layers/{path}')
      places = [place for place, layer in enumerate(having) if layer in layers]
      if places:
        whole = len(places) == len(having)
        parts[path] = x if whole else x[places[0] : places[-1] + 1]
    return parts

  def _take(self, layers: range, i: int, group: dict[str, Array]) -> dict[str, Any]:
    """Returns the leaves of layer i of a group."""
    leaves = {}
    for path, x in group.items():
      having = [n for n in self.config.list_layers(f'layers/{path}') if n in layers]
      if layers[i] in having:
        leaves[path] = checkpoint_name(x[having.index(layers[i])], _LEAF)
    return traverse_util.unflatten_dict(leaves, sep='/')

  def _init(self, x_BTD, rows, angles) -> dict[str, Any]:
    c = self.config
    keys = jax.random.split(self.make_rng('params'), c.num_layers)
    parts: dict[str, list[Any]] = {}
    order: dict[str, list[int]] = {}
    for shape in sorted(set(c.layer_shapes)):
      layers = [i for i in range(c.num_layers) if c.layer_shapes[i] == shape]
      init = Block(c, shape=shape, parent=None).init
      init_layer = lambda key, init=init: init(key, x_BTD, rows, angles, None)['params']
      made = jax.vmap(init_layer)(keys[jnp.array(layers)])
      for path, x in traverse_util.flatten_dict(made, sep='/').items():
        parts.setdefault(path, []).append(x)
        order.setdefault(path, []).extend(layers)
    join = lambda path: jnp.concatenate(parts[path])[jnp.argsort(jnp.array(order[path]))]
    return traverse_util.unflatten_dict({path: join(path) for path in parts}, sep='/')


def _apply(c: DecoderConfig, shape: LayerShape, leaves: dict[str, Any], *given) -> Any:
  """Applies a block, under the learner's parameter names."""
  layer = _Layer(c, shape, parent=None)
  return layer.apply({'params': {'layers': leaves}}, *given)


class _Layer(nn.Module):
  """A block under the name that layers have in the learner's parameters."""

  config: DecoderConfig
  shape: LayerShape

  @nn.compact
  def __call__(self, *given):
    return Block(self.config, shape=self.shape, name='layers')(*given)


def _find_period(kinds: list[Any]) -> int:
  """Finds the number of layers after which their kinds repeat."""
  return next(
    n
    for n in range(1, len(kinds) + 1)
    if len(kinds) % n == 0 and kinds == kinds[:n] * (len(kinds) // n)
  )
