"""The world 'arithmetic in words': stories, lessons, the tool and the judge."""

import asyncio
import contextlib
import itertools
import random
import re

import pytest

from agent_r1_jax.agent import tokenizer
from agent_r1_jax.tasks import mathematics
from experiments import train_tokenizer
from experiments.worlds import arithmetic, world
from experiments.worlds import arithmetic_lessons as lessons
from experiments.worlds import arithmetic_stories as stories

PARTS = ('train', 'held_out')


def play(task, messages):
  """Plays the replies of a conversation; returns the steps."""

  async def run():
    env = arithmetic.make_env([arithmetic.calculator_tool()])
    await env.reset(task)
    replies = [m['content'] for m in messages if m['role'] == 'assistant']
    return [await env.step(reply) for reply in replies]

  return asyncio.run(run())


def test_there_are_at_least_60_templates_and_no_part_shares_one():
  train, held_out = ([*stories.templates(part)] for part in PARTS)
  assert len({*train}) == len(train) >= 60
  assert len({*held_out}) == len(held_out) >= 30
  assert not {*train} & {*held_out}


def test_equal_arguments_make_equal_tasks_and_other_seeds_others():
  make = lambda seed: arithmetic.WORLD.tasks(seed, 5)
  assert make(3) == make(3)
  assert {t.info['question'] for t in make(3)}.isdisjoint(
    t.info['question'] for t in make(4)
  )
  assert arithmetic.held_out(0, 3, 'dev') != arithmetic.held_out(0, 3, 'test')


def test_the_held_out_sets_are_held_out():
  sets = arithmetic.held_out(0, 60, 'test')
  train, held_out = ({*stories.templates(part)} for part in PARTS)
  for name, tasks in sets.items():
    allowed = held_out if name == 'new_templates' else train
    assert all({*t.info['templates']} <= allowed for t in tasks), name
  assert {t.info['steps'] for t in sets['more_steps']} == {5, 6}
  practised = arithmetic.WORLD.tasks(0, 60)
  assert max(t.info['steps'] for t in practised) == 4
  questions = {t.info['question'] for t in practised}
  assert questions.isdisjoint(t.info['question'] for t in sets['new_stories'])


@pytest.mark.parametrize('part', PARTS)
def test_the_demonstration_of_every_step_solves_its_task(part):
  rng = random.Random(0)
  for subject, kind, template in stories.sentence_kinds(part):
    # Twelve can be halved and shared whatever the kind is.
    size = stories.Size((2,), (12, 12), (2, 6))
    story = stories.make_story(rng, size, part, subject=subject, use=(kind, template))
    assert template in story.templates
    task = arithmetic.make_task('t', story)
    steps = play(task, lessons.demonstrate(story, rng))
    assert steps[-1].done and steps[-1].reward == 1, story.text
    assert [s.messages[0]['content'] for s in steps[:-1]] == [
      f' {step.total}' for step in story.steps
    ]


def test_a_demonstration_that_stops_early_or_answers_wrongly_gets_nothing():
  rng = random.Random(1)
  story = stories.make_story(rng, stories.Size((3,), (20, 30), (2, 9)))
  task = arithmetic.make_task('t', story)
  for fate in ('stop', 'skip', 'guess'):
    assert play(task, lessons.demonstrate(story, rng, fate))[-1].reward == 0, fate
  wrong = [{'role': 'assistant', 'content': lessons.answer(story.answer + 1)}]
  assert play(task, wrong)[-1].reward == 0
  bare = [{'role': 'assistant', 'content': f'Done. {story.answer}'}]
  assert play(task, bare)[-1].reward == 0


def test_distractors_change_no_answer():
  for seed in range(200):
    story = stories.make_story(random.Random(seed), lessons.PRACTISED)
    total = story.first
    for step in story.steps:
      assert step.sentence in story.text
      total = stories.compute(total, step.change)
      assert 1 < total <= stories.LARGEST
    assert total == story.answer
  distractors = {*stories.distractors('train'), *stories.distractors('held_out')}
  steps = {s for p in PARTS for _, _, s in stories.sentence_kinds(p)}
  assert not distractors & steps
  assert all('{when}' not in text for text in distractors)


def test_every_story_names_its_dates_once_and_in_order():
  for task in arithmetic.WORLD.tasks(0, 50):
    words = task.info['question'].replace('.', '').split()
    dates = [w for w in words if w in (*stories.DAYS, *stories.MONTHS)]
    assert len(dates) == len({*dates}) == task.info['steps']
    calendar = stories.DAYS if dates[0] in stories.DAYS else stories.MONTHS
    first = calendar.index(dates[0])
    assert tuple(dates) == calendar[first : first + len(dates)]


def test_lessons_have_no_held_out_template_and_their_answers_are_boxed():
  blank = re.compile(r'\\\{\w+\\\}')
  held_out = [
    re.compile(blank.sub('.{1,20}', re.escape(t))) for t in stories.templates('held_out')
  ]
  story = stories.make_story(random.Random(0), lessons.PRACTISED, 'held_out')
  assert any(pattern.search(story.text) for pattern in held_out)
  for example in itertools.islice(lessons.examples(0), 300):
    prompt, reply = (example.messages[i]['content'] for i in (0, -1))
    assert example.messages[-1]['role'] == 'assistant'
    assert example.tools == (example.kind in (*lessons.MIXTURE, 'compute'))
    if example.tools or example.kind == 'alone':
      assert mathematics.find_boxed(reply) is not None
    for sentence in re.split(r'(?<=\.) ', prompt):
      assert not any(pattern.fullmatch(sentence) for pattern in held_out), sentence


def test_one_word_of_each_step_says_what_it_does():
  for part in PARTS:
    for _, kind, template in stories.sentence_kinds(part):
      found = set()
      for other in stories.OPERATIONS:
        with contextlib.suppress(StopIteration):
          found.add(stories.find_word(template, other))
      assert found == {stories.find_word(template, kind)}, template


def test_every_number_is_one_token(tmp_path):
  shown = itertools.islice(arithmetic.WORLD.examples(7), 600)
  texts = [text for example in shown for text in arithmetic.WORLD.text(example)]
  train_tokenizer.train(texts, vocab_size=arithmetic.WORLD.vocab, directory=tmp_path)
  tok = tokenizer.load(tmp_path)
  encode = tok.encode
  for number in range(stories.LARGEST + 1):
    assert len(encode(f' {number}', add_special_tokens=False)) == 1, number


def test_the_world_is_complete():
  assert isinstance(arithmetic.WORLD, world.World)
  assert [s['function']['name'] for s in arithmetic.WORLD.schemas()] == ['calculator']
  methods = arithmetic.WORLD.methods(arithmetic.held_out(0, 2, 'dev'))
  assert {*arithmetic.WORLD.labels} <= {*methods}
