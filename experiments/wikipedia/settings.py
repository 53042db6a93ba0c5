"""How a small policy and instruct models are asked real questions, and trained."""

from collections.abc import Callable, Sequence
import hashlib
import json
import os
import pathlib
import sys
from typing import NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import env
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.tasks import qa, qa_data
from agent_r1_jax.tools import search
from experiments import comparison
from experiments.wikipedia import reading


class Setting(NamedTuple):
  """How a kind of policy is asked, what it is given to read, and how it is trained."""

  agent_task: Callable[[types.Task], types.Task]
  direct_task: Callable[[types.Task], types.Task]
  rag_task: Callable[..., types.Task]
  template: str  # of a passage
  k: int  # passages a search
  rag_k: int
  reward: env.Reward
  kl: float
  config: config_lib.Config


SMALL = Setting(
  reading.agent_task,
  reading.agent_task,
  reading.rag_task,
  template=reading.PASSAGE,
  k=1,
  rag_k=4,
  reward=qa.em_reward,
  kl=0.0,
  config=config_lib.Config(
    model=config_lib.Model(path='runs/wikipedia_base/model'),
    schedule=config_lib.Schedule(steps=40, tasks=24, samples=8, eval_every=20),
    limits=config_lib.Limits(max_turns=6, max_turn_tokens=96),
    optimizer=config_lib.Optimizer(learning_rate=2e-4),
    engine=config_lib.Engine(
      rows=96,
      slots=1280,
      decode_steps=16,
      prefill_rows=32,
      prefill_tokens=32,
      bucket=128,
      replicas=1,
    ),
    batch=config_lib.Batch(microbatch=8),
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
  kl=0.001,
  config=config_lib.Config(
    model=config_lib.Model(dtype='bfloat16', remat='full'),
    schedule=config_lib.Schedule(eval_every=20),
  ),
)


def open_folder(
  setting: Setting, folder: str | os.PathLike
) -> tuple[list[documents.Document], documents.Retriever]:
  """Reads and indexes the passages of a folder that `qa_data.find` accepts."""
  corpus, _ = qa_data.find(folder)
  return index(setting, documents.read_corpus(corpus))


def index(
  setting: Setting, passages: Sequence[documents.Document]
) -> tuple[list[documents.Document], documents.Retriever]:
  """Returns the passages as the policy reads them, and what finds them."""
  if setting is INSTRUCT:
    return [*passages], bm25.BM25(passages)
  passages = reading.tidy(passages)
  return passages, reading.TitleFirst(passages, bm25.BM25(passages))


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


def shuffle(tasks: Sequence[types.Task], seed: int = 0) -> list[types.Task]:
  """Orders tasks by their ids and the seed alone."""
  key = lambda task: hashlib.sha256(f'{seed}/{task.id}'.encode()).digest()
  return sorted(tasks, key=key)


def split(
  tasks: Sequence[types.Task], *sizes: int, seed: int = 0
) -> list[list[types.Task]]:
  """Parts of the given sizes, then the rest; a task's part hangs on its id and the seed.

  Raises:
    ValueError: The sizes leave nothing.
  """
  if sum(sizes) >= len(tasks):
    raise ValueError(f'sizes {sizes} leave nothing of {len(tasks)} tasks; make them less')
  rest, parts = shuffle(tasks, seed), []
  for size in sizes:
    parts.append(rest[:size])
    rest = rest[size:]
  return [*parts, rest]


def setting_of(model: str) -> Setting:
  """SMALL where wikipedia.pretrain's list of rows is beside the model, else INSTRUCT.

  Without a model, wikipedia.pretrain's own is meant.
  """
  model = model or SMALL.config.model.path
  if rows_of(model).is_file():
    return SMALL
  if model == SMALL.config.model.path:
    sys.exit(
      f'{rows_of(model)} is missing: run experiments.wikipedia.pretrain, which makes the '
      'small policy, or name an instruct model with --config.model.path=DIR.'
    )
  return INSTRUCT


def rows_of(model: str) -> pathlib.Path:
  """Where wikipedia.pretrain lists the rows that the model beside it has seen."""
  return pathlib.Path(model).absolute().parent / 'rows.json'


def check_unseen(model: str, tasks: Sequence[types.Task]) -> None:
  """Raises ValueError if the base policy has seen a row that it is to be measured on."""
  path = rows_of(model)
  if seen := {task.id for task in tasks} & set(json.loads(path.read_text())):
    raise ValueError(
      f'{path}: the base has seen {len(seen)} of the rows kept from training; give both '
      'scripts the same --split, --held_out and --watched.'
    )
