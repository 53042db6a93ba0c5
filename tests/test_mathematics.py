"""Mathematics: the layouts of GSM8K and MATH, grading, and a run on the real rows."""

import json
import re
import sys

import graders
import pytest

from agent_r1_jax import types
from agent_r1_jax.agent import env
from agent_r1_jax.host import isolated
from agent_r1_jax.tasks import mathematics

GSM8K = {'question': 'What is 3 * 4?', 'answer': 'It is <<3*4=12>>12.\n#### 1,012'}
MATH = {
  'problem': 'Halve $1$.', 'solution': 'It is \\boxed{\\frac{1}{2}}.',
  'level': 'Level 1', 'type': 'Algebra',
}  # fmt: skip


def _write(path, *rows):
  path.write_text('\n'.join(map(json.dumps, rows)))
  return path


def test_gsm8k_rows(tmp_path):
  (task,) = mathematics.load(_write(tmp_path / 'train.jsonl', GSM8K))
  message = {'role': 'user', 'content': 'What is 3 * 4?'}
  info = {'question': 'What is 3 * 4?'}
  assert task == types.Task('train-0', [message], '1,012', info)


def test_math_rows(tmp_path):
  rows = [MATH, MATH | {'id': 'm1', 'answer': '0.5'}]
  first, second = mathematics.load(_write(tmp_path / 'test.jsonl', *rows))
  assert (first.id, first.answer) == ('test-0', '\\frac{1}{2}')
  assert (second.id, second.answer) == ('m1', '0.5')
  assert first.info == {'question': 'Halve $1$.', 'level': 'Level 1', 'type': 'Algebra'}


def test_rows_without_an_answer_are_left_out_with_a_warning(tmp_path):
  path = _write(tmp_path / 'a.jsonl', MATH, MATH | {'id': 'm1', 'solution': 'Unknown.'})
  with pytest.warns(UserWarning, match='1 rows have no answer and are left out: m1'):
    assert len(mathematics.load(path)) == 1


def test_zero_is_an_answer(tmp_path):
  (task,) = mathematics.load(_write(tmp_path / 'a.jsonl', MATH | {'answer': 0}))
  assert task.answer == '0'


@pytest.mark.parametrize(
  'row, message',
  [
    (GSM8K | {'answer': 'It is 12.'}, r'row 1: .*answer.*#### <number>'),
    ({'question': 'What?'}, r'row 1: .*answer.* is missing'),
    (GSM8K | {'question': ' '}, r'row 1: .*question.* not blank'),
    ({'text': 'no task'}, r'row 1: .*question.* is missing'),
  ],
)
def test_a_broken_row_is_named(tmp_path, row, message):
  with pytest.raises(ValueError, match=message):
    mathematics.load(_write(tmp_path / 'a.jsonl', row))


@pytest.mark.parametrize('prompt', [mathematics.agent_task, mathematics.direct_task])
def test_nothing_that_the_agent_sees_tells_the_answer(tmp_path, prompt):
  (task,) = mathematics.load(_write(tmp_path / 'a.jsonl', GSM8K))
  (message,) = prompt(task).messages
  assert message['content'].endswith('Problem: What is 3 * 4?')
  assert '12' not in message['content'] and '12' not in str(task.info)


@pytest.mark.parametrize(
  'text, answer',
  [
    ('so \\boxed{4}.', '4'),
    ('\\boxed{1} or rather \\boxed{2}', '2'),
    ('\\boxed{\\frac{1}{\\sqrt{2}}} holds', '\\frac{1}{\\sqrt{2}}'),
    ('\\fbox{5}', '5'),
    ('the answer is 4', None),
    ('\\boxed{}', None),
    ('\\boxed{ 4', None),
    ('$\\boxed 9$.', '9'),
    ('$x = \\boxed \\frac{1}{2}$ or so', '\\frac{1}{2}'),
    ('\\boxed 9 is it', '9'),
    ('\\boxed {9}', '9'),
    ('\\boxed{\\left\\{ 1, 2 \\right.}', '\\left\\{ 1, 2 \\right.'),
    ('\\boxedanswer{9}', None),
    ('', None),
  ],
)
def test_the_last_box_is_the_answer(text, answer):
  assert mathematics.find_boxed(text) == answer


SAME = [
  *(('1/2', r'\frac{1}{2}'), ('0.5', r'\frac12'), ('1,000', '1000'), ('3.0', '3')),
  *((r'\sqrt{8}', r'2\sqrt{2}'), ('x=3', '3'), ('5.', '5'), ('5,', '5'), ('5;', '5')),
  *(('(1, 2).', '(1,2)'), ('5', '5.'), (r'\(\frac{1}{2}.\)', '0.5'), ('5.$', '5')),
  *((r'2 \text{ euros}.', r'2 \text{ euros}'), (r'\text{3,285}', '3285')),
  *((r'\mathrm{7.}', '7'), (r'1\,234', '1234'), ('1 234 567', '1,234,567')),
  *((r'10\ 000', '10000'), ('1{,}234', '1234'), (r'\text{(E)},', r'\text{(E)}')),
  *((r'0.\overline{3}', '1/3'), (r'-0.1\overline{6}', '-1/6'), ('0.(12)', '4/33')),
  *((r'1.\dot3', '4/3'), ('1e3', '1000'), ('12e-3', '0.012'), ('72°', '72')),
  *(('72', r'72^\circ'), ('−3', '-3'), ('2π', r'2\pi'), ('√2', r'\sqrt{2}')),
  *(('1.6×10^-19', r'1.6\times10^{-19}'), ('1.60e-19', r'1.6 \cdot 10^{-19}')),
  *((r'\sqrt{3+2\sqrt2}', r'1+\sqrt2'), (r'\sin^2 1+\cos^2 1', '1')),
  *(('0.333333', '1/3'), (r'50\%', '50'), (r'50\%', '0.5'), ('43_5', '43_5.')),
  *((r'A5_{11}', '\\mathrm{A5}_{11}'), ('203', '203_7'), (r'x^2+1', '1+x^2')),
]
DIFFERENT = [
  *(('(2,1)', '(1,2)'), ('1001', '1000'), ('-3', '3'), ('yes', '3'), ('', '3')),
  *(('2^{-98}', '2^{-99}'), ('1/2004!', '1/2006!'), ('10^{-20}', '0')),
  *((r'1.6\times10^{-19}', r'9.1\times10^{-31}'), ('1e-7', '2e-7')),
  *(
    ('2516_8', '2516_9'),
    (r'\text{A5}_{11}', 'A6_{11}'),
    (r'\text{A5}_{11}', r'\text{A5}_{12}'),
  ),
  *((r'(1,10^{-20})', '(1,10^{-21})'), (r'x=10^{-20}', 'x=10^{-21}')),
  *(('x+2^{-98}', 'x+2^{-99}'), ('1.5e-20x', '2.5e-20x'), ('2^{100}', '2^{100}+1')),
  *((r'\{10^{-20}\}', r'\{10^{-21}\}'), ('0.33', '1/3'), ('1, 200', '1200')),
  *(('[10^{-20},1]', '[10^{-21},1]'), (r'e^{-50}', 'e^{-51}'), ('3.14', r'\pi')),
  (
    r'\begin{pmatrix}10^{-20}\\1\end{pmatrix}',
    r'\begin{pmatrix}10^{-21}\\1\end{pmatrix}',
  ),
]


@pytest.mark.parametrize('answer, golden', SAME)
def test_answers_that_mean_the_same_are_equal(answer, golden):
  assert mathematics.is_equal(answer, golden)


@pytest.mark.parametrize('answer, golden', DIFFERENT)
def test_answers_that_differ_are_not_equal(answer, golden):
  assert not mathematics.is_equal(answer, golden)


async def test_answers_that_mean_the_same_have_one_text(monkeypatch):
  boxed = ['1/2', '3', '0.5', '\\frac{1}{2}', '3']
  replies = [f'so \\boxed{{{answer}}}' for answer in boxed]
  compare = mathematics.Grader(seconds=120.0).canonical_answers
  assert await compare([*replies, 'none']) == ['1/2', '3', '1/2', '1/2', '3', None]
  assert await compare(replies[:1]) == ['1/2'] and await compare(['none']) == [None]
  # What cannot be compared is compared as text.
  monkeypatch.setattr(mathematics, 'find_equal', graders.leave)
  compare = mathematics.Grader().canonical_answers
  assert await compare(replies) == boxed


async def _grade(grader, reply, answer='12'):
  agent = env.ToolEnv([], grader.reward, metrics=grader.metrics)
  await agent.reset(types.Task('t', [{'role': 'user', 'content': 'How many?'}], answer))
  step = await agent.step(reply)
  return step.reward, step.metrics


async def test_an_episode_is_graded_in_a_process():
  grader = mathematics.Grader(seconds=120.0, processes=1)
  right, wrong = (
    await _grade(grader, '\\boxed{24/2}'),
    await _grade(grader, '\\boxed{13}'),
  )
  silent = await _grade(grader, 'It is 12.')
  assert [reward for reward, _ in (right, wrong, silent)] == [1.0, 0.0, 0.0]
  assert [metrics['answered'] for _, metrics in (right, wrong, silent)] == [1, 1, 0]
  assert not any(metrics['grading_failed'] for _, metrics in (right, wrong, silent))


def test_a_grader_without_math_verify_is_refused(monkeypatch):
  monkeypatch.setitem(sys.modules, 'math_verify', None)
  with pytest.raises(ImportError, match='math_verify'):
    mathematics.Grader()


@pytest.mark.parametrize('function', ['hang', 'leave', 'allocate_much'])
async def test_an_answer_that_cannot_be_graded_is_wrong(function, monkeypatch):
  """The grader's function is replaced by one that hangs, or ends, or takes memory."""
  function = getattr(graders, function)
  monkeypatch.setattr(mathematics, 'is_equal', function)
  seconds = 0.5 if function is graders.hang else 120.0
  grader = mathematics.Grader(seconds=seconds, processes=1)
  reward, metrics = await _grade(grader, '\\boxed{12}')
  assert (reward, metrics['accuracy'], metrics['grading_failed']) == (0.0, 0.0, 1.0)


# Ways of writing an answer: none changes what it means.
WAYS = [
  lambda text: text,
  lambda text: f'{text}.',
  lambda text: f'${text}$,',
  lambda text: f'\\({text}.\\)',
  lambda text: (
    text.replace('\\frac', '\\dfrac').replace('-', '−').replace('^\\circ', '°')
  ),
  lambda text: re.sub(r'^(-?\d+),(?=\d{3}$)', r'\1\\,', text),
  lambda text: f'\\text{{{text}}}' if re.fullmatch(r'[-\d,.]+', text) else text,
]


@pytest.mark.parametrize('name, rows', [('gsm8k', 7473), ('math', 7498)])
@pytest.mark.filterwarnings('ignore:.*rows have no answer')
def test_golden_answers_of_the_real_rows(name, rows, data_dir):
  tasks = mathematics.load(data_dir / name / 'train.jsonl.gz')
  assert len(tasks) == rows
  goldens = [*dict.fromkeys(task.answer for task in tasks)][::9]
  for golden in goldens:
    for text in {way(golden) for way in WAYS}:
      boxed = mathematics.find_boxed(f'So \\boxed{{{text}}} is it.') or ''
      assert mathematics.is_equal(boxed, golden), (text, golden)
  for golden, other in zip(goldens, goldens[1:], strict=False):
    assert not mathematics.is_equal(other, golden), (other, golden)


@pytest.mark.parametrize('part', ['.', r'\,', ' ', '$', '1', '1.'])
async def test_a_long_answer_is_rewritten_in_linear_time(part):
  rewrite = isolated.in_subprocess(mathematics._rewrite, seconds=60.0)
  assert 'x' in await rewrite(part * 100_000 + 'x')


def test_many_spaces_are_as_one():
  """math-verify takes minutes of a caret and so many of them."""
  assert mathematics._rewrite('x^' + ' ' * 20_000 + 'y') == 'x^ y'
  assert mathematics.is_equal('x^' + ' ' * 20_000 + '{2}', 'x^2')
