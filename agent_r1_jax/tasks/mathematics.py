r"""Mathematics: GSM8K and MATH, with or without a calculator, graded by math-verify.

A task's `answer` is the golden answer: a number for GSM8K, LaTeX for MATH. A reply's
answer is the last \boxed{...} of the agent's last message, outside its thoughts. It is
right if math-verify finds it equal to the golden one: 1/2, 0.5 and \frac{1}{2} are equal.
"""

from collections.abc import Sequence
import functools
import logging
import os
import re
import warnings

from agent_r1_jax.agent import calls, env
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.host import isolated
from agent_r1_jax.retrieval import documents
from agent_r1_jax.types import Message, Task

AGENT = (
  'Solve the problem step by step. Use the calculator for arithmetic. When you know the '
  'answer, give it inside \\boxed{}, for example \\boxed{42}.\n\nProblem: '
)
DIRECT = (
  'Solve the problem step by step. Give the answer inside \\boxed{}, for example '
  '\\boxed{42}.\n\nProblem: '
)

# MiB that a grading may allocate: a power such as 9^{9^9} would take all memory. None of
# 1,500 answers of MATH needed more than 55.
_MEMORY_MB = 1024
_GSM8K_ANSWER = re.compile(r'####\s*(\S.*)')
_BOX = re.compile(r'\\(?:boxed|fbox)(?![A-Za-z])\s*')
_UNBRACED = re.compile(r'([^$\n{}]*)\$|([^\s$]+)')  # MATH also has \boxed 9$.
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)
_BASE = re.compile(r'(?<=[\dA-Z}])_\{?(\d+)')
_REPEATING = re.compile(
  r'(?<!\d)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))'
)
# Matches only from the start of a run, else a long run would take quadratic time.
_END = r'(?<![.,;:\s\\])(?<!(?<!\\)\$)(?:[.,;:]|(?<!\\)\$|\\[,;: ]|\s)+$'
_THOUSANDS = r'(?<![\d.])(\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|\s)+\d{3})+)(?!\d)'
_TEXT = r'\\(?:text|mbox|math)(?:rm|bf|it)?\s*\{'
# What math-verify cannot read and its replacement, applied in order.
_REWRITTEN = [
  (re.compile(pattern), form)
  for pattern, form in (
    (r'(\s)\s+', r'\1'),  # math-verify takes quadratic time for a long run.
    (_END, ''),
    (r'^\s*(?:\$\$?|\\[(\[])(.*?)(?:\\[)\]])?$', r'\1'),
    (_END, ''),
    (_TEXT + r'([-+\d., ]*\d)[., ]*\}', r'\1'),
    (_TEXT + r'([\dA-Z]+)\}(?=_)', r'\1'),
    (_THOUSANDS, lambda match: re.sub(r'\D', '', match[1])),
    (r'(?<=\d)[eE]([-+]?)(\d+)(?![\w.])', r'\\times10^{\1\2}'),
    (r'\^\s*([-+]?\d+)(?!\d)', r'^{\1}'),
    (r'√\s*\(?(\w+)\)?', r'\\sqrt{\1}'),
  )
]
_SIGNS = {'−': '-', '–': '-', '÷': r'\div ', 'π': r'\pi ', '∞': r'\infty '}
_SIGNS |= dict.fromkeys('×·⋅', r'\times ') | dict.fromkeys('°º', r'^\circ')
# Relative tolerances of equal numbers: if one is a decimal, and if none is.
_ROUNDING, _EXACT = 1e-5, 1e-40


def load(path: str | os.PathLike) -> list[Task]:
  r"""Reads tasks from JSON lines in the layout of GSM8K or of MATH, gzipped or plain.

  GSM8K's rows are {question, answer}, whose answer ends with '#### <number>'. MATH's are
  {problem, solution, level, type}, with the answer in the field `answer` or in the last
  \boxed{} of the solution. Worked solutions are not in the tasks.

  Returns:
    Tasks whose only message is the problem, also in info['question']; info also has
    MATH's level and type. Rows of MATH without an answer are skipped with a warning.

  Raises:
    ValueError: A row lacks a field or the file is damaged; names the file and the row.
  """
  tasks, unanswered = [], []
  name = os.path.basename(os.fspath(path)).split('.')[0]
  for number, (where, row) in enumerate(documents.read_rows(path)):
    if 'problem' in row:
      question = documents.read_text(where, row, 'problem')
      answer = row.get('answer')  # 0 is an answer.
      if answer is None or answer == '':
        answer = find_boxed(row.get('solution') or '')
    else:
      question = documents.read_text(where, row, 'question')
      answer = _read_gsm8k_answer(where, row)
    task_id = str(row.get('id', f'{name}-{number}'))
    if answer is None or answer == '':
      unanswered.append(task_id)
      continue
    info = {key: row[key] for key in ('level', 'type') if key in row}
    messages = [{'role': 'user', 'content': question}]
    tasks.append(Task(task_id, messages, str(answer), info | {'question': question}))
  if unanswered:
    warnings.warn(
      f'{path}: {len(unanswered)} rows have no answer and are left out: '
      f'{", ".join(unanswered[:5])}',
      stacklevel=2,
    )
  return tasks


def agent_task(task: Task) -> Task:
  """Returns the task with the prompt for an agent that has a calculator."""
  return task.ask(AGENT + task.info['question'])


def direct_task(task: Task) -> Task:
  """Returns the task with the prompt for a model without tools."""
  return task.ask(DIRECT + task.info['question'])


def find_boxed(text: str) -> str | None:
  r"""Returns the content of a text's last \boxed{...} or \fbox{...}, braces matched.

  Closed thoughts are ignored.
  """
  text = calls.remove_thoughts(text)
  start = max((box.end() for box in _BOX.finditer(text)), default=len(text))
  if not text.startswith('{', start):
    bare = _UNBRACED.match(text, start)
    return bare and (bare[1] or bare[2] or '').strip() or None
  depth = 0
  for brace in _BRACE.finditer(text, start):
    depth += {'{': 1, '}': -1}.get(brace[0], 0)
    if depth == 0:
      return text[start + 1 : brace.start()].strip() or None
  return None


def is_equal(answer: str, golden: str) -> bool:
  """Whether two answers, as LaTeX or plain numbers, mean the same.

  Numbers are compared exactly, or by relative difference if one is rounded. The base of a
  number may be left out, but not differ.

  A hostile answer may compute forever or take all memory: to grade a model's answers, use
  `Grader`, which runs this function in a process.
  """
  math_verify = _import_math_verify()
  answer, golden = _rewrite(answer), _rewrite(golden)
  bases = _BASE.findall(answer), _BASE.findall(golden)
  if all(bases) and bases[0] != bases[1]:
    return False
  parse = functools.partial(math_verify.parse, parsing_timeout=0)
  golden_value, answer_value = (parse(f'\\boxed{{{text}}}') for text in (golden, answer))
  return bool(answer_value) and math_verify.verify(
    golden_value, answer_value, timeout_seconds=None
  )


@functools.cache
def _import_math_verify():
  import math_verify  # Imports sympy, which takes a second.
  from math_verify import grader

  # math-verify's time-outs need the main thread; it warns at each call without them.
  logging.getLogger('math_verify').setLevel(logging.CRITICAL)
  # math-verify's absolute tolerance makes all small numbers equal.
  is_near = grader.sympy_numeric_eq
  grader.sympy_numeric_eq = lambda a, b, *precision: (
    is_near(a, b, *precision) and _is_relatively_near(a, b)
  )
  return math_verify


def _is_relatively_near(a, b) -> bool:
  """Whether two numbers within an absolute tolerance are relatively near, too."""
  import sympy

  exact = not (a.has(sympy.Float) or b.has(sympy.Float))
  if a.free_symbols or b.free_symbols:
    return not exact  # Exact ones are compared symbolically afterwards.
  tolerance = _EXACT if exact else _ROUNDING
  try:
    a, b = (value.doit().evalf(60) for value in (a, b))
    difference = abs(a - b)
    return not tolerance * max(abs(a), abs(b)) < difference < _ROUNDING
  except TypeError:  # Matrices: their entries are compared one by one.
    return True


def _rewrite(answer: object) -> str:
  r"""Writes an answer as math-verify reads it, such as 1000 for \text{1,000.} or 1e3."""
  text = f'{answer}'.translate(str.maketrans(_SIGNS))
  for pattern, form in _REWRITTEN:
    text = pattern.sub(form, text)
  return _REPEATING.sub(_write_fraction, text)


def _write_fraction(match: re.Match) -> str:
  whole, fixed, *periods = match.groups(default='')
  period = ''.join(periods)
  # 0.1666... = (16 - 1) / 90.
  numerator = int(whole + fixed + period) - int(f'0{whole}{fixed}')
  return f'\\frac{{{numerator}}}{{{"9" * len(period)}{"0" * len(fixed)}}}'


class Grader:
  """Reward and metrics of an episode; gradings run in processes that may be killed.

  grader = mathematics.Grader()
  env.ToolEnv(tools, grader.reward, metrics=grader.metrics)
  """

  def __init__(self, *, seconds: float = 10.0, processes: int = 2):
    """Starts no process yet.

    Args:
      seconds: Time limit of one grading; a late one counts as wrong.
      processes: The maximum number of concurrent gradings.

    Raises:
      ImportError: math-verify is missing. The processes would grade all answers as wrong.
    """
    import math_verify  # noqa: F401

    limits = {'seconds': seconds, 'processes': processes, 'memory_mb': _MEMORY_MB}
    # Importing takes a CPU-second, which should not count towards an answer's time.
    limits['imports'] = ['math_verify']
    self._is_equal = isolated.in_subprocess(is_equal, **limits)
    self._find_equal = isolated.in_subprocess(find_equal, **limits)

  async def reward(self, task: Task, messages: Sequence[Message]) -> env.Score:
    """Returns 1.0 for a right answer, else 0.0."""
    return (await self.metrics(task, messages))['accuracy']

  async def metrics(self, task: Task, messages: Sequence[Message]) -> dict[str, float]:
    """Returns accuracy, answered, and grading_failed.

    grading_failed is 1.0 if grading exceeded its time or memory. Such an answer is wrong,
    not an error: otherwise an agent could escape its reward by an answer that nobody can
    compute.
    """
    answer = find_boxed(messages_lib.last_reply(messages))
    values = {
      'accuracy': 0.0,
      'answered': float(answer is not None),
      'grading_failed': 0.0,
    }
    if answer is None:
      return values
    try:
      values['accuracy'] = float(await self._is_equal(answer, task.answer))
    except (TimeoutError, isolated.FailedError, isolated.EndedError):
      values['grading_failed'] = 1.0
    return values

  async def canonical_answers(self, replies: Sequence[str]) -> list[str | None]:
    """Returns the answers; equal ones have the text of the first of them.

    Answers whose comparison takes too long are equal if their texts are. None stands for
    a reply without an answer.
    """
    answers = [find_boxed(reply) for reply in replies]
    texts = list(dict.fromkeys(answer for answer in answers if answer is not None))
    try:
      firsts = await self._find_equal(texts) if len(texts) > 1 else [0]
    except (TimeoutError, isolated.FailedError, isolated.EndedError):
      firsts = range(len(texts))
    canonical = {text: texts[i] for text, i in zip(texts, firsts, strict=False)}
    return [None if answer is None else canonical[answer] for answer in answers]


def find_equal(answers: Sequence[str]) -> list[int]:
  """Finds each answer's first equal, as an index; hostile answers as in `is_equal`."""
  firsts: list[int] = []
  for i, answer in enumerate(answers):
    # Compare only with the first of each group of equals, which saves most gradings.
    equals = (j for j in range(i) if firsts[j] == j and is_equal(answer, answers[j]))
    firsts.append(next(equals, i))
  return firsts


def _read_gsm8k_answer(where: str, row: dict) -> str:
  match = _GSM8K_ANSWER.search(documents.read_text(where, row, 'answer'))
  if not match:
    raise documents.field_error(
      where, row, 'answer', "a text that ends with '#### <number>'"
    )
  return match[1].strip()
