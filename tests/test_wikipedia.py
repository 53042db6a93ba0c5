"""Training on real questions: rows, demonstrations, and the script from end to end.

Scripts run as a user runs them, in processes of their own.
"""

import dataclasses
import gzip
import json
import pathlib
import re

import jax
import pytest
import script as script_lib
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import weights
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.retrieval.documents import Document
from agent_r1_jax.tasks import qa
from experiments import train_tokenizer
from experiments.wikipedia import demos, settings

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
  passages = _passages()
  retriever = bm25.BM25(passages)
  by_title = {document.title: document for document in passages}
  find = lambda query: retriever.search([query], 5)[0]
  for row, queries in (
    (ROWS[0], [' Silent Water', ' Adam Berg']),
    (ROWS[1], [' The Red Door', ' Night Of Wolves', ' Carl Dahl', ' Emil Falk']),
  ):
    task = qa.agent_task(row)
    messages = demos.demonstrate(task, by_title, find, documents.render)
    assert messages[:1] == task.messages and qa.paper_reward(task, messages) == 1.0
    said = [m['content'] for m in messages if m['role'] == 'assistant']
    found = [call_formats.HERMES.parse(text)[0] for text in said[:-1]]
    assert [call.arguments['query'] for call in found] == queries
  elsewhere = _task('Who directed it?', 'Adam Berg', ['The Red Door'], 'bridge')
  assert demos.demonstrate(elsewhere, by_title, lambda query: [], str) is None


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


def test_a_folder_without_data_is_refused_with_how_to_get_it(tmp_path):
  """For wikipedia.search, test_runtime.py does this."""
  flags = (f'--data={tmp_path}', f'--config.model.path={tmp_path}')
  run = ('-m', 'experiments.paper_tables', *flags, f'--out={tmp_path}/run')
  done = script_lib.run(*run)
  assert done.returncode and 'train.jsonl.gz' in done.stderr
  assert 'agent-r1-jax fetch hotpotqa' in done.stderr


def test_no_script_has_a_flag_for_a_model_beside_config_model_path():
  for path in (script_lib.ROOT / 'experiments').rglob('*.py'):
    defined = re.findall(r"DEFINE_\w+\(\s*'([\w.]+)'", path.read_text())
    assert not {'model', 'base'} & {*defined}, path


def test_an_instruct_model_is_asked_in_its_own_template(data_dir, data, tmp_path):
  # Qwen3's template over few tokens: a vocabulary of 151,936 takes seconds to load.
  published = json.loads((data_dir / 'models/qwen3/tokenizer_config.json').read_text())
  texts = [document.text for document in _passages()]
  train_tokenizer.train(
    [*texts, json.dumps(qa.agent_task(ROWS[0]).messages), *tiny.TEXTS],
    vocab_size=1024,
    directory=tmp_path / 'tokenizer',
    chat_template=published['chat_template'],
  )
  config = dataclasses.replace(tiny.config('qwen3'), vocab_size=1024, tie_embeddings=True)
  params = jax.jit(decoder.init, static_argnums=0)(config, jax.random.key(0))
  weights.save(tmp_path / 'model', config, params, tokenizer_from=tmp_path / 'tokenizer')
  search = (
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
    *script_lib.one_program(slots=2048),
    '--config.batch.microbatch=1',
  )
  # Started again, the finished run scores other rows with its policy.
  asked = tmp_path / 'asked.jsonl'
  asked.write_text(json.dumps(_row('new', ROWS[0])) + '\n')
  commands = search, (*search, f'--rows={asked}')
  for count, done in zip(
    (2, 1), script_lib.run_in_turn('experiments.wikipedia.search', *commands), strict=True
  ):
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'/{count} ' in done.stdout
  run = tmp_path / 'run'
  assert (run / 'table.md').read_text().strip() in done.stdout
  numbers = json.loads((run / 'table.json').read_text())
  assert [*numbers['methods']] == METHODS
  assert numbers['recall']['recall@5'] > 0.3
  assert not any(of['errors'] for of in numbers['methods'].values())
  trained, trained_params = weights.load(run / 'model')
  assert (trained.family, trained.tie_embeddings) == (config.family, True)
  assert jax.tree.structure(trained_params) == jax.tree.structure(params)
  # The paper's prompt in the model's own template, the tool's schema included.
  log = max((run / 'trajectories').iterdir())
  assert 'Use the search tool to find the facts you need' in log.read_text()
