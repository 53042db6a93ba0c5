"""Scores equal the peers' (golden numbers); rewards and prompts of multi-hop QA."""

import dataclasses
import json
import pathlib

import pytest

from agent_r1_jax.agent import env, tool
from agent_r1_jax.retrieval.documents import Document, Hit
from agent_r1_jax.tasks import qa
from agent_r1_jax.types import Task

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden' / 'reward_refs.json').read_text()
)
TASK = Task('1', [], ['The Beatles', 'Fab Four'], {'question': 'Who sang {Help!}?'})
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Help"}}\n</tool_call>'
BAD_CALL = '<tool_call>{"name": "search", </tool_call>'


def _said(*replies):
  messages = [{'role': 'user', 'content': 'e.g. <answer>Beatles</answer>'}]
  for reply in replies:
    messages += [{'role': 'assistant', 'content': reply}]
    messages += [{'role': 'tool', 'content': '<answer>Beatles</answer>'}]
  return messages


@pytest.mark.parametrize(('text', 'expected'), GOLDEN['normalize_answer'])
def test_normalize_answer(text, expected):
  assert qa.normalize_answer(text) == expected


@pytest.mark.parametrize(('prediction', 'golden', 'expected'), GOLDEN['em_check'])
def test_exact_match(prediction, golden, expected):
  assert qa.exact_match(prediction, golden) == expected


@pytest.mark.parametrize(('prediction', 'golden', 'expected'), GOLDEN['subem_check'])
def test_cover_exact_match(prediction, golden, expected):
  assert qa.cover_exact_match(prediction, golden) == expected


@pytest.mark.parametrize(
  ('prediction', 'golden', 'expected'), GOLDEN['hotpot_f1_precision_recall(ragen)']
)
def test_f1(prediction, golden, expected):
  assert qa.f1(prediction, golden) == pytest.approx(expected[0], abs=1e-12)


@pytest.mark.parametrize(('text', 'golden', 'expected'), GOLDEN['verl_searchr1_em'])
def test_an_extracted_answer_scores_as_verl_scores_it(text, golden, expected):
  if text.count('</answer>') > 10:
    expected = 1.0  # verl quarters the score of such a text; EM knows no such rule.
  assert qa.exact_match(qa.extract_answer(text) or '', golden) == expected


def test_what_strict_em_does_not_forgive():
  assert qa.exact_match('unknown', 'no') == 0
  assert qa.cover_exact_match('unknown', 'no') == 1
  assert qa.exact_match('Fab Four', TASK.answer) == 1
  assert qa.f1('the fab three', TASK.answer) == pytest.approx(0.5)
  assert qa.cover_exact_match('blood type B', 'A') == 0
  assert qa.cover_exact_match('a', 'A') == 1


@pytest.mark.parametrize(
  ('text', 'answer'),
  [
    ('<answer> x\ny </answer>', 'x\ny'),
    ('<answer>x</answer><answer>y</answer> z', 'y'),
    ('<answer>x <answer>y</answer>', 'y'),
    ('<answer>x</answer></answer>', 'x'),
    ('<answer></answer>', ''),
    ('<answer>x', None),
    ('x</answer>', None),
    ('', None),
  ],
)
def test_extract_answer(text, answer):
  assert qa.extract_answer(text) == answer


@pytest.mark.parametrize(
  ('replies', 'reward'),
  [
    ([CALL, '<answer>beatles</answer>'], 1.0),
    (['So <answer>The Fab Four!</answer>'], 1.0),
    ([CALL, '<answer>Queen</answer>'], 0.0),
    (['<answer>Beatles band</answer>'], 0.0),
    ([BAD_CALL, '<answer>Beatles</answer>'], -0.5),
    ([CALL, 'The Beatles'], -0.5),
    (['<answer>Queen</answer><answer>Beatles</answer>'], -0.5),
    (['<answer>Beatles</answer></answer>'], -0.5),
    (['</answer>Beatles<answer>'], -0.5),
    (['<answer>Beatles</answer>', CALL], -0.5),
    ([CALL, BAD_CALL, 'The Beatles'], -1.0),
    ([BAD_CALL], -1.0),
    ([], -0.5),
  ],
)
def test_paper_reward(replies, reward):
  assert qa.paper_reward(TASK, _said(*replies)) == reward


@pytest.mark.parametrize(
  ('status', 'replies', 'reward', 'em'),
  [
    # Calls until the turns are used up: no answer is presented.
    ('max_turns', [CALL], -0.5, 0.0),
    ('max_turns', [CALL, BAD_CALL], -1.0, 0.0),
    # Rambles, or is cut in the midst of an answer or a call.
    ('truncated', [CALL, 'Hm <answer>The Bea'], -0.5, 0.0),
    ('truncated', [CALL, CALL[:20]], -1.0, 0.0),
    ('truncated', ['<answer>Beatles</answer>'], 1.0, 1.0),
  ],
)
async def test_equation_6_judges_what_a_budget_ended(status, replies, reward, em):
  @tool.tool
  def search(query: str) -> str:
    """Searches.

    Args:
      query: What for.
    """
    assert replies.index(CALL) < len(replies) - 1 or status != 'truncated'
    return 'nothing'

  agent = env.ToolEnv([search], qa.paper_reward, metrics=qa.metrics)
  await agent.reset(TASK)
  unfinished = replies[-1] if status == 'truncated' else None
  for reply in replies if unfinished is None else replies[:-1]:
    assert not (await agent.step(reply)).done
  step = await agent.finish(status, unfinished)
  assert (step.reward, step.metrics['em'], step.messages) == (reward, em, [])
  with pytest.raises(ValueError, match='finish: the episode is over'):
    await agent.finish(status)


def test_metrics_read_the_last_reply_alone():
  right = {'em': 1.0, 'cover_em': 1.0, 'f1': 1.0, 'answered': 1.0}
  assert qa.metrics(TASK, _said(CALL, '<answer>Beatles</answer>')) == right
  part = qa.metrics(TASK, _said('<answer>Beatles band</answer>'))
  assert part == {'em': 0, 'cover_em': 1, 'f1': pytest.approx(2 / 3), 'answered': 1}
  for replies in (['<answer>Beatles</answer>', 'no'], ['<answer> </answer>'], []):
    assert set(qa.metrics(TASK, _said(*replies)).values()) == {0.0}
    assert qa.em_reward(TASK, _said(*replies)) == 0.0
  blank = Task('2', [], ['The'], {'question': 'Which word?'})
  assert qa.em_reward(blank, _said('<answer></answer>')) == 0.0


def test_each_prompt_ends_with_the_question():
  hits = [Hit(Document('0', 'Help!', 'A {1965} film.'), 1.0)]
  tasks = [qa.agent_task(TASK), qa.direct_task(TASK), qa.rag_task(TASK, hits)]
  for task in tasks:
    (message,) = task.messages
    assert message['role'] == 'user'
    assert '<answer>' in message['content']
    assert message['content'].endswith('\n\nQuestion: Who sang {Help!}?')
    assert (task.id, task.answer, task.info) == (TASK.id, TASK.answer, TASK.info)
  agent, direct, rag = (task.messages[0]['content'] for task in tasks)
  assert 'search' in agent
  assert 'search' not in direct
  assert '\n\nDoc 1 (Title: Help!) A {1965} film.\n\n' in rag
  assert qa.direct_task(qa.agent_task(TASK)) == qa.direct_task(TASK)


def test_found_share_counts_the_gold_titles_that_a_tool_gave():
  task = Task('a', [], ['x'], {'supporting_titles': ['Rhodesia', 'Currie Cup']})
  said = lambda role, text: {'role': role, 'content': text}
  read = said('tool', 'Doc 1 (Title: Rhodesia) It was ...\nDoc 2 (Title: Salisbury) ...')
  assert qa.found_share(task, [said('user', '(Title: Currie Cup)'), read]) == 0.5
  # A title that a passage mentions was not found, nor one that begins as it does.
  other = said('tool', '(Title: Currie Cups) Currie Cup')
  assert qa.found_share(task, [read, other]) == 0.5
  assert qa.found_share(task, [read, said('tool', '(Title: Currie Cup) x')]) == 1.0
  assert qa.found_share(Task('b', [], ['x']), [read]) == 0.0
  # Two passages were shown, one of them gold; and then both and another.
  found = qa.metrics(task, [read])
  assert (found['support_recall'], found['support_precision']) == (0.5, 0.5)
  found = qa.metrics(task, [read, said('tool', '(Title: Currie Cup) x')])
  assert (found['support_recall'], found['support_em']) == (1.0, 0.0)
  assert found['support_f1'] == pytest.approx(0.8)
  assert 'support_recall' not in qa.metrics(Task('b', [], ['x']), [read])


@pytest.mark.parametrize('score', [qa.exact_match, qa.cover_exact_match, qa.f1])
@pytest.mark.parametrize(
  ('golden', 'expected'),
  [([], 0), (None, 0), ((), 0), (42, 1), (42.0, 1), ([7, 42], 1), ([None, '42'], 1)],
)
def test_no_golden_answer_and_one_that_is_a_number(score, golden, expected):
  assert score('42', golden) == expected
  task = dataclasses.replace(TASK, answer=golden)
  reply = [{'role': 'assistant', 'content': '<answer>42</answer>'}]
  assert qa.metrics(task, reply)['f1'] == expected


@pytest.mark.parametrize(
  ('predicted', 'em', 'precision', 'recall', 'f1'),
  [
    # By hand, after update_sp of HotpotQA's evaluation script.
    ([('Ann', 0), ('Bo', 1)], 1, 1, 1, 1),
    ([('Bo', 1), ('Ann', 0), ('Ann', 0)], 1, 1, 1, 1),
    ([('Ann', 0)], 0, 1, 1 / 2, 2 / 3),
    ([('Ann', 0), ('Bo', 2), ('Eve', 0)], 0, 1 / 3, 1 / 2, 2 / 5),
    ([('Ann', 1)], 0, 0, 0, 0),
    ([], 0, 0, 0, 0),
  ],
)
def test_supporting_facts_are_scored_as_officially(predicted, em, precision, recall, f1):
  found = qa.supporting_facts(predicted, [('Ann', 0), ('Bo', 1)])
  expected = {'em': em, 'precision': precision, 'recall': recall, 'f1': f1}
  assert found == pytest.approx(expected)
