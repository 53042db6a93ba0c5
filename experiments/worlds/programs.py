"""Programs from sentences in MBPP's form, whose exact meaning is open.

'Write a function f that sorts it and then keeps the start.' Each of the two steps has two
readings, as sentences of MBPP often do; the visible test decides. With the Python tool,
an agent can try one reading after the other. agent_r1_jax.tasks.programming asks and
judges, with hidden tests, as for a large model; the tool is agent_r1_jax.tools.python in
its sandbox, and runs the visible test after the code.

Held out are the tests, and pairs of steps that are in no practised or trained program. No
policy can know the intended reading without a try.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import random
from typing import Any, NamedTuple
import zlib

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import call_formats, calls, env
from agent_r1_jax.tasks import programming
from agent_r1_jax.tools import python, sandbox
from experiments import comparison
from experiments.miniwiki import world as words_lib
from experiments.worlds import world as world_lib


class Step(NamedTuple):
  """A step of a program.

  Attributes:
    says: The words.
    takes: The type of its input: 'list', 'text' or 'number'.
    gives: The type of its output.
    readings: Its possible meanings: statements that change x.
  """

  says: str
  takes: str
  gives: str
  readings: tuple[str, str]


def _steps(takes: str, *rows: tuple[str, str, str, str]) -> list[Step]:
  return [Step(says, takes, gives, (one, two)) for says, gives, one, two in rows]


STEPS = (
  *_steps(
    'list',
    ('sorts it', 'list', 'x = sorted(x)', 'x = sorted(x)[::-1]'),
    ('keeps the large ones', 'list', 'x = [n for n in x if n > 9]',
     'x = [n for n in x if n > 20]'),
    ('keeps the round ones', 'list', 'x = [n for n in x if n % 10 == 0]',
     'x = [n for n in x if n % 5 == 0]'),
    ('keeps the start', 'list', 'x = x[:2]', 'x = x[:3]'),
    ('keeps the end', 'list', 'x = x[-2:]', 'x = x[-3:]'),
    ('skips every other', 'list', 'x = x[::2]', 'x = x[1::2]'),
    ('scales all', 'list', 'x = [n * 2 for n in x]', 'x = [n * 10 for n in x]'),
    ('moves all by one', 'list', 'x = [n + 1 for n in x]', 'x = [n - 1 for n in x]'),
    ('drops the repeated', 'list', 'x = list(dict.fromkeys(x))',
     'x = [n for n in x if x.count(n) == 1]'),
    ('adds all', 'number', 'x = sum(x)', 'x = sum(n * n for n in x)'),
    ('counts them', 'number', 'x = len(x)', 'x = len(set(x))'),
    ('finds the extreme', 'number', 'x = max(x, default=0)', 'x = min(x, default=0)'),
  ),
  *_steps(
    'text',
    ('reverses it', 'text', 'x = x[::-1]', "x = ' '.join(x.split()[::-1])"),
    ('changes the case', 'text', 'x = x.upper()', 'x = x.title()'),
    ('shortens it', 'text', 'x = x[:5]', "x = x.partition(' ')[0]"),
    ('joins the words', 'text', "x = x.replace(' ', '')", "x = x.replace(' ', '-')"),
    ('doubles it', 'text', 'x = x + x', "x = x + ' ' + x"),
    ('measures it', 'number', 'x = len(x)', 'x = len(x.split())'),
    ('numbers the letters', 'list', 'x = [ord(c) for c in x]',
     'x = [ord(c) - 96 for c in x]'),
    ('measures the words', 'list', 'x = [len(w) for w in x.split()]',
     'x = sorted(len(w) for w in x.split())'),
  ),
  *_steps(
    'number',
    ('divides while it can', 'number', 'while x and x % 2 == 0: x = x // 2',
     'while x and x % 3 == 0: x = x // 3'),
    ('rounds it', 'number', 'x = x // 10 * 10', 'x = -(-x // 10) * 10'),
    ('multiplies it', 'number', 'x = x * 2', 'x = x * 3'),
    ('adds the numbers below', 'number', 'x = sum(range(x))', 'x = sum(range(x + 1))'),
    ('takes the digits apart', 'list', 'x = [int(d) for d in str(x)]',
     'x = [int(d) for d in str(x)[::-1]]'),
    ('lists its multiples', 'list', 'x = [x, x * 2]', 'x = [x, x * 2, x * 3]'),
  ),
)  # fmt: skip
NAME = 'f'  # The name of every function.
# The fates of demonstrations. 'stop': answers after the first try, whatever its result;
# 'guess': answers without a try. Most stop, so that a greedy policy does too.
MIXTURE = {'right': 0.33, 'stop': 0.62, 'guess': 0.05}
# Shares of the practice: demonstrations, single steps, and programs without a tool.
PRACTICE = {'demonstration': 0.6, 'step': 0.25, 'alone': 0.15}
_HIDDEN_TESTS = 3
_SPLITS = {0: 'test', 1: 'dev'}
# Hundreds of episodes may end at once, and waiting for a process counts.
JUDGE_SECONDS = 600.0
_LONGEST = 50  # Characters of the visible test's expected value.


@dataclasses.dataclass(frozen=True)
class Problem:
  """A problem.

  Attributes:
    steps: The steps.
    readings: Programs for all readings, in the order in which to try them.
    right: The index of the intended one.
    inputs: Arguments of the tests; the first is the visible test's.
  """

  steps: tuple[Step, Step]
  readings: tuple[str, ...]
  right: int
  inputs: tuple[Any, ...]

  @property
  def text(self) -> str:
    """The problem in words."""
    says = ' and then '.join(step.says for step in self.steps)
    return f'Write a function {NAME} that {says}.'


def is_held_out(first: Step, second: Step) -> bool:
  """Whether a pair of steps is never practised or trained: a quarter of the pairs."""
  return zlib.crc32(f'{first.says} {second.says}'.encode()) % 4 == 0


def make_problem(rng: random.Random, split: str, held_out: bool = False) -> Problem:
  """Samples a problem whose visible test passes for only one reading.

  Args:
    rng: Samples everything.
    split: 'train', 'dev' or 'test'; an argument of a visible test belongs to one split.
    held_out: Whether its pair of steps is never practised.
  """
  while True:
    first = rng.choice(STEPS)
    second = rng.choice([s for s in STEPS if s.takes == first.gives])
    if first is second or is_held_out(first, second) != held_out:
      continue
    pairs = itertools.product(first.readings, second.readings)
    readings = tuple(write_program(lines) for lines in pairs)
    right = rng.randrange(len(readings))
    for _ in range(30):
      shown = _draw_input(rng, first.takes)
      values = [_run(program, shown) for program in readings]
      decides = values.count(values[right]) == 1 and len(repr(values[right])) <= _LONGEST
      if decides and _find_split(shown) == split:
        hidden = (_draw_input(rng, first.takes) for _ in range(_HIDDEN_TESTS))
        return Problem((first, second), readings, right, (shown, *hidden))


def _find_split(value):
  return _SPLITS.get(zlib.crc32(repr(value).encode()) % 4, 'train')


def write_program(lines: Sequence[str]) -> str:
  """Writes a function of one argument."""
  return '\n '.join([f'def {NAME}(x):', *lines, 'return x'])


def _draw_input(rng, takes):
  if takes == 'number':
    return rng.randint(11, 999)
  if takes == 'text':
    return ' '.join(rng.choice(words_lib.words('base')).lower() for _ in range(3))
  return [rng.choice((rng.randint(1, 30), 10, 20, 25)) for _ in range(rng.randint(5, 6))]


def _run(program, value):
  """Runs a program of this file."""
  scope: dict[str, Any] = {}
  exec(program, scope)
  return scope[NAME](value)


def make_task(task_id: str, problem: Problem) -> types.Task:
  """Makes the task of a problem, in MBPP's form."""
  program = problem.readings[problem.right]
  checks = [f'{NAME}({v!r}) == {_run(program, v)!r}' for v in problem.inputs]
  tests = ['', *(f'assert {check}' for check in checks)]
  task = programming.make_mbpp_task(task_id, problem.text, tests, NAME)
  info = task.info | {'check': checks[0], 'right': problem.right}
  return dataclasses.replace(task, info=info)


def make_tasks(seed: int, n: int, split: str, held_out: bool = False) -> list[types.Task]:
  """Makes tasks; equal arguments make equal tasks."""
  rng = random.Random(f'programs {seed} {split} {held_out}')
  return [
    make_task(f'programs-{split}-{seed}-{i}', make_problem(rng, split, held_out))
    for i in range(n)
  ]


def held_out(seed: int, n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes the held-out sets, by name."""
  return {
    'new_programs': make_tasks(seed, n, split),
    'new_pairs': make_tasks(seed, n, split, held_out=True),
  }


class TriedEnv(env.ToolEnv):
  """The Python tool, which runs the visible test after the code and prints its value.

  Its metrics are 'tries'; 'first_failed', whether the first try failed; and 'mended',
  whether the answer then passes.
  """

  def __init__(self):
    """Makes the tool, which runs code in the sandbox."""
    tool = python.python_tool(box())

    def run(code: str) -> str:
      return tool.fn(f'{code}\nprint({self.task.info["check"]})')

    tools = [dataclasses.replace(tool, fn=run)]
    options = {'metrics': self._count_tries, 'reward_seconds': JUDGE_SECONDS}
    super().__init__(tools, self._score_once, **options)

  async def _score_once(self, task, messages):
    self._scores = await score(task, messages)
    return self._scores

  def _count_tries(self, task, messages):
    values = [m['content'].strip() for m in messages if m['role'] == 'tool']
    failed = bool(values) and values[0] != 'True'
    mended = self._scores['passed'] if failed else 0.0
    return {'tries': len(values), 'first_failed': float(failed), 'mended': mended}


@functools.cache
def _judge() -> programming.Tester:
  return programming.Tester()


async def score(task, messages) -> dict[str, float]:
  """Judges once; Tester.reward and Tester.metrics would each run the tests."""
  return {'passed': (await _judge().metrics(task, messages))['passed']}


@functools.cache
def box() -> sandbox.Sandbox:
  return sandbox.Sandbox()


def make_env_alone() -> env.ToolEnv:
  """Makes an environment without tools."""
  return env.ToolEnv([], score, reward_seconds=JUDGE_SECONDS)


def examples(seed: int) -> Iterator[world_lib.Example]:
  """Yields practice examples, endlessly, without held-out pairs of steps."""
  rng = random.Random(f'programs examples {seed}')
  while True:
    kind = rng.choices([*PRACTICE], [*PRACTICE.values()])[0]
    if kind == 'step':
      step = rng.choice(STEPS)
      number = rng.randrange(2)
      asked = f'{step.says}, reading {number + 1}?'
      yield world_lib.talk(asked, step.readings[number], kind)
      continue
    problem = make_problem(rng, 'train')
    task = make_task('', problem)
    if kind == 'alone':
      program = problem.readings[rng.randrange(len(problem.readings))]
      yield world_lib.talk(task.messages[0]['content'], _block(program), kind)
    else:
      fate = rng.choices([*MIXTURE], [*MIXTURE.values()])[0]
      yield world_lib.Example(demonstrate(problem, fate), kind=fate)


def demonstrate(problem: Problem, fate: str = 'right') -> list[types.Message]:
  """Writes an episode with the Python tool, right or as `fate` says."""
  messages = [*make_task('', problem).messages]
  last = {'right': problem.right, 'stop': 0, 'guess': -1}[fate]
  for number in range(last + 1):
    messages.append(world_lib.say(call(problem.readings[number])))
    found = str(number == problem.right)
    messages.append({'role': 'tool', 'name': 'python', 'content': f'{found}\n'})
  return [*messages, world_lib.say(_block(problem.readings[max(last, 0)]))]


def call(program: str) -> str:
  """Writes the call that tries a program."""
  return call_formats.HERMES.render(calls.ToolCall('python', {'code': program}))


def _block(program: str) -> str:
  return f'```python\n{program}\n```'


def methods(sets: comparison.Sets) -> dict[str, comparison.Method]:
  """Returns the methods: with the Python tool, or without."""
  return {'direct': (sets, make_env_alone), 'tools': (sets, TriedEnv)}


WORLD = world_lib.World(
  examples=examples,
  text=world_lib.texts_of,
  schemas=lambda: [python.python_tool(box()).schema],
  tasks=functools.partial(make_tasks, split='train'),
  held_out=held_out,
  methods=methods,
  labels={'direct': 'Without the tool', 'tools': 'Base policy'},
  score='reward/passed',
  kinds={f'reading {n + 1}': lambda task, n=n: task.info['right'] == n for n in range(4)},
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=30, tasks=12, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turns=8, max_turn_tokens=100),
    optimizer=config_lib.Optimizer(learning_rate=1e-4),
    engine=config_lib.Engine(slots=768, decode_steps=16, replicas=2),
  ),
  base=sft.Config(steps=800, rows=4, row_tokens=512, learning_rate=2.5e-3),
  vocab=1400,
  also=('direct',),
)
