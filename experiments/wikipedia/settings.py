"""The paper's prompts of real questions to instruct models, and its training settings."""

from collections.abc import Sequence
import hashlib

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.retrieval import documents
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments import comparison

PASSAGES = 5  # Per search, and per prompt with passages.
CONFIG = config_lib.Config(
  model=config_lib.Model(dtype='bfloat16', remat='full'),
  schedule=config_lib.Schedule(eval_every=20),
)


def methods(
  sets: comparison.Sets, retriever: documents.Retriever
) -> dict[str, comparison.Method]:
  """Makes the methods of answering questions."""
  return comparison.qa_methods(
    sets,
    retriever,
    search.search_tool(retriever, k=PASSAGES),
    qa.paper_reward,
    direct=qa.direct_task,
    rag=qa.rag_task,
    agent=qa.agent_task,
    rag_k=PASSAGES,
  )


def shuffle(tasks: Sequence[types.Task], seed: int = 0) -> list[types.Task]:
  """Orders tasks by their ids and the seed alone."""
  key = lambda task: hashlib.sha256(f'{seed}/{task.id}'.encode()).digest()
  return sorted(tasks, key=key)


def split(
  tasks: Sequence[types.Task], *sizes: int, seed: int = 0
) -> list[Sequence[types.Task]]:
  """Returns parts of the given sizes, then the rest; parts depend on id and seed."""
  return comparison.split(shuffle(tasks, seed), *sizes)
