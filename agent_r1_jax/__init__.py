"""Agent-R1 in JAX: end-to-end reinforcement learning of language-model agents.

Names that a script needs are imported lazily, so that a script that only defines a tool
does not wait for JAX:

  from agent_r1_jax import ToolEnv, algorithms, config, fields, tool, train, types
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from agent_r1_jax.agent.env import ToolEnv as ToolEnv
  from agent_r1_jax.agent.tool import tool as tool
  from agent_r1_jax.rl import algorithms as algorithms

__version__ = '0.1.0'

_MODULES = {
  'ToolEnv': 'agent_r1_jax.agent.env',
  'tool': 'agent_r1_jax.agent.tool',
  'algorithms': 'agent_r1_jax.rl.algorithms',
}


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(_MODULES[name])
  return getattr(module, name, module)
