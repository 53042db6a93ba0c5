"""miniwiki: what a score relies on, and the text that a base policy learns from."""

import collections
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from agent_r1_jax.agent import call_formats, calls, chat, tokenizer
from agent_r1_jax.tasks import qa
from experiments import train_tokenizer
from experiments.miniwiki import demos
from experiments.miniwiki import questions as questions_lib
from experiments.miniwiki import relations as relations_lib
from experiments.miniwiki import tasks as miniwiki
from experiments.miniwiki import world as world_lib

IN_DOMAIN = ('miniwiki-hotpot', 'miniwiki-2wiki')


@pytest.fixture(scope='module')
def examples():
  return list(demos.examples(0, 3000, miniwiki.make_search, examples_per_world=1500))


@pytest.fixture(scope='module')
def chatter(examples, tmp_path_factory):
  directory = tmp_path_factory.mktemp('tokenizer')
  texts = demos.tokenizer_texts(examples)
  train_tokenizer.train(texts, vocab_size=1024, directory=directory)
  return chat.Chat(tokenizer.load(directory))


def names_in(split):
  """All names' words of a split's passages."""
  text = ' '.join(d.contents for d in miniwiki.corpus(0, split))
  made = set(world_lib.words('base')).union(
    *(world_lib.words(s) for s in world_lib.SPLITS)
  )
  return made.intersection(re.findall(r'\w+', text))


def digest():
  """Of all that a run reads, in small."""
  tasks = miniwiki.train_tasks(3, 50) + [
    task for name in miniwiki.SETS for task in miniwiki.test_set(name, 20, 3)
  ]
  made = demos.examples(3, 60, miniwiki.make_search, examples_per_world=30)
  rows = [d.contents for d in miniwiki.corpus(3, 'train') + miniwiki.corpus(3, 'test')]
  rows += [[t.id, t.messages, t.answer, t.info] for t in tasks]
  rows += [[e.messages, e.tools, e.kind] for e in made]
  return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def test_a_seed_gives_the_same_bytes_in_another_process():
  program = 'from tests import test_miniwiki; print(test_miniwiki.digest())'
  made = subprocess.run(
    [sys.executable, '-c', program],
    env={**os.environ, 'PYTHONHASHSEED': '1'},  # This one has another.
    cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    capture_output=True,
    text=True,
    check=True,
  )
  assert made.stdout.strip() == digest()


def test_no_word_of_a_name_is_in_two_splits():
  used = {split: names_in(split) for split in world_lib.SPLITS}
  assert all(len(words) > 500 for words in used.values())
  assert sum(map(len, used.values())) == len(set().union(*used.values()))
  worlds = [world_lib.words('test', part) for part in range(world_lib.PARTS)]
  assert sum(map(len, worlds)) == len(set().union(*worlds))


def test_base_examples_use_base_words_only(examples):
  used = set(re.findall(r'\w+', json.dumps([e.messages for e in examples])))
  for split in ('train', 'dev', 'test'):
    assert not used.intersection(world_lib.words(split))


@pytest.mark.parametrize('split', ['train', 'test'])
def test_a_corpus_has_one_short_passage_for_each_title(split):
  corpus = miniwiki.corpus(0, split)
  assert 2000 <= len(corpus) <= 3000
  assert len({d.title for d in corpus}) == len({d.id for d in corpus}) == len(corpus)
  for d in corpus:
    assert d.text.startswith(f'{d.title} ')
    assert not re.search(r'[{}]|  ', d.text)
    assert 2 <= d.text.count('.') <= 5
    assert len(d.text.split()) <= 60


@pytest.mark.parametrize('name', miniwiki.SETS)
def test_chain_leads_to_the_answer_and_nothing_earlier_does(name):
  _, part = miniwiki.SETS[name]
  world = world_lib.world(0, 'test', miniwiki.PASSAGES, part)
  tasks = miniwiki.test_set(name, 300, 0)
  assert len({t.messages[0]['content'] for t in tasks}) > 295  # Wordings may vary.
  for task in tasks:
    info, question = task.info, task.messages[0]['content']
    [answer] = task.answer
    assert question == info['question']
    assert re.search(rf' {info["chain"][0]}\b', question)
    if info['kind'] == 'comparison':
      years = [world.facts[title]['year'] for title in info['chain']]
      assert years == info['years'] and years[0] != years[1]
      winner = (min if info['sign'] == 'earlier' else max)(years)
      assert answer == info['chain'][years.index(winner)]
      assert info['sign'] in question and ' ' + info['chain'][1] in question
      continue
    entity = info['chain'][0]
    for hop, relation in enumerate(info['relations']):
      assert entity == info['chain'][hop]
      assert hop == info['hops'] - 1 or answer not in world.passages[entity]
      entity = world.facts[entity][relation]
    assert entity == answer and answer not in question
    assert len(set(info['chain'])) == info['hops']


@pytest.mark.parametrize('name', IN_DOMAIN)
def test_comparisons_are_balanced(name):
  tasks = miniwiki.test_set(name, 300, 0)
  compared = [t for t in tasks if t.info['kind'] == 'comparison']
  assert 0.20 <= len(compared) / len(tasks) <= 0.25
  cells = collections.Counter(
    (t.info['sign'], t.answer[0] == t.info['chain'][0]) for t in compared
  )
  assert len(cells) == 4 and max(cells.values()) - min(cells.values()) <= 1
  bridges = collections.Counter(
    t.info['hops'] for t in tasks if t.info['kind'] == 'bridge'
  )
  assert set(bridges) == {2, 3} and min(bridges.values()) >= 50


def pairs_of(tasks):
  return {
    pair
    for t in tasks
    if t.info['kind'] == 'bridge'
    for pair in zip(t.info['relations'], t.info['relations'][1:], strict=False)
  }


def test_held_out_compositions_are_never_trained(examples):
  held_out = questions_lib.HELD_OUT
  trained = pairs_of(miniwiki.train_tasks(0, 1500))
  demonstrated = pairs_of([e.task for e in examples if e.task])
  in_domain = pairs_of([t for n in IN_DOMAIN for t in miniwiki.test_set(n, 300, 0)])
  assert not (trained | demonstrated | in_domain) & held_out
  assert trained == questions_lib.PAIRS - held_out
  assert 0.2 <= len(held_out) / len(questions_lib.PAIRS) <= 0.3
  for name in ('miniwiki-musique', 'miniwiki-musique-4hop'):
    for task in miniwiki.test_set(name, 100, 0):
      assert pairs_of([task]) & held_out
  # Each relation alone is trained in every place that it has.
  for place in (0, 1):
    assert {p[place] for p in trained} == {p[place] for p in questions_lib.PAIRS}


def test_practice_chains_are_never_held_out(examples):
  asked = {r.name: r for r in relations_lib.EDGES}
  chains = [e for e in examples if e.kind == 'chain']
  assert len(chains) > 100
  for e in chains:
    said = re.findall(r'The (\w+) is', e.messages[-1]['content'])
    assert set(said) <= set(asked) and not questions_lib.holds_out(said)


def test_gold_query_finds_the_gold_passage_first():
  index = miniwiki.make_index(miniwiki.corpus(0, 'test'))
  wanted = {}
  for part in range(world_lib.PARTS):
    facts = world_lib.world(0, 'test', miniwiki.PASSAGES, part).facts
    wanted |= {f' {title} {r}': title for title, known in facts.items() for r in known}
  found = index.search(list(wanted), 1)
  right = [h[0].document.title == t for h, t in zip(found, wanted.values(), strict=True)]
  assert np.mean(right) >= 0.999


def test_demonstrations_call_rightly_and_earn_what_their_fate_says(examples):
  em = collections.defaultdict(list)
  for e in examples:
    replies = [m['content'] for m in e.messages if m['role'] == 'assistant']
    assert e.messages[0]['role'] == 'user' and e.messages[-1]['role'] == 'assistant'
    assert not any(
      isinstance(c, calls.CallError)
      for r in replies
      for c in call_formats.HERMES.parse(r)
    )
    assert bool(call_formats.HERMES.parse(replies[-1])) is False
    for reply in replies[:-1]:
      [call] = call_formats.HERMES.parse(reply)
      assert call.name == 'search' and call.arguments['query'].startswith(' ')
    if e.task is not None:
      kind = e.kind, e.task.info['kind'], e.task.info['hops']
      em[kind].append(qa.metrics(e.task, e.messages)['em'])
      assert qa.paper_reward(e.task, e.messages) in (0.0, 1.0)
  for (fate, _, _), scores in em.items():
    if fate in ('right', 'single'):
      assert np.mean(scores) == 1.0
  for hops in (2, 3):
    assert len(em['right', 'bridge', hops]) >= 50
    for fate in ('stop', 'repeat', 'guess'):
      assert np.mean(em[fate, 'bridge', hops]) == 0.0
    for fate in ('relation', 'another'):
      assert np.mean(em[fate, 'bridge', hops]) < 0.1
  assert len(em['right', 'comparison', 2]) >= 50
  chance = sum((em[f, 'comparison', 2] for f in ('stop', 'repeat', 'another')), [])
  assert 0.35 < np.mean(chance) < 0.65


def test_rag_prompt_has_the_practised_form(examples):
  corpus = miniwiki.corpus(0, 'test')
  task = miniwiki.test_set('miniwiki-hotpot', 1, 0)[0]
  hits = miniwiki.make_index(corpus).search([task.info['question']], 3)[0]
  made = miniwiki.rag_task(task, hits)
  form = r'(Doc \d \(Title: [\w ]+\) .+\.\n)+[^\n]+[?.]'
  assert re.fullmatch(form, made.messages[0]['content'])
  assert made.messages[0]['content'].endswith('\n' + task.info['question'])
  practised = [e.messages[0]['content'] for e in examples if e.kind == 'lookup']
  assert all(re.fullmatch(form, prompt) for prompt in practised)


def test_tokens_of_names_and_years(chatter):
  """No name of the test is longer in tokens than those trained on; a year is two."""
  encode = chatter.tokenizer.encode
  lengths = {
    split: np.mean([len(encode(f' {w}')) for w in world_lib.words(split)[::7]])
    for split in ('base', 'test')
  }
  assert lengths['base'] < 2.5
  assert abs(lengths['base'] - lengths['test']) < 0.1
  assert {len(encode(f' {year}')) for year in world_lib.YEARS} == {2}
  word = world_lib.words('test')[0]
  alone = ','.join(map(str, encode(f' {word}')))
  for text in (f'Doc 1 (Title: {word}) x', f'is {word}.', f'" {word} river"'):
    assert f',{alone},' in ','.join(map(str, encode(text)))
