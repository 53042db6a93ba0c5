"""Mathematics: the layouts of GSM8K and MATH, grading, and a run on the real rows."""

import json
import sys

import graders
import pytest

from agent_r1_jax import types
from agent_r1_jax.agent import env
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
  assert str(task.answer) == '0'


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
    ('', None),
  ],
)
def test_the_last_box_is_the_answer(text, answer):
  assert mathematics.find_boxed(text) == answer


@pytest.mark.parametrize(
  'answer, golden, equal',
  [
    ('1/2', '\\frac{1}{2}', True),
    ('0.5', '\\frac12', True),
    ('1,000', '1000', True),
    ('3.0', '3', True),
    ('\\sqrt{8}', '2\\sqrt{2}', True),
    ('x=3', '3', True),
    ('(2,1)', '(1,2)', False),
    ('1001', '1000', False),
    ('-3', '3', False),
    ('yes', '3', False),
    ('', '3', False),
  ],
)
def test_answers_that_mean_the_same_are_equal(answer, golden, equal):
  assert mathematics.is_equal(answer, golden) == equal


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


@pytest.mark.parametrize('name, rows', [('gsm8k', 7473), ('math', 7498)])
@pytest.mark.filterwarnings('ignore:.*rows have no answer')
def test_golden_answers_of_the_real_rows_equal_themselves(name, rows, data_dir):
  tasks = mathematics.load(data_dir / name / 'train.jsonl.gz')
  assert len(tasks) == rows
  some = tasks[::100]
  assert [t.id for t in some if not mathematics.is_equal(t.answer, t.answer)] == []
