"""How the replies of an episode are sampled."""

from collections.abc import Mapping
from typing import NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.rollout import sockets


class Decoding(NamedTuple):
  """How the replies of a rollout are sampled.

  Attributes:
    sampling: Temperature, top-k, top-p, min-p.
    grammar: Restricts replies to a grammar, which makes the samples off-policy.
    policy: The policy that samples; None for the engine's newest at each decode.
    choice: Samples several candidates and chooses one, which makes the episodes
      off-policy; None samples each reply once.
    guides: Guides that the engine was made with, and the initial state of each.
    replay: Whether a mixture of experts records the experts that compute each token.
  """

  sampling: config_lib.Sampling = config_lib.Sampling()
  grammar: types.Automaton | None = None
  policy: protocol.Policy | None = None
  choice: sockets.Choice | None = None
  guides: Mapping[guide_lib.Guide, guide_lib.State] = {}
  replay: bool = False


ON_POLICY = Decoding()
