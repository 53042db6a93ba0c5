"""Layers of two kinds, of which some attend and the others have a state.

The leaves of a part that only one kind has ('attn', 'linear') are stacked over its
layers, those of the others over all layers. The kinds repeat, for example three layers
with a state and one that attends: the scan is over these groups, so that a compiler sees
one.
"""

import functools
from typing import Any

from flax import linen as nn
import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.layers import REMAT_POLICIES, UNROLLED_LAYERS

_LEAF = 'a leaf of one layer'


class Layers(nn.Module):
  """All layers of a decoder, over packed rows.

  `block` is decoder.Block, whose layers return no cache here.
  """

  config: DecoderConfig
  block: type[nn.Module]

  @nn.compact
  def __call__(self, x_BTD, rows, angles, route_LBTk):
    """Returns the residual stream, and the loads of the experts [L, E], if any."""
    c = self.config
    if self.is_initializing():
      for place, leaves in self._init(x_BTD, rows, angles).items():
        self.param(place, lambda _, leaves=leaves: leaves)
      return x_BTD, None
    size = _find_period(c.recurrent)
    groups = c.num_layers // size
    divide = lambda x: x.reshape(groups, -1, *x.shape[1:])
    stacked = jax.tree.map(divide, self.variables['params'])
    policy = REMAT_POLICIES[c.remat]
    # A leaf that a layer is cut out of is in memory anyway; the layer's would be a copy.
    policy = policy or jax.checkpoint_policies.save_anything_except_these_names(_LEAF)

    def apply_group(x_BTD, given):
      group, route_lBTk = given
      loads = []
      for i in range(size):
        apply = jax.checkpoint(
          lambda x, group, route, i=i: self._apply(i, group, x, rows, angles, route),
          policy=policy,
          prevent_cse=False,
        )
        route_BTk = None if route_lBTk is None else route_lBTk[i]
        x_BTD, load_E = apply(x_BTD, group, route_BTk)
        loads.append(load_E)
      return x_BTD, None if loads[0] is None else jnp.stack(loads)

    routes = None if route_LBTk is None else divide(route_LBTk)
    unroll = groups if c.num_layers <= UNROLLED_LAYERS else 1
    x_BTD, loads = jax.lax.scan(apply_group, x_BTD, (stacked, routes), unroll=unroll)
    return x_BTD, None if loads is None else loads.reshape(c.num_layers, -1)

  def _apply(
    self, i: int, group: dict[str, Any], x_BTD: Array, rows, angles, route_BTk
  ) -> tuple[Array, Array | None]:
    """Applies layer i of a group; its leaves have the names of learner's parameters."""
    leaves = {}
    for place, leaf in group.items():
      layers = self.config.list_layers(place)
      if i in layers:
        take = lambda x, at: checkpoint_name(x[at], _LEAF)
        at = layers.index(i)
        leaves[place] = jax.tree.map(functools.partial(take, at=at), leaf)
    layer = _Layer(self.config, self.block, self.config.recurrent[i], parent=None)
    variables = {'params': {'layers': leaves}}
    out: Any = layer.apply(variables, x_BTD, rows, angles, None, route_BTk)
    return out

  def _init(self, x_BTD, rows, angles) -> dict[str, Any]:
    c = self.config
    keys = jax.random.split(self.make_rng('params'), c.num_layers)
    made, order = [], []
    for recurs in (False, True):
      layers = [i for i in range(c.num_layers) if c.recurrent[i] is recurs]
      init = self.block(c, recurs=recurs, parent=None).init
      init_layer = lambda key, init=init: init(key, x_BTD, rows, angles, None)['params']
      made.append(jax.vmap(init_layer)(keys[jnp.array(layers)]))
      order += layers
    places = jnp.argsort(jnp.array(order))
    join = lambda *x: jnp.concatenate(x)[places]
    both = {
      k: jax.tree.map(join, made[0][k], made[1][k]) for k in {*made[0]} & {*made[1]}
    }
    return made[0] | made[1] | both


class _Layer(nn.Module):
  """A block under the name that the layers have among the learner's parameters."""

  config: DecoderConfig
  block: type[nn.Module]
  recurs: bool

  @nn.compact
  def __call__(self, *given):
    return self.block(self.config, recurs=self.recurs, name='layers')(*given)


def _find_period(kinds: tuple[bool, ...]) -> int:
  """Finds after how many layers their kinds repeat."""
  return next(
    n
    for n in range(1, len(kinds) + 1)
    if len(kinds) % n == 0 and kinds == kinds[:n] * (len(kinds) // n)
  )
