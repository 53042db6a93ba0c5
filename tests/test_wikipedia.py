"""Practice on the relations of real questions, and its scripts from end to end.

The scripts run as a user runs them, in processes of their own.
"""

import gzip
import json
import pathlib
import random
import re

import jax
import pytest
import script as script_lib

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats
from agent_r1_jax.models import decoder, hf_config, weights
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.retrieval.documents import Document
from agent_r1_jax.tasks import qa
from experiments.wikipedia import demos, facts, practice, reading, settings, templates

NATIONS = ('American', 'British', 'Danish')


@pytest.mark.parametrize(
  ('relation', 'text', 'value'),
  [
    ('director', 'Web is a 1959 British film directed by Max Varnel.', 'Max Varnel'),
    ('director', 'A film, produced by John Doe. Edward Hall directed.', 'Edward Hall'),
    ('performer', '"X" is a song by American singer Jane de Roe.', 'Jane de Roe'),
    ('date of birth', 'Ann ( April 28, 1884 – December 28, 1950) was', 'April 28, 1884'),
    ('date of death', 'Ann ( April 28, 1884 – December 8, 1950)', 'December 8, 1950'),
    ('place of death', 'He died on 3 May 1951 in Paris.', 'Paris'),
    ('father', 'He was the son of King Charles III of Spain.', 'Charles III of Spain'),
    ('mother', 'He is a son of Carl and his wife Sofia of Oss.', 'Sofia of Oss'),
    ('spouse', 'She was the wife of the actor Peter Bo.', 'Peter Bo'),
    ('director', 'Ann is a poet, directed by nobody.', None),
  ],
)
def test_a_sentence_gives_the_value_of_a_relation(relation, text, value):
  assert facts.find(relation, facts.tidy(text), NATIONS) == value


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
  'Old Road': 'Ida Jensen',
  'White Nights': 'Kai Lund',
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
  return practice.Maker(passages, reading.TitleFirst(passages, bm25.BM25(passages)), ROWS)


def test_a_question_without_its_names_is_a_template():
  chain, compared, equal = (templates.find_template(task) for task in ROWS)
  text, relations = (
    'When was the director of film {} born?',
    ('director', 'date of birth'),
  )
  assert chain == ((text, relations, None), ['Silent Water (Film)'])
  text = 'Which film has the director who is older, {} or {}?'
  assert compared == ((text, relations, True), ['The Red Door', 'Night Of Wolves'])
  text = 'Do {} and {} have the same nationality?'
  assert equal == ((text, ('nationality',), None), ['Emil Falk', 'Gus Holm'])
  assert not templates.find_template(_task('Who is he?', 'X', ['Nobody'], 'inference'))


@pytest.mark.parametrize('kind', ['fact', 'chain', 'compare', 'compare chain'])
def test_a_template_filled_with_other_names_has_the_answer_of_their_passages(maker, kind):
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


def test_a_conversation_searches_reads_and_answers_or_errs_as_its_fate_says(maker):
  rng = random.Random(0)
  made = (maker.make('chain', rng) for _ in range(200))
  problem = next(p for p in made if p and p.hops[0].query.startswith('Silent'))
  messages = maker.write(problem, rng, 'right')
  assert [m['role'] for m in messages] == [
    'user',
    *['assistant', 'tool'] * 2,
    'assistant',
  ]
  (call,) = call_formats.HERMES.parse(messages[3]['content'])
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


def test_a_query_that_is_a_title_finds_that_passage_first():
  # By words alone the last ones are better.
  louder = [
    Document('e0', 'Water', 'silent water, silent water'),
    Document('e1', 'Holm', 'gus holm gus holm'),
  ]
  passages = [*_passages(), *louder]
  retriever = reading.TitleFirst(passages, bm25.BM25(passages))
  (by_title,), (by_name,), (other, *_) = retriever.search(
    ['gus holm', 'Silent Water', 'director born in Rome'], 1
  )
  assert by_title.document.title == 'Gus Holm'
  assert by_name.document.title == 'Silent Water (film)'
  assert other.document.title == 'Emil Falk'


def test_a_split_depends_on_ids_and_seed_alone():
  tasks = [types.Task(f'q{i}', []) for i in range(50)]
  a, b, rest = settings.split(tasks, 10, 5)
  assert [len(a), len(b), len(rest)] == [10, 5, 35]
  assert {t.id for t in [*a, *b, *rest]} == {t.id for t in tasks}
  assert settings.split(tasks[::-1], 10, 5) == [a, b, rest]
  assert settings.split(tasks, 10, 5, seed=1) != [a, b, rest]
  assert settings.split(tasks, 15)[0] == a + b
  with pytest.raises(ValueError, match=r'sizes \(30, 20\) leave nothing of 50'):
    settings.split(tasks, 30, 20)


def test_rows_give_demonstrations_that_follow_their_names():
  passages, retriever = settings.index(settings.SMALL, _passages())
  by_title = {document.title: document for document in passages}
  find = lambda query: retriever.search([query], 1)[0]
  for row, queries in (
    (ROWS[0], [' Silent Water', ' Adam Berg']),
    (ROWS[1], [' The Red Door', ' Night Of Wolves', ' Carl Dahl', ' Emil Falk']),
  ):
    task = reading.agent_task(row)
    messages = demos.demonstrate(task, by_title, find, documents.render)
    assert messages[:1] == task.messages and qa.paper_reward(task, messages) == 1.0
    said = [m['content'] for m in messages if m['role'] == 'assistant']
    found = [call_formats.HERMES.parse(text)[0] for text in said[:-1]]
    assert [call.arguments['query'] for call in found] == queries
  elsewhere = _task('Who directed it?', 'Adam Berg', ['The Red Door'], 'bridge')
  assert demos.demonstrate(elsewhere, by_title, lambda query: [], str) is None


def _run(script: str, *args: str, fails: bool = False) -> str:
  """Runs an experiment's script; returns what it printed."""
  done = script_lib.run('-m', f'experiments.{script}', *args)
  assert (done.returncode != 0) == fails, done.stdout + done.stderr
  return done.stdout + done.stderr


def _row(i, task):
  info = {k: task.info[k] for k in ('question', 'supporting_titles', 'type')}
  return {'id': f'r{i}', 'golden_answers': task.answer, **info}


METHODS = ['Direct answer', 'Naive RAG', 'Base Tool Call', 'GRPO']
TINY = (
  '--config.schedule.steps=1',
  '--config.schedule.samples=2',
  '--config.limits.max_turn_tokens=16',
)


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('data')
  passages = ({'id': d.id, 'title': d.title, 'text': d.text} for d in _passages())
  # Enough copies that each kind of question is among the training rows.
  rows = (_row(i, task) for i, task in enumerate(ROWS * 5))
  for name, lines in (('corpus', passages), ('train', rows)):
    with gzip.open(folder / f'{name}.jsonl.gz', 'wt', encoding='utf-8') as file:
      file.writelines(json.dumps(line) + '\n' for line in lines)
  return folder


def test_pretrain_makes_a_policy_that_search_trains_and_measures(data, tmp_path):
  shared = (f'--data={data}', '--held_out=3', '--watched=1')
  size = ('--layers=2', '--dim=96', '--vocab=300', '--sft.row_tokens=512')
  sft = ('--sft.steps=2', '--sft.rows=1', '--sft.warmup=1')
  _run('wikipedia.pretrain', *shared, *size, *sft, f'--out={tmp_path}/base')
  assert len(json.loads((tmp_path / 'base' / 'rows.json').read_text())) == 11

  run = tmp_path / 'run'
  search = (
    'wikipedia.search',
    *shared,
    *TINY,
    f'--workdir={run}',
    f'--config.model.path={tmp_path}/base/model',
    '--config.schedule.tasks=2',
    '--config.engine.rows=4',
    '--config.engine.prefill_rows=4',
    *script_lib.one_program(slots=640),
    '--config.batch.microbatch=2',
  )
  _run(*search)
  numbers = json.loads((run / 'table.json').read_text())
  assert [*numbers['methods']] == METHODS and '/3 ' in (run / 'table.md').read_text()
  assert not any(of['errors'] for of in numbers['methods'].values())
  assert numbers['recall']['recall@5'] > 0.3
  assert (run / 'curve.png').stat().st_size > 0
  assert hf_config.read(run / 'model').embed_dim == 96
  # The small policy is known by its rows, and trained as such; so is what came of it.
  config = json.loads((run / 'config.json').read_text())
  assert config['optimizer'] | {'learning_rate': 2e-4} == config['optimizer']
  assert settings.setting_of(str(run / 'model')) is settings.SMALL

  # Started again, the finished run scores other rows with its policy.
  asked = tmp_path / 'asked.jsonl'
  asked.write_text(json.dumps(_row('new', ROWS[0])) + '\n')
  assert '/1 ' in _run(*search, f'--rows={asked}')
  assert 'the same --split' in _run(*search, '--split=1', fails=True)


@pytest.mark.parametrize('script', ['wikipedia.pretrain', 'paper_tables'])
def test_a_folder_without_data_is_refused_with_how_to_get_it(script, tmp_path):
  """For wikipedia.search, test_runtime.py does this."""
  model = () if script == 'wikipedia.pretrain' else (f'--config.model.path={tmp_path}',)
  said = _run(script, f'--data={tmp_path}', *model, f'--out={tmp_path}/run', fails=True)
  assert 'train.jsonl.gz' in said and 'third_party/fetch.py hotpotqa' in said


def test_search_without_the_small_policy_says_how_to_make_it(tmp_path):
  done = script_lib.run('-m', 'experiments.wikipedia.search', cwd=tmp_path)
  (line,) = (done.stdout + done.stderr).splitlines()
  assert done.returncode != 0 and 'wikipedia_base/rows.json is missing' in line
  assert 'run experiments.wikipedia.pretrain' in line


def test_no_script_has_a_flag_for_a_model_beside_config_model_path():
  for path in (script_lib.ROOT / 'experiments').rglob('*.py'):
    defined = re.findall(r"DEFINE_\w+\(\s*'([\w.]+)'", path.read_text())
    assert not {'model', 'base'} & {*defined}, path


def test_an_instruct_model_is_asked_in_its_own_template(data_dir, data, tmp_path):
  config = decoder.DecoderConfig(
    vocab_size=151_936,
    embed_dim=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_dim=64,
    rope_theta=1e6,
    tie_embeddings=True,
    family='qwen3',
  )
  params = decoder.init(config, jax.random.key(0))
  tokenizer = data_dir / 'models' / 'qwen3'
  weights.save(tmp_path / 'model', config, params, tokenizer_from=tokenizer)
  _run(
    'wikipedia.search',
    *TINY,
    '--config.schedule.eval_every=0',
    f'--config.model.path={tmp_path}/model',
    f'--data={data}',
    f'--workdir={tmp_path}/run',
    '--held_out=2',
    '--watched=1',
    '--config.schedule.tasks=1',
    '--config.engine.rows=2',
    '--config.engine.prefill_rows=2',
    '--config.engine.prefill_tokens=256',
    *script_lib.one_program(slots=768),
    '--config.batch.microbatch=1',
  )
  numbers = json.loads((tmp_path / 'run' / 'table.json').read_text())
  assert [*numbers['methods']] == METHODS
  assert not any(of['errors'] for of in numbers['methods'].values())
  trained, trained_params = weights.load(tmp_path / 'run' / 'model')
  assert (trained.family, trained.tie_embeddings) == (config.family, True)
  assert jax.tree.structure(trained_params) == jax.tree.structure(params)
  # The paper's prompt in the model's own template, the tool's schema included.
  log = max((tmp_path / 'run' / 'trajectories').iterdir())
  text = log.read_text()
  assert 'Use the search tool to find the facts you need' in text
