"""reasoning-gym's tasks: generated problems, scored by the code that generated them.

  tasks = reasoning.make_tasks('chain_sum', size=500, seed=0, max_terms=3)
  train.run(..., tasks=tasks, make_env=lambda: env.ToolEnv([], scorer.reward))

A reply's answer is the last <answer>...</answer> of the agent's last message, outside its
thoughts.
"""

from collections.abc import Sequence
import functools
import json
from typing import Any

from agent_r1_jax.agent import env
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.host import isolated
from agent_r1_jax.tasks import qa
from agent_r1_jax.types import Message, Task

PROMPT = (
  'Solve the problem. Think first if you need to, then give the answer alone inside '
  '<answer>...</answer>.\n\nProblem: '
)

# MiB that a score may allocate: some data sets run much code on an answer.
_MEMORY_MB = 1024


def make_tasks(name: str, size: int, seed: int, **config: Any) -> list[Task]:
  """Makes the tasks of one of reasoning-gym's data sets.

  Args:
    name: The data set, such as 'chain_sum' or 'sudoku'.
    size: The number of tasks.
    seed: The seed of the generator; other seeds give other tasks.
    **config: Further fields of the data set's configuration, such as its difficulty.

  Raises:
    ValueError: There is no such data set, or reasoning-gym rejects the configuration.
  """
  options = {'name': name, 'size': size, 'seed': seed, **config}
  try:
    data = _make_data(json.dumps(options, sort_keys=True))
  except (AssertionError, TypeError) as error:  # TypeError: also if not JSON.
    raise ValueError(f'reasoning-gym refuses {options}: {error}') from error
  return [
    Task(
      f'{name}-{seed}-{index}',
      [{'role': 'user', 'content': PROMPT + data[index]['question']}],
      data[index]['answer'],
      {'reasoning_gym': options, 'index': index},
    )
    for index in range(size)
  ]


class Scorer:
  """Reward and metrics of an episode; scores are computed in processes.

  scorer = reasoning.Scorer()
  env.ToolEnv(tools, scorer.reward, metrics=scorer.metrics)
  """

  def __init__(self, *, seconds: float = 10.0, processes: int = 2):
    """Starts no process yet.

    Args:
      seconds: Time limit of one score; a late one counts as wrong.
      processes: The maximum number of concurrent scores.
    """
    self._score = isolated.in_subprocess(
      score,
      seconds=seconds,
      processes=processes,
      memory_mb=_MEMORY_MB,
      imports=['reasoning_gym'],  # Takes seconds, not counted for an answer.
    )

  async def reward(self, task: Task, messages: Sequence[Message]) -> env.Score:
    """Returns the data set's score of the answer, from 0 to 1."""
    return (await self.metrics(task, messages))['score']

  async def metrics(self, task: Task, messages: Sequence[Message]) -> dict[str, float]:
    """Returns score, answered, and scoring_failed.

    scoring_failed is 1.0 if the data set's code failed on the answer or took too long.
    Such an answer is wrong, not an error: otherwise an agent could escape its reward.
    """
    answer = qa.extract_answer(messages_lib.last_reply(messages))
    answered = float(answer is not None)
    values = {'score': 0.0, 'answered': answered, 'scoring_failed': 0.0}
    if answer is not None:
      info = task.info
      try:
        values['score'] = await self._score(info['reasoning_gym'], info['index'], answer)
      except (TimeoutError, isolated.FailedError, isolated.EndedError):
        values['scoring_failed'] = 1.0
    return values


def score(options: dict[str, Any], index: int, answer: str) -> float:
  """Scores an answer; some data sets run much code on it, so use `Scorer`."""
  data = _make_data(json.dumps(options, sort_keys=True))
  return float(data.score_answer(answer, data[index]))


@functools.lru_cache(maxsize=8)
def _make_data(options: str):
  import reasoning_gym  # Takes two seconds.

  return reasoning_gym.create_dataset(**json.loads(options))
