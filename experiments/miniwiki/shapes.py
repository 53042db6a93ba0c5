"""The three shapes of an agent (figure 1 of arXiv 2511.14460) on miniwiki.

- Workflow: a fixed program searches, lets the model read, searches its answer, ...
- Agentic workflow: a loop of ReAct's form, in which the model chooses the searches.
- Autonomous agent: the tools are in the chat template, and the model was trained with
  them.
"""

import pathlib

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import tool
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments import comparison
from experiments.miniwiki import demos
from experiments.miniwiki import tasks as miniwiki

# The quickstart's configuration: the policy in this folder, and its training.
CONFIG = config_lib.Config(
  model=config_lib.Model(path=str(pathlib.Path(__file__).parent / 'model')),
  schedule=config_lib.Schedule(steps=40, tasks=16, samples=8, eval_every=10),
  limits=config_lib.Limits(max_turn_tokens=80),
  optimizer=config_lib.Optimizer(learning_rate=2e-4),
  engine=config_lib.Engine(slots=448, decode_steps=16, replicas=2),
)
REACT = '{question}\nThought, Action, Observation.'
READS = 4  # The searches of a workflow: three hops, and a spare one.


def methods(sets: comparison.Sets, world: int) -> dict[str, comparison.Method]:
  """Makes the methods of answering miniwiki's questions."""
  retriever = miniwiki.index(world)
  tool = search.search_tool(retriever, k=1)
  found = comparison.qa_methods(
    sets,
    retriever,
    tool,
    qa.paper_reward,
    direct=lambda task: task,
    rag=miniwiki.rag_task,
    agent=lambda task: task,
    react=react_task,
  )
  return {'workflow': (sets, lambda: Workflow(tool)), **found}


def react_task(task: types.Task) -> types.Task:
  """Asks the question in ReAct's form, as briefly as the small policy needs."""
  content = REACT.format(question=task.info['question'])
  return task.ask(content)


class Workflow:
  """A program that searches READS times and lets the model read all passages each time.

  The first query is the question, and each further one is the model's last answer. Each
  prompt is a new context; the last answer counts.
  """

  def __init__(self, search_tool: tool.Tool):
    self._tool = search_tool

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with the passages found for the question."""
    self._task, self._passages, self._searches = task, [], 0
    return await self._search(task.info['question'])

  async def step(self, reply: str) -> types.Step:
    """Searches the reply's answer; scores the last reply."""
    answer = qa.extract_answer(reply)
    if self._searches < READS and answer:
      return types.Step(await self._search(answer), fresh=True)
    return await self.finish('done', reply)

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Scores the episode by its last reply."""
    messages = [{'role': 'assistant', 'content': reply or ''}]
    metrics = qa.metrics(self._task, messages)
    metrics['tool_calls'] = float(self._searches)
    return types.Step([], qa.paper_reward(self._task, messages), True, metrics=metrics)

  async def _search(self, query: str) -> list[types.Message]:
    text = (await tool.call(self._tool, {'query': query})).text
    self._searches += 1
    if text not in self._passages:
      self._passages.append(text)
    passages = '\n'.join(self._passages)
    content = demos.with_passages(passages, self._task.info['question'])
    return [{'role': 'user', 'content': content}]
