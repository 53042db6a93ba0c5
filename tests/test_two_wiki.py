"""Practice on 2WikiMultihopQA's relations, and its scripts from end to end."""

import gzip
import json
import pathlib
import random

import pytest
import script as script_lib

from agent_r1_jax import types
from agent_r1_jax.agent import calls
from agent_r1_jax.retrieval import bm25
from agent_r1_jax.retrieval.documents import Document
from experiments.two_wiki import facts, practice

NATIONS = ('American', 'British', 'Danish')


@pytest.mark.parametrize(
  ('relation', 'text', 'value'),
  [
    ('director', 'Web is a 1959 British film directed by Max Varnel.', 'Max Varnel'),
    ('director', 'It is a film written and directed by R. A. Frank.', 'R. A. Frank'),
    ('director', 'A film, produced by John Doe. Edward Hall directed.', 'Edward Hall'),
    ('performer', '"X" is a song by American singer Jane de Roe.', 'Jane de Roe'),
    ('date of birth', 'Ann ( April 28, 1884 – December 28, 1950) was', 'April 28, 1884'),
    ('date of birth', 'Ann ( née Lee; born 3 May 1951) is a poet.', '3 May 1951'),
    ('date of death', 'Ann ( April 28, 1884 – December 8, 1950)', 'December 8, 1950'),
    ('place of birth', 'He was born in May 1951 in New York City.', 'New York City'),
    ('place of death', 'He died on 3 May 1951 in Paris.', 'Paris'),
    ('nationality', 'Ann is a noted Danish poet.', 'Danish'),
    ('father', 'He was the son of King Charles III of Spain.', 'Charles III of Spain'),
    ('father', 'The son of John, 2nd Baron Lee and Mary.', 'John, 2nd Baron Lee'),
    ('mother', 'He is a son of Carl and his wife Sofia of Oss.', 'Sofia of Oss'),
    ('spouse', 'She was the wife of the actor Peter Bo.', 'Peter Bo'),
    ('country', 'Ali is a village in Fars Province, Iran. At', 'Iran'),
    ('released', 'Web is a 1959 British film.', '1959'),
    ('director', 'Ann is a poet, directed by nobody.', None),
    ('place of death', 'Ann is a Danish poet.', None),
  ],
)
def test_facts_are_read_from_sentences(relation, text, value):
  assert facts.find(relation, facts.tidy(text), NATIONS) == value


def test_tidy_puts_a_space_before_names_and_numbers():
  text = 'Ann( born 3 May 1951–2000) is from Sint- Niklaas and (Oss)'
  assert facts.tidy(text) == (
    'Ann ( born 3 May 1951 – 2000) is from Sint-Niklaas and ( Oss)'
  )


# Films, who directed them, and when and where these were born.
DIRECTORS = {
  'Adam Berg': ('3 May 1901', '4 June 1950', 'Oslo', 'Danish'),
  'Carl Dahl': ('1 May 1911', '4 June 1960', 'Paris', 'Danish'),
  'Emil Falk': ('2 May 1921', '4 June 1970', 'Rome', 'British'),
  'Gus Holm': ('7 May 1931', '4 June 1980', 'Madrid', 'British'),
  'Ida Jensen': ('8 May 1941', '4 June 1990', 'Lisbon', 'British'),
  'Kai Lund': ('9 May 1951', '4 June 2000', 'Vienna', 'Danish'),
}
FILMS = {
  'Silent Water (film)': 'Adam Berg',
  'The Red Door': 'Carl Dahl',
  'Night of Wolves': 'Emil Falk',
  "A Widow's Game": 'Gus Holm',
}


def _passages():
  people = {
    name: f'{name} ( {born} – {died}) was a {nation} film director, born in {place}.'
    for name, (born, died, place, nation) in DIRECTORS.items()
  }
  films = {
    title: f'{title.split(" (")[0]} is a {1940 + i} film directed by {director}.'
    for i, (title, director) in enumerate(FILMS.items())
  }
  texts = people | films
  return [Document(f'd{i}', title, text) for i, (title, text) in enumerate(texts.items())]


def _director(query):
  films = {title.split(' (')[0].lower(): d for title, d in FILMS.items()}
  return DIRECTORS[films.get(query.lower().split(' (')[0], query)]


def _task(question, answer, titles, kind):
  info = {'question': question, 'supporting_titles': titles, 'type': kind}
  return types.Task(question, [], [answer], info)


ROWS = [
  _task(
    'When was the director of film Silent Water (Film) born?',
    '3 May 1901',
    ['Silent Water (film)', 'Adam Berg'],
    'compositional',
  ),
  _task(
    'Which film has the director who is older, The Red Door or Night Of Wolves?',
    'The Red Door',
    ['The Red Door', 'Carl Dahl', 'Night of Wolves', 'Emil Falk'],
    'bridge_comparison',
  ),
  _task(
    'Do Emil Falk and Gus Holm have the same nationality?',
    'yes',
    ['Emil Falk', 'Gus Holm'],
    'comparison',
  ),
]


@pytest.fixture(scope='module')
def maker():
  passages = _passages()
  return practice.Maker(
    passages, practice.TitleFirst(passages, bm25.BM25(passages)), ROWS
  )


def test_rows_give_templates():
  found = [practice.find_template(task) for task in ROWS]
  assert found == [
    (
      ('When was the director of film {} born?', ('director', 'date of birth'), None),
      ['Silent Water (Film)'],
    ),
    (
      (
        'Which film has the director who is older, {} or {}?',
        ('director', 'date of birth'),
        True,
      ),
      ['The Red Door', 'Night Of Wolves'],
    ),
    (
      ('Do {} and {} have the same nationality?', ('nationality',), None),
      ['Emil Falk', 'Gus Holm'],
    ),
  ]
  assert practice.find_template(_task('Who is he?', 'X', ['Nobody'], 'inference')) is None


@pytest.mark.parametrize('kind', ['fact', 'chain', 'compare', 'compare chain'])
def test_practice_asks_of_other_passages_and_knows_the_answer(maker, kind):
  rng, questions = random.Random(0), set()
  for _ in range(60):
    if (problem := maker.make(kind, rng)) is None:
      continue
    questions.add(problem.question)
    first, last = problem.hops[0], problem.hops[-1]
    if kind in ('fact', 'chain'):
      assert problem.answer == _director(first.query)[0]
    elif kind == 'compare':
      same = _director(first.query)[3] == _director(last.query)[3]
      assert problem.answer == ('yes' if same else 'no')
    else:
      older = min(
        (problem.hops[0], problem.hops[2]), key=lambda h: _director(h.query)[0][-4:]
      )
      assert problem.answer == older.query
  assert len(questions) > 3


def test_conversations_search_read_and_answer(maker):
  rng = random.Random(0)
  made = (maker.make('chain', rng) for _ in range(200))
  problem = next(p for p in made if p and p.hops[0].query.startswith('Silent'))
  messages = maker.write(problem, rng, 'right')
  assert [m['role'] for m in messages] == [
    'user',
    *['assistant', 'tool'] * 2,
    'assistant',
  ]
  (call,) = calls.parse_hermes(messages[3]['content'])
  assert call.arguments == {'query': ' Adam Berg'}
  assert messages[3]['content'].startswith('director: Adam Berg.\n')
  assert 'directed by Adam Berg' in messages[2]['content']
  assert (
    messages[-1]['content'] == 'date of birth: 3 May 1901. <answer> 3 May 1901</answer>'
  )
  for fate, turns in [('relation', 3), ('stop', 2), ('guess', 1)]:
    wrong = maker.write(problem, rng, fate)
    assert sum(m['role'] == 'assistant' for m in wrong) == turns
    assert '<answer> 3 May 1901<' not in wrong[-1]['content']
  reading = maker.write_reading(problem, rng)
  assert 'was a Danish film director' in reading[0]['content'] and len(reading) == 2


def test_titles_come_first():
  # By words alone the last ones are better.
  louder = [
    Document('e0', 'Water', 'silent water, silent water'),
    Document('e1', 'Holm', 'gus holm gus holm'),
  ]
  passages = [*_passages(), *louder]
  retriever = practice.TitleFirst(passages, bm25.BM25(passages))
  (by_title,), (by_name,), (other, *_) = retriever.search(
    ['gus holm', 'Silent Water', 'director born in Rome'], 1
  )
  assert by_title.document.title == 'Gus Holm'
  assert by_name.document.title == 'Silent Water (film)'
  assert other.document.title == 'Emil Falk'


def _run(script, *args):
  done = script_lib.run('-m', f'experiments.two_wiki.{script}', *args)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout + done.stderr


def _write(path, rows):
  with gzip.open(path, 'wt') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)


def _row(i, task):
  info = {k: task.info[k] for k in ('question', 'supporting_titles', 'type')}
  return {'id': f'r{i}', 'golden_answers': task.answer, **info}


def test_both_scripts_from_end_to_end(tmp_path: pathlib.Path):
  corpus = [{'id': d.id, 'title': d.title, 'text': d.text} for d in _passages()]
  _write(tmp_path / 'corpus.jsonl.gz', corpus)
  # Enough copies that each kind of question is among the training rows.
  rows = [_row(i, task) for i, task in enumerate(ROWS * 5)]
  _write(tmp_path / 'train.jsonl.gz', rows)
  shared = (f'--data={tmp_path}', '--held_out=3', '--watched=1')
  tiny = (
    '--layers=2',
    '--dim=96',
    '--vocab=300',
    '--sft.steps=2',
    '--sft.rows=1',
    '--sft.warmup=1',
  )
  _run('pretrain', *shared, f'--out={tmp_path}/base', *tiny)
  asked = tmp_path / 'asked.jsonl'
  asked.write_text(json.dumps(_row('new', ROWS[0])) + '\n')
  said = _run(
    'search',
    *shared,
    f'--workdir={tmp_path}/run',
    f'--config.model.path={tmp_path}/base/model',
    f'--rows={asked}',
    '--config.schedule.steps=1',
    '--config.schedule.tasks=2',
    '--config.schedule.samples=2',
    '--config.engine.rows=4',
    '--config.engine.prefill_rows=4',
    *script_lib.one_program(slots=1280),
    '--config.batch.microbatch=2',
    '--config.limits.max_turn_tokens=16',
  )
  assert '| GRPO' in said and '/1 ' in said
  methods = json.loads((tmp_path / 'run' / 'table.json').read_text())['methods']
  assert [*methods] == ['Direct answer', 'Naive RAG', 'Base Tool Call', 'GRPO']
