"""Benchmarks of other projects, whose packages are no requirement: BFCL and tau2-bench.

experiments/task_list.py has them as entries of experiments.evaluate.
"""

from collections.abc import Callable
from typing import NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax.contrib.benchmarks import bfcl, tau
from agent_r1_jax.rollout import rollout
from experiments import comparison
from experiments.miniwiki import shapes


class Outside(NamedTuple):
  """A benchmark: its tasks by set, the environment, and how much it needs.

  Attributes:
    load: Returns the tasks by the name of their set; gets --data.
    make_env: Makes the environment.
    rest: The metrics of the table beside 'passed'.
    config: Budgets for a model with the tokenizer of Qwen. The policy is miniwiki's,
      which solves none of the tasks: it is there to try the command.
  """

  load: Callable[[str], comparison.Sets]
  make_env: rollout.MakeEnv
  rest: tuple[str, ...]
  config: config_lib.Config


def _load_bfcl(data: str) -> comparison.Sets:
  return {
    category.removeprefix('multi_turn_'): bfcl.load(category, data)
    for category in bfcl.CATEGORIES
  }


def _load_tau(data: str) -> comparison.Sets:
  if not data:
    raise ValueError('--data: name a checkout of github.com/sierra-research/tau2-bench.')
  return {'': tau.load(data)}


def _make_config(slots: int, max_turns: int) -> config_lib.Config:
  return config_lib.Config(
    model=shapes.CONFIG.model,
    # What an API returns is not cut: BFCL's long contexts have results of 30,000 tokens.
    chat=config_lib.Chat(max_tool_tokens=slots, long_prompts='skip'),
    # Prompts of 4,000 to 10,000 tokens are read in long chunks.
    engine=config_lib.Engine(slots=slots, prefill_rows=4, prefill_tokens=512),
    limits=config_lib.Limits(max_turns=max_turns, max_turn_tokens=1024),
  )


BENCHMARKS = {
  'bfcl-multi-turn': Outside(
    _load_bfcl,
    bfcl.MultiTurnEnv,
    ('turns_passed', 'tool_calls', 'tool_errors'),
    _make_config(8192, 64),
  ),
  'tau2-telecom': Outside(
    _load_tau,
    tau.SoloEnv,
    ('ended', 'tool_calls', 'tool_errors'),
    _make_config(16384, 100),
  ),
}
