"""How a small policy and instruct models are asked real questions, and trained."""

from collections.abc import Callable
import json
import pathlib
import sys
from typing import NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import env
from agent_r1_jax.retrieval import documents
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments import comparison
from experiments.hotpotqa import demos


class Setting(NamedTuple):
  """How a kind of policy is asked, what it is given to read, and how it is trained."""

  agent_task: Callable[[types.Task], types.Task]
  direct_task: Callable[[types.Task], types.Task]
  rag_task: Callable[..., types.Task]
  template: str  # of a passage
  k: int  # passages a search
  rag_k: int
  reward: env.Reward
  types: tuple[str, ...]  # of the rows to learn from; all if there are none
  kl: float
  config: config_lib.Config


SMALL = Setting(
  demos.agent_task,
  demos.agent_task,
  demos.rag_task,
  template=demos.PASSAGE,
  k=1,
  rag_k=3,
  reward=qa.em_reward,
  # Of the other rows the base answers one in a hundred: there is nothing to amplify.
  types=('comparison',),
  kl=0.0,
  config=config_lib.Config(
    model=config_lib.Model(path='runs/hotpotqa_base/model'),
    schedule=config_lib.Schedule(steps=60, tasks=24, samples=8, eval_every=20),
    limits=config_lib.Limits(max_turns=4, max_turn_tokens=96),
    optimizer=config_lib.Optimizer(learning_rate=3e-4),
    engine=config_lib.Engine(
      rows=192,
      slots=640,
      decode_steps=16,
      prefill_rows=32,
      prefill_tokens=32,
      bucket=64,
      replicas=1,
    ),
    batch=config_lib.Batch(microbatch=16),
  ),
)
INSTRUCT = Setting(
  qa.agent_task,
  qa.direct_task,
  qa.rag_task,
  template=documents.PASSAGE,
  k=5,
  rag_k=5,
  reward=qa.paper_reward,
  types=(),
  kl=0.001,
  config=config_lib.Config(
    model=config_lib.Model(dtype='bfloat16', remat='full'),
    schedule=config_lib.Schedule(eval_every=20),
  ),
)


def methods(
  setting: Setting, sets: comparison.Sets, retriever: documents.Retriever
) -> dict[str, comparison.Method]:
  """Makes the methods of answering questions, as the setting asks them."""
  return comparison.qa_methods(
    sets,
    retriever,
    search.search_tool(retriever, k=setting.k, template=setting.template),
    setting.reward,
    direct=setting.direct_task,
    rag=setting.rag_task,
    agent=setting.agent_task,
    rag_k=setting.rag_k,
  )


def setting_of(model: str) -> Setting:
  """SMALL where hotpotqa.pretrain's list of rows is beside the model, else INSTRUCT.

  Without a model, hotpotqa.pretrain's own is meant.
  """
  model = model or SMALL.config.model.path
  if rows_of(model).is_file():
    return SMALL
  if model == SMALL.config.model.path:
    sys.exit(
      f'{rows_of(model)} is missing: run experiments.hotpotqa.pretrain, which makes the '
      'small policy, or name an instruct model with --config.model.path=DIR.'
    )
  return INSTRUCT


def rows_of(model: str) -> pathlib.Path:
  """Where hotpotqa.pretrain lists the rows that the model beside it has seen."""
  return pathlib.Path(model).absolute().parent / 'rows.json'


def check_unseen(model: str, tasks) -> None:
  """Raises ValueError if the base policy has seen a row that it is to be measured on."""
  path = rows_of(model)
  if seen := {task.id for task in tasks} & set(json.loads(path.read_text())):
    raise ValueError(
      f'{path}: the base has seen {len(seen)} of the rows kept from training; give both '
      'scripts the same --split, --held_out and --watched.'
    )
