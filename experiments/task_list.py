"""The tasks that agents are evaluated on, by name; TASKS lists them.

To add a task, write a function from a `Source` to a `Benchmark`, and add it to TASKS.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.agent import env
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.rollout import rollout
from agent_r1_jax.tasks import mathematics, programming, qa, qa_data
from agent_r1_jax.tools import calculator, python, sandbox
from agent_r1_jax.train import fingerprint
from experiments import comparison, react, retrievers
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki
from experiments.wikipedia import settings
from experiments.worlds import all_worlds
from experiments.worlds import world as world_lib

# From the replies of a task's samples to their answers; equivalent answers are equal, and
# None means no answer.
Answers = Callable[[Sequence[str]], Sequence[Hashable | None]]


class Source(NamedTuple):
  """A task's settings from the command line.

  Attributes:
    data: Its file or folder; empty is the default place, if it has one.
    model: The directory of the policy; empty is the task's own small policy.
    limit: The maximum number of tasks per set; 0 is all.
    retriever: The retriever, if the task has no passages; see retrievers.open_retriever.
    encoder: The directory of the dense indexes' model.
  """

  data: str
  model: str
  limit: int
  retriever: str = ''
  encoder: str = ''


class Benchmark(NamedTuple):
  """Held-out tasks, the methods to play them, and how they are scored.

  Attributes:
    methods: By name: (tasks by set, a function that makes an environment).
    score: The metric that is 1 for a right answer.
    rest: Further metrics of the table.
    answers: Extracts the answers that a majority votes on; None if they cannot be
      compared.
    config: The configuration that the command line changes.
    made_of: What else the episodes depend on, such as the passages.
  """

  methods: dict[str, comparison.Method]
  score: str
  rest: tuple[str, ...]
  answers: Answers | None
  config: config_lib.Config
  made_of: dict[str, Any]


class Family(NamedTuple):
  """A kind of problem: how to read, ask and judge it, and its tool.

  Attributes:
    load: Loads the tasks of a file.
    prompts: A module with agent_task and direct_task.
    make_judge: Makes an object with reward and metrics.
    make_tool: Makes the agent's tool.
    score: The metric that is 1 for a right answer.
    rest: Further metrics of the table.
    answers: Extracts the answers that a majority votes on, if they can be compared.
  """

  load: Callable[[str], list[types.Task]]
  prompts: Any
  make_judge: Callable[[], Any]
  make_tool: Callable[[], tool_lib.Tool]
  score: str
  rest: tuple[str, ...]
  answers: Answers | None = None

  def methods(self, tasks: Sequence[types.Task]) -> dict[str, comparison.Method]:
    """Makes the methods of solving the tasks."""
    judge, tool = self.make_judge(), self.make_tool()
    make = lambda tools: env.ToolEnv(tools, judge.reward, metrics=judge.metrics)
    each = lambda ask: {'': [ask(task) for task in tasks]}
    agent = self.prompts.agent_task
    return {
      'direct': (each(self.prompts.direct_task), lambda: make([])),
      'react': (
        each(lambda task: react.ask(agent(task), [tool])),
        lambda: react.ReAct([tool], judge.reward, judge.metrics),
      ),
      'tools': (each(agent), lambda: make([tool])),
    }


@functools.cache
def _grader() -> mathematics.Grader:
  return mathematics.Grader()


MATHEMATICS = Family(
  mathematics.load,
  mathematics,
  mathematics.Grader,
  calculator.calculator_tool,
  score='accuracy',
  rest=('answered', 'tool_calls', 'grading_failed'),
  answers=lambda replies: asyncio.run(_grader().canonical_answers(replies)),
)
PROGRAMMING = Family(
  programming.load_humaneval,
  programming,
  programming.Tester,
  lambda: python.python_tool(sandbox.Sandbox()),
  score='passed',
  rest=('answered', 'tool_calls', 'late'),
)
FAMILIES = {
  'gsm8k': MATHEMATICS,
  'math': MATHEMATICS,
  'humaneval': PROGRAMMING,
  'mbpp': PROGRAMMING._replace(load=programming.load_mbpp),
}


# The sources of tasks of experiments.games.
GAMES = ('textworld', 'files', 'gymnasium', 'reasoning-gym')


def shuffle(tasks: Sequence[types.Task], seed: int = 0) -> list[types.Task]:
  """Orders problems by a seed; the first ones are held out from training."""
  order = np.random.default_rng(seed).permutation(len(tasks))
  return [tasks[i] for i in order]


def load_problems(family: Family, source: Source) -> Benchmark:
  """Loads the rows that experiments.problems holds out."""
  if not source.data:
    raise ValueError('--data: the file of the rows is missing.')
  tasks = shuffle(family.load(source.data))[: source.limit or None]
  config = config_lib.Config(limits=config_lib.Limits(max_turns=6, max_turn_tokens=512))
  scores_of = (family.score, family.rest, family.answers)
  return Benchmark(family.methods(tasks), *scores_of, config, made_of={})


def _vote(replies: Sequence[str]) -> list[str | None]:
  return [qa.canonical_answer(reply) for reply in replies]


# How questions are scored.
_QUESTIONS: dict[str, Any] = {
  'score': 'em',
  'rest': ('f1', 'answered', 'tool_calls'),
  'answers': _vote,
}


def load_questions(name: str, source: Source) -> Benchmark:
  """Loads the rows that experiments.wikipedia.search holds out."""
  folder = source.data or qa_data.FETCHED.format(name)
  corpus, _ = qa_data.find(folder)
  passages = documents.read_corpus(corpus)
  tasks = settings.shuffle(list(qa_data.read_questions(folder)))[: source.limit or None]
  return Benchmark(
    settings.methods({'': tasks}, bm25.BM25(passages)),
    **_QUESTIONS,
    config=settings.CONFIG,
    made_of={'passages': fingerprint.digest([dataclasses.astuple(d) for d in passages])},
  )


def load_question_file(source: Source) -> Benchmark:
  """Loads questions of a data set without passages."""
  if not source.data or not source.retriever:
    raise ValueError(
      '--data and --retriever: name the file of the questions and what is searched, such '
      'as the address of a server (docs/retrieval.md).'
    )
  tasks = settings.shuffle(qa_data.load(source.data))[: source.limit or None]
  retriever = retrievers.open_retriever(source.retriever, source.encoder)
  return Benchmark(
    settings.methods({'': tasks}, retriever),
    **_QUESTIONS,
    config=settings.CONFIG,
    made_of={'retriever': source.retriever, 'encoder': source.encoder},
  )


def load_games(
  kind: str, name: str, count: int
) -> tuple[list[types.Task], rollout.MakeEnv]:
  """Makes or reads tasks; returns them and a function that makes their environment.

  Args:
    kind: One of GAMES.
    name: The game; see experiments/games.py.
    count: How many tasks to make.
  """
  # These may be missing.
  from agent_r1_jax.contrib.environments import reasoning, text_games

  if kind == 'textworld':
    return text_games.make_textworld(name, range(count)), text_games.textworld_env
  if kind == 'files':
    return text_games.load_games(name), text_games.textworld_env
  if kind == 'gymnasium':
    tasks = text_games.gymnasium_tasks(range(count))
    return tasks, lambda: text_games.gymnasium_env(name)
  scorer = reasoning.Scorer()
  make_env = lambda: env.ToolEnv([], scorer.reward, metrics=scorer.metrics)
  return reasoning.make_tasks(name, count, seed=0), make_env


def load_games_benchmark(kind: str, source: Source) -> Benchmark:
  """Makes games or reasoning problems for evaluation; 100 if there is no limit."""
  if not source.data:
    raise ValueError('--data: name what is played, as --name of experiments.games does.')
  tasks, make_env = load_games(kind, source.data, source.limit or 100)
  tasks = tasks[: source.limit or None]
  games = ('won', ('no_action', 'inadmissible'))
  problems = ('score', ('answered', 'scoring_failed'))
  return Benchmark(
    {'agent': ({'': tasks}, make_env)},
    *(problems if kind == 'reasoning-gym' else games),
    answers=None,
    config=config_lib.Config(limits=config_lib.Limits(max_turns=12, max_turn_tokens=256)),
    made_of={},
  )


# Also for experiments.directories. A step includes the task's tests.
DIRECTORIES = config_lib.Config(
  schedule=config_lib.Schedule(steps=100, tasks=16, samples=8, eval_every=20),
  limits=config_lib.Limits(max_turns=30, max_turn_tokens=1024, step_seconds=900.0),
  optimizer=config_lib.Optimizer(learning_rate=1e-6),
)


def load_directories(source: Source) -> Benchmark:
  """Loads task directories, which the agent plays with the shell."""
  from agent_r1_jax.contrib.harbor import directories  # It may be missing.

  if not source.data:
    raise ValueError('--data: name a folder of tasks (contrib/harbor/guide.md).')
  tasks = shuffle(directories.load(source.data))[: source.limit or None]
  return Benchmark(
    {'agent': ({'': tasks}, directories.DirectoryEnv)},
    score='reward/solved',
    rest=('tool_calls', 'unjudged', 'late'),
    answers=None,
    config=DIRECTORIES,
    made_of={'tasks': fingerprint.digest([task.info['digest'] for task in tasks])},
  )


def load_miniwiki(source: Source) -> Benchmark:
  """Makes miniwiki's test questions; 300 per set if there is no limit."""
  sets = {
    name: miniwiki.test_set(name, source.limit or 300, 0)
    for name in miniwiki.SETS
    if '4hop' not in name
  }
  return Benchmark(
    shapes.methods(sets, 0),
    **_QUESTIONS,
    # ReAct's prompts need more than the quickstart's 448 slots.
    config=fields.replace(shapes.CONFIG, {'engine.slots': 640}),
    made_of={},
  )


def load_world(world: world_lib.World, source: Source) -> Benchmark:
  """Makes the held-out tasks of experiments.worlds.learn, 300 per set by default."""
  if not source.model:
    raise ValueError(
      '--config.model.path: name a policy of this world, such as WORKDIR/grpo/model of '
      'experiments.worlds.learn.'
    )
  methods = dict(world.methods(world.held_out(0, source.limit or 300, 'test')))
  return Benchmark(
    methods,
    world.score,
    rest=(),
    answers=None,
    config=world.config,
    made_of=world.options(),
  )


def _make_outside(sets, make_env, rest, slots: int, max_turns: int) -> Benchmark:
  """Makes another project's benchmark, for a model with Qwen's tokenizer.

  The policy is miniwiki's: it solves no task, but lets you try the command.
  """
  config = config_lib.Config(
    model=shapes.CONFIG.model,
    # API results are not cut: those of BFCL's long contexts have 30,000 tokens.
    chat=config_lib.Chat(max_tool_tokens=slots, long_prompts='skip'),
    # Prompts of 4,000 to 10,000 tokens are prefilled in long chunks.
    engine=config_lib.Engine(slots=slots, prefill_rows=4, prefill_tokens=512),
    limits=config_lib.Limits(max_turns=max_turns, max_turn_tokens=1024),
  )
  return Benchmark({'tools': (sets, make_env)}, 'passed', rest, None, config, {})


def load_bfcl(source: Source) -> Benchmark:
  """Loads BFCL's multi-turn tasks; --limit is the maximum per category."""
  from agent_r1_jax.contrib.benchmarks import bfcl  # It may be missing.

  sets = {
    category.removeprefix('multi_turn_'): shuffle(bfcl.load(category, source.data))
    for category in bfcl.CATEGORIES
  }
  sets = {name: tasks[: source.limit or None] for name, tasks in sets.items()}
  rest = ('turns_passed', 'tool_calls', 'tool_errors')
  return _make_outside(sets, bfcl.MultiTurnEnv, rest, 8192, 64)


def load_tau(source: Source) -> Benchmark:
  """Loads the telecom tasks of tau2-bench."""
  from agent_r1_jax.contrib.benchmarks import tau  # It may be missing.

  if not source.data:
    raise ValueError('--data: name a checkout of github.com/sierra-research/tau2-bench.')
  sets = {'': shuffle(tau.load(source.data))[: source.limit or None]}
  rest = ('ended', 'tool_calls', 'tool_errors')
  return _make_outside(sets, tau.SoloEnv, rest, 16_384, 100)


TASKS: dict[str, Callable[[Source], Benchmark]] = {
  'miniwiki': load_miniwiki,
  'hotpotqa': functools.partial(load_questions, 'hotpotqa'),
  '2wiki': functools.partial(load_questions, '2wikimultihopqa'),
  'musique': functools.partial(load_questions, 'musique'),
  **dict.fromkeys(('nq', 'triviaqa', 'popqa', 'bamboogle'), load_question_file),
  'textworld': functools.partial(load_games_benchmark, 'textworld'),
  'games': functools.partial(load_games_benchmark, 'files'),
  'reasoning-gym': functools.partial(load_games_benchmark, 'reasoning-gym'),
  'directories': load_directories,
  **{
    name: functools.partial(load_world, world)
    for name, world in all_worlds.WORLDS.items()
  },
  **{name: functools.partial(load_problems, family) for name, family in FAMILIES.items()},
  'bfcl-multi-turn': load_bfcl,
  'tau2-telecom': load_tau,
}
