"""An environment whose tool has other code on the nodes of nodes.py."""

import os

import runs

from agent_r1_jax.agent import tool as tool_lib

if 'AGENT_R1_TEST_NODE' in os.environ:

  def look(seconds: float) -> str:
    """Looks something up.

    Args:
      seconds: How long it takes.
    """
    return 'it was'

else:

  def look(seconds: float) -> str:
    """Looks something up.

    Args:
      seconds: How long it takes.
    """
    return 'it is'


def make_env():
  return runs.make_env([tool_lib.tool(look)])
