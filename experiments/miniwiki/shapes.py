"""The three shapes of an agent (figure 1 of arXiv 2511.14460) on miniwiki.

- Workflow: a fixed program searches, lets the model read, searches what it named, ...
- Agentic workflow: a loop of ReAct's form, in which the model chooses the searches.
- Autonomous agent: the tools stand in the chat template, and the model was trained with
  them.

The small policy of miniwiki does what it has practised and nothing else, so `lessons`
makes conversations for fine-tuning it on the prompts of the first two.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import pathlib
import random
import re

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls, tool
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments import comparison, react
from experiments.miniwiki import demos
from experiments.miniwiki import tasks as miniwiki

# The quickstart's configuration: the policy beside this file, and how it is trained.
CONFIG = config_lib.Config(
  model=config_lib.Model(path=str(pathlib.Path(__file__).parent / 'model')),
  schedule=config_lib.Schedule(steps=40, tasks=16, samples=8, eval_every=10),
  limits=config_lib.Limits(max_turn_tokens=80),
  optimizer=config_lib.Optimizer(learning_rate=2e-4),
  engine=config_lib.Engine(slots=448, decode_steps=16, replicas=2),
)
REACT = '{question}\nThought, Action, Observation.'
READS = 4  # The searches of a workflow: three hops, and one that may fail.
_ACT = re.compile(r'(?=<tool_call>|<answer>)')


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
  """Asks the question in ReAct's form, as briefly as the small policy needs it."""
  content = REACT.format(question=task.info['question'])
  return dataclasses.replace(task, messages=[{'role': 'user', 'content': content}])


class Workflow:
  """A program that searches READS times and lets the model read all passages each time.

  The first query is the question, and each further one is what the model answered. Each
  prompt is a new context; the last answer counts.
  """

  def __init__(self, search_tool: tool.Tool):
    self._tool = search_tool

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with what the question itself finds."""
    self._task, self._passages, self._searches = task, [], 0
    return await self._search(task.info['question'])

  async def step(self, reply: str) -> types.Step:
    """Searches what the reply answers; scores the last reply."""
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
    return _read(self._passages, self._task)


def _read(passages: list[str], task: types.Task) -> list[types.Message]:
  content = demos.with_passages('\n'.join(passages), task.info['question'])
  return [{'role': 'user', 'content': content}]


def lessons(
  seed: int, mixture: Mapping[str, float] = demos.MIXTURE
) -> Iterator[list[types.Message]]:
  """Yields conversations of both prompts by halves, for ever; none is of a test's world.

  Args:
    seed: The seed of the world, the questions and the choices.
    mixture: Shares of the demonstrations' fates; keys of demos.MIXTURE. A workflow's are
      'right', and all others answer after the first hop.
  """
  rng = random.Random(f'miniwiki lessons {seed}')
  tasks = miniwiki.train_tasks(seed, 4096, 'base')
  find = miniwiki.make_search(miniwiki.corpus(seed, 'base'))
  shown = miniwiki.demonstrations(tasks, seed, seed, find, 'base', mixture)
  while True:
    for task in rng.sample(tasks, len(tasks)):
      yield from _workflow(task, find, rng.random() < mixture['right'])
      # As many as a workflow's prompts, so that both have half of the conversations.
      for _ in range(READS):
        yield retell(next(shown))


def retell(messages: list[types.Message]) -> list[types.Message]:
  """Writes a demonstration of demos.py in ReAct's form."""
  told = [{'role': 'user', 'content': REACT.format(question=messages[0]['content'])}]
  for message in messages[1:]:
    content = message['content']
    if message['role'] == 'tool':
      content = react.observe(content)
    else:
      said, act = (part.strip() for part in _ACT.split(content, maxsplit=1))
      found = [
        c for c in call_formats.HERMES.parse(content) if isinstance(c, calls.ToolCall)
      ]
      act = react.FORMAT.render(found[0]) if found else f'Final Answer: {act}'
      content = f'Thought: {said}\n{act}' if said else act
    told.append({**message, 'content': content})
  return told


def _workflow(
  task: types.Task, find: Callable[[str], str], right: bool
) -> Iterator[list[types.Message]]:
  """Yields each prompt of a workflow with the reply to it, as it would go."""
  passages, query = [], task.info['question']
  for _ in range(READS):
    text = find(query)
    if text not in passages:
      passages.append(text)
    said, query = _say(task, passages, right)
    reply = f'{said} {demos.answer(query)}'.strip()
    yield [*_read(passages, task), {'role': 'assistant', 'content': reply}]


def _say(task: types.Task, passages: list[str], right: bool) -> tuple[str, str]:
  """Returns what the passages say, and the answer or the name to look up next."""
  info, shown = task.info, '\n'.join(passages)
  there = [f'(Title: {title})' in shown for title in info['chain']]
  if info['kind'] == 'comparison':
    years = zip(info['years'], info['chain'], there, strict=True)
    read = [(year, name) for year, name, is_there in years if is_there]
    said = [demos.dated(*pair) for pair in read]
    missing = [
      n for n, is_there in zip(info['chain'], there, strict=True) if not is_there
    ]
    if missing:
      return ' '.join(said), missing[0] if right or not read else read[0][1]
    sentence, winner = demos.compared(info['sign'], read)
    return ' '.join([*said, sentence]), winner
  values = [*info['chain'][1:], *task.answer]
  known = there.index(False) if False in there else len(there)
  known = known if right else min(known, 1)
  said = [
    demos.found(relation, value)
    for relation, value in zip(info['relations'][:known], values[:known], strict=True)
  ]
  return ' '.join(said), ([info['chain'][0], *values])[known]
