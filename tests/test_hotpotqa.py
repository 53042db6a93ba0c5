"""Demonstrations on real questions, and the two HotpotQA scripts from end to end.

The scripts run as a user runs them, in processes of their own.
"""

import collections
from collections.abc import Mapping
import gzip
import itertools
import json
import pathlib
import random
import re
import zipfile

import jax
import pytest
import script as script_lib

from agent_r1_jax import types
from agent_r1_jax.agent import calls
from agent_r1_jax.models import decoder, hf_config, weights
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.retrieval.documents import Document
from agent_r1_jax.tasks import qa, qa_data
from experiments import comparison
from experiments.hotpotqa import demos
from experiments.miniwiki import tasks as miniwiki

TEXTS = {
  'Hall of Dragons': 'Hall of Dragons is a supplement published by Judges Guild in 1981.',
  'Judges Guild': 'Judges Guild is a game publisher that has been active since 1976 in '
  'Decatur, Illinois.',
  'Rush (band)': 'Rush is a Canadian rock band that was formed in Toronto, Ontario in '
  '1968 by Alex Lifeson and others.',
  'Neil Peart': 'Neil Peart was a Canadian drummer, best known as the member of the rock '
  'band Rush. He was born in Hamilton, Ontario, and lived there.',
  'Calochone': 'Calochone is a genus of plants in the family Rubiaceae of Asia.',
  'Adlumia': 'Adlumia is a genus of two species in the family Papaveraceae of the North.',
}
ROWS = (
  (
    'Hall of Dragons is published by a company active since what year?',
    '1976',
    ('Judges Guild', 'Hall of Dragons'),
    'bridge',
  ),
  (
    'In what city was the band of Neil Peart formed?',
    'Toronto, Ontario',
    ('Rush (band)', 'Neil Peart'),
    'bridge',
  ),
  (
    'Are Calochone and adlumia both plants?',
    'yes',
    ('Adlumia', 'Calochone'),
    'comparison',
  ),
  ('Who rode the horse?', 'Nobody', ('Calochone', 'Neil Peart'), 'bridge'),
)


@pytest.fixture(scope='module')
def maker():
  passages = [Document(title, title, text) for title, text in TEXTS.items()]
  return demos.Maker(passages, bm25.BM25(passages))


def _task(question, answer, titles, kind):
  info = {'question': question, 'supporting_titles': list(titles), 'type': kind}
  return types.Task(question, [], [answer], info)


def _queries(messages):
  """The queries of a conversation, and the text before each."""
  seen = ''
  for message in messages:
    if message['role'] == 'assistant':
      for call in calls.parse_hermes(message['content']):
        assert isinstance(call, calls.ToolCall), call
        yield call.arguments['query'], seen
    seen += f' {message["content"]}'


def test_split_hangs_on_the_ids_alone():
  tasks = [types.Task(f'q{i}', []) for i in range(50)]
  a, b, rest = demos.split(tasks, 10, 5)
  assert [len(a), len(b), len(rest)] == [10, 5, 35]
  assert {t.id for t in [*a, *b, *rest]} == {t.id for t in tasks}
  assert demos.split(tasks[::-1], 10, 5) == [a, b, rest]
  assert demos.split(tasks, 10, 5, seed=1) != [a, b, rest]
  assert demos.split(tasks, 15)[0] == a + b
  with pytest.raises(ValueError, match=r'sizes \(30, 20\) leave nothing of 50'):
    demos.split(tasks, 30, 20)


@pytest.mark.parametrize(
  ('row', 'titles'),
  [
    (ROWS[0], ['Hall of Dragons', 'Judges Guild']),
    (ROWS[1], ['Neil Peart', 'Rush (band)']),
    (ROWS[2], ['Calochone', 'Adlumia']),
  ],
)
def test_a_right_demonstration_reads_what_it_writes(maker, row, titles):
  task = _task(*row)
  item = maker.row(task)
  assert [d.title for d in item.documents] == titles
  messages = maker.with_search(item, random.Random(0), 'right')
  assert qa.paper_reward(task, messages) == 1.0
  assert messages[0]['content'] == demos.agent_task(task).messages[0]['content']
  queries = list(_queries(messages))
  assert [q for q, _ in queries] == [
    {'Rush (band)': ' Rush', 'Adlumia': ' adlumia'}.get(title, f' {title}')
    for title in titles
  ]
  # With the space before it: the same tokens in the question, the passage and the query.
  assert all(query in seen for query, seen in queries)
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      said = re.split(r'<tool_call>|<answer>', message['content'])[0].strip()
      assert said.removesuffix('.') in ' '.join(m['content'] for m in messages[:i])
  found = [m['content'] for m in messages if m['role'] == 'tool']
  hits = [[documents.Hit(document, 0.0)] for document in item.documents]
  assert found == [documents.render(hit, demos.PASSAGE) for hit in hits]


def test_a_demonstration_quotes_what_leads_to_its_words(maker):
  messages = maker.with_search(maker.row(_task(*ROWS[0])), random.Random(0), 'right')
  said = [m['content'] for m in messages if m['role'] == 'assistant']
  assert said[0].startswith('<tool_call>')
  assert said[1].startswith('supplement published by Judges Guild.\n<tool_call>')
  assert said[2] == 'been active since 1976. <answer> 1976</answer>'


def test_a_row_without_a_way_to_the_answer_is_left_out(maker):
  assert maker.row(_task(*ROWS[3])) is None
  question, answer, _, kind = ROWS[0]
  assert maker.row(_task(question, answer, (), kind)) is None
  assert (
    maker.row(_task(question, answer, ('Hall of Dragons', 'Elsewhere'), kind)) is None
  )


def test_recall_counts_the_rows_that_name_their_passages():
  found = bm25.BM25([documents.Document('0', 'Oslo', 'A city.')])
  named = types.Task('0', [], 'x', {'question': 'Oslo?', 'supporting_titles': ['Oslo']})
  bare = types.Task('1', [], 'x', {'question': 'Who?'})
  assert comparison.recall(found, [named, bare]) == {'recall@5': 1.0, 'all in 5': 1.0}
  assert comparison.recall(found, [bare]) == {}


@pytest.mark.parametrize(
  ('fate', 'searches'),
  [('right', 2), ('stop', 1), ('query', 3), ('another', 2), ('guess', 0)],
)
def test_fates(maker, fate, searches):
  task = _task(*ROWS[0])
  item = maker.row(task)
  for seed in range(10):
    messages = maker.with_search(item, random.Random(seed), fate)
    assert len(list(_queries(messages))) == searches
    assert qa.metrics(task, messages)['em'] == (fate in ('right', 'query'))


def test_practice_is_answered_by_its_passages(maker):
  rng, made = random.Random(0), collections.Counter()
  for kind in ('cloze', 'chain', 'described', 'both') * 100:
    item = getattr(maker, kind)(rng)
    if item is None:
      continue
    made[kind] += 1
    text = ' '.join(f'{d.title} {d.text}' for d in item.documents)
    assert item.answer in ('yes', 'no') or item.answer in text
    if kind == 'chain':
      assert item.answer not in item.documents[0].text
    prompt, reply = maker.with_passages(item, rng)
    assert all(f'(Title: {d.title})' in prompt['content'] for d in item.documents)
    assert qa.extract_answer(reply['content']) == item.answer
  # 'both' needs more passages of a kind than there are here.
  assert set(made) == {'cloze', 'chain', 'described'} and min(made.values()) > 10
  questions = {maker.cloze(random.Random(i)) for i in range(99)} - {None}
  asked = {item.question: item.answer for item in questions}
  assert asked['Judges Guild has been active since what year?'] == '1976'
  assert asked['Hall of Dragons a supplement published by whom?'] == 'Judges Guild'


def test_examples_are_deterministic_and_use_no_other_row(maker):
  kinds = {k: v for k, v in demos.KINDS.items() if k != 'both'}
  tasks = [_task(*row) for row in ROWS[:2]]
  first, again, other = (
    list(itertools.islice(demos.examples(tasks, maker, seed, kinds=kinds), 600))
    for seed in (0, 0, 1)
  )
  assert first == again != other
  seen = collections.Counter(example.kind.split('/')[0] for example in first)
  assert set(seen) == set(kinds)
  assert {e.kind for e in first if e.kind.startswith('demo')} == {
    f'demonstration/{fate}' for fate in demos.MIXTURE
  }
  assert not any(ROWS[2][0] in str(example) for example in first)
  assert {e.item.question for e in first if e.kind == 'reading'} == {
    row[0] for row in ROWS[:2]
  }


def test_what_cannot_be_made_is_an_error(maker):
  with pytest.raises(ValueError, match="kinds: 'reading' cannot be made"):
    next(demos.examples([_task(*ROWS[3])], maker, 0, kinds={'reading': 1.0}))


def _write(path: pathlib.Path, rows) -> None:
  with gzip.open(path, 'wt', encoding='utf-8') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)


def _row(document: Document) -> dict:
  return {'id': document.id, 'title': document.title, 'text': document.text}


def _run(script: str, *args: str, fails: bool = False) -> str:
  """Runs an experiment's script; returns what it printed."""
  result = script_lib.run('-m', f'experiments.{script}', *args, timeout=1200)
  assert (result.returncode != 0) == fails, result.stdout + result.stderr
  return result.stdout + result.stderr


def _check_run(workdir: pathlib.Path, held_out: int) -> Mapping:
  """What a run must leave behind; returns its numbers."""
  table = (workdir / 'table.md').read_text()
  methods = ['Direct answer', 'Naive RAG', 'Base Tool Call', 'GRPO']
  numbers = json.loads((workdir / 'table.json').read_text())
  assert list(numbers['methods']) == methods
  for method in methods:
    assert f'| {method}' in table
    assert numbers['methods'][method]['status/error'] == 0.0
  assert f'/{held_out} ' in table and 'F1' in table and '±' in table
  assert set(numbers['recall']) == {'bm25', 'dense'}
  assert (workdir / 'curve.png').stat().st_size > 0
  return numbers


@pytest.fixture(scope='module')
def small_data(tmp_path_factory) -> pathlib.Path:
  """miniwiki in the layout of the real data."""
  folder = tmp_path_factory.mktemp('data')
  # Two kinds of thing to compare; what miniwiki is of has names alone.
  kinds = [
    Document(f'{noun}-{i}', f'{noun.title()} {i}', f'{noun.title()} {i} is a {noun}.')
    for noun in ('river', 'castle')
    for i in range(6)
  ]
  corpus = [*miniwiki.corpus(0, 'dev')[:900], *kinds]
  _write(folder / 'corpus.jsonl.gz', map(_row, corpus))
  tasks = miniwiki.test_set('miniwiki-hotpot', 60, 0, 'dev')
  rows = [
    {
      'id': task.id,
      'question': task.info['question'],
      'golden_answers': task.answer,
      'type': task.info['kind'],
      'supporting_titles': task.info['chain'],
    }
    for task in tasks
  ]
  _write(folder / 'train.jsonl.gz', rows)
  return folder


def test_base_and_search(small_data, tmp_path):
  shared = (f'--data={small_data}', '--held_out=6', '--watched=3')
  size = ('--vocab=700', '--dim=96', '--layers=2')
  sft = ('--sft.steps=4', '--sft.rows=2', '--sft.warmup=1', '--sft.row_tokens=512')
  _run('hotpotqa.pretrain', *shared, *size, *sft, f'--out={tmp_path}/base')
  known = set(json.loads((tmp_path / 'base' / 'rows.json').read_text()))
  tasks = qa_data.load(small_data / 'train.jsonl.gz')
  held_out, _, rest = demos.split(tasks, 6, 3)
  assert known == {task.id for task in rest}

  search = (
    '--config.schedule.steps=1',
    '--config.schedule.tasks=2',
    '--config.schedule.samples=2',
    '--config.engine.rows=4',
    '--config.engine.prefill_rows=4',
    *script_lib.one_program(slots=640),
    '--config.batch.microbatch=2',
    '--config.limits.max_turn_tokens=16',
  )
  search += (f'--config.model.path={tmp_path}/base/model', f'--workdir={tmp_path}/run')
  search += ('--retriever=dense', '--config.alarms.entropy=0.01')
  first = _run('hotpotqa.search', *shared, *search)
  assert 'nothing that it depends on' not in first
  numbers = _check_run(tmp_path / 'run', 6)
  assert min(r['recall@5'] for r in numbers['recall'].values()) > 0.3
  assert hf_config.read(tmp_path / 'run' / 'model').embed_dim == 96
  # The small policy is known by its rows, and trained as such.
  config = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert (
    config['alarms']['entropy'] == 0.01 and config['optimizer']['learning_rate'] == 3e-4
  )

  # Started again, the finished run plays nothing, and the tables are the same.
  table = (tmp_path / 'run' / 'table.md').read_text()
  again = _run('hotpotqa.search', *shared, *search)
  for method in ('Direct answer', 'Naive RAG', 'Base Tool Call', 'GRPO'):
    assert f'{method}: as in {tmp_path}/run/results.jsonl' in again
  lines = (tmp_path / 'run' / 'results.jsonl').read_text().splitlines()
  assert [json.loads(line)['method'] for line in lines] == [*numbers['methods']]
  before, after = table, (tmp_path / 'run' / 'table.md').read_text()
  assert after.split('seconds')[0] == before.split('seconds')[0]

  seen = _run('hotpotqa.search', *shared, *search, '--split=1', fails=True)
  assert 'has seen' in seen and 'the same --split' in seen
  none = _run('hotpotqa.search', *shared, *search, '--types=none', fails=True)
  assert '--types=none: no row is of these types' in none


@pytest.mark.parametrize('script', ['hotpotqa.pretrain', 'paper_tables'])
def test_missing_data_says_what_it_is_and_how_to_get_it(script, tmp_path):
  """For hotpotqa.search, test_runtime.py does this."""
  model = () if script == 'hotpotqa.pretrain' else (f'--config.model.path={tmp_path}',)
  said = _run(script, f'--data={tmp_path}', *model, f'--out={tmp_path}/run', fails=True)
  assert 'corpus.jsonl.gz' in said and 'train.jsonl.gz' in said
  assert 'third_party/fetch.py hotpotqa' in said


def test_a_missing_small_policy_says_how_to_make_it(tmp_path):
  done = script_lib.run('-m', 'experiments.hotpotqa.search', cwd=tmp_path)
  said = done.stdout + done.stderr
  assert done.returncode != 0 and 'hotpotqa_base/rows.json is missing' in said
  assert 'run experiments.hotpotqa.pretrain' in said and '--config.model.path=DIR' in said
  assert len(said.splitlines()) == 1


@pytest.mark.parametrize('path', sorted((script_lib.ROOT / 'experiments').rglob('*.py')))
def test_there_is_one_way_to_name_a_model(path):
  defined = re.findall(r"DEFINE_\w+\(\s*'([\w.]+)'", path.read_text())
  assert 'model' not in defined and 'base' not in defined
  if path.stem == 'compile_for':
    assert 'config.model.path' in defined


@pytest.fixture(scope='module')
def real_data(data_dir, tmp_path_factory) -> pathlib.Path:
  """Some questions of HotpotQA, their passages and a few hundred others."""
  folder = tmp_path_factory.mktemp('hotpotqa')
  source = data_dir / 'hotpotqa'
  rows = [row for _, row in documents.read_rows(source / 'train.jsonl.gz')][:12]
  gold = {title for row in rows for title in row['supporting_titles']}
  corpus = documents.read_corpus(source / 'corpus.jsonl.gz')
  kept = [d for i, d in enumerate(corpus) if d.title in gold or i % 100 == 0]
  _write(folder / 'corpus.jsonl.gz', map(_row, kept))
  _write(folder / 'train.jsonl.gz', rows)
  return folder


def test_an_instruct_model_runs_unchanged(data_dir, real_data, tmp_path):
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
  sizes = (
    '--config.engine.rows=2',
    '--config.engine.prefill_rows=2',
    '--config.engine.prefill_tokens=256',
    *script_lib.one_program(slots=1536),
    '--config.batch.microbatch=1',
    '--config.limits.max_turn_tokens=16',
    '--config.schedule.steps=1',
    '--config.schedule.tasks=1',
    '--config.schedule.samples=2',
  )
  _run(
    'hotpotqa.search',
    f'--config.model.path={tmp_path}/model',
    f'--data={real_data}',
    f'--workdir={tmp_path}/run',
    '--held_out=3',
    '--watched=1',
    *sizes,
  )
  _check_run(tmp_path / 'run', 3)
  trained, trained_params = weights.load(tmp_path / 'run' / 'model')
  assert (trained.family, trained.tie_embeddings) == (config.family, True)
  assert jax.tree.structure(trained_params) == jax.tree.structure(params)
  # The paper's prompt in the model's own template, the tool's schema included.
  log = max((tmp_path / 'run' / 'trajectories').iterdir())
  with zipfile.ZipFile(log) as archive:
    text = ' '.join(archive.read(name).decode() for name in archive.namelist())
  assert 'Use the search tool to find the facts you need' in text
