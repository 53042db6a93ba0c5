"""The fetcher converts the official files of questions to what --data takes."""

import json
import sys

import downloads
from downloads import ROOT, Handler, fetch, make_zip
import pytest

from agent_r1_jax.tasks import qa_data

address = downloads.address

HOTPOT = [
  {
    '_id': f'h{i}',
    'question': f'Is Ann {i} older than Bo?',
    'answer': 'yes',
    'type': 'comparison',
    'level': 'hard',
    'supporting_facts': [[f'Ann {i}', 0], ['Bo', 1], [f'Ann {i}', 2]],
    'context': [
      [f'Ann {i}', ['Ann is 9.', ' She sings.']],
      ['Bo', ['Bo is 8.']],
      ['No', []],
    ],
  }
  for i in range(3)
]
TWO_WIKI = [
  row | {'_id': f'w{i}', 'answer_id': f'Q{i}', 'evidences': [['Ann', 'born', 'Oslo']]}
  for i, row in enumerate(HOTPOT)
]
MUSIQUE = [
  {
    'id': f'3hop1__{i}_2_3',
    'question': 'Who leads the city of Ann?',
    'answer': 'Bo Lie',
    'answer_aliases': ['Lie'],
    'answerable': True,
    'paragraphs': [
      {'idx': 0, 'title': 'Ann', 'paragraph_text': 'Of Oslo.', 'is_supporting': True},
      {'idx': 1, 'title': 'Eve', 'paragraph_text': f'Sings {i}.', 'is_supporting': False},
    ],
    'question_decomposition': [
      {'id': 1, 'question': 'Ann >> city', 'answer': 'Oslo', 'paragraph_support_idx': 0}
    ],
  }
  for i in range(3)
]
ALIASES = '\n'.join(
  json.dumps({'Q_id': f'Q{i}', 'aliases': [f'aye {i}'], 'demonyms': []}) for i in range(3)
).encode()
_lines = lambda rows: '\n'.join(map(json.dumps, rows)).encode()
_array = lambda rows: json.dumps(rows).encode()
OFFICIAL = {
  'hotpotqa': {
    'hotpot_train_v1.1.json': _array(HOTPOT[:2]),
    'hotpot_dev_distractor_v1.json': _array(HOTPOT[2:]),
  },
  '2wikimultihopqa': {
    'data_ids_april7.zip': make_zip(
      **{
        'data_ids/train.json': _array(TWO_WIKI[:2]),
        'data_ids/dev.json': _array(TWO_WIKI[2:]),
        'data_ids/test.json': b'[]',
        'data_ids/id_aliases.json': ALIASES,
        '__MACOSX/data_ids/._train.json': b'rubbish',
      }
    )
  },
  'musique': {
    'musique_v1.0.zip': make_zip(
      **{
        'data/musique_ans_v1.0_train.jsonl': _lines(MUSIQUE[:2]),
        'data/musique_ans_v1.0_dev.jsonl': _lines(MUSIQUE[2:]),
        'data/musique_full_v1.0_train.jsonl': b'{}',
      }
    )
  },
}


@pytest.fixture
def project(address, tmp_path, monkeypatch):
  """The project's own manifest, with the addresses of this machine's server."""
  manifest = json.loads((ROOT / 'third_party' / 'manifest.json').read_text())
  for name, files in OFFICIAL.items():
    entry = manifest['entries'][name]
    assert {file['path'] for file in entry['files']} == {*files}
    for file in entry['files']:
      file['url'] = f'{address}/served/{name}/{file["path"]}'
      monkeypatch.setitem(Handler.served, f'{name}/{file["path"]}', files[file['path']])
  path = tmp_path / 'manifest.json'
  path.write_text(json.dumps(manifest))
  return path


@pytest.mark.parametrize('name', OFFICIAL)
def test_official_files_end_as_what_data_takes(name, project, tmp_path, capsys):
  arguments = [name, f'--manifest={project}', f'--to={tmp_path}']
  assert fetch.main(arguments) == 0
  said = capsys.readouterr().out
  folder = tmp_path / name
  assert '2 train, 1 dev questions' in said
  assert f'agent-r1-jax experiments.wikipedia.search --data={folder}' in said

  corpus, questions = qa_data.find(folder)
  tasks = [t for s in ('train', 'dev') for t in qa_data.read_questions(folder, s)]
  assert tasks == qa_data.load(questions) + qa_data.load(folder / 'dev.jsonl.gz')
  (tmp_path / 'official').write_bytes(
    _lines({'hotpotqa': HOTPOT, '2wikimultihopqa': TWO_WIKI, 'musique': MUSIQUE}[name])
  )
  official = qa_data.load(tmp_path / 'official')
  if name == '2wikimultihopqa':
    (tmp_path / 'aliases').write_bytes(ALIASES)
    official = qa_data.add_aliases(official, tmp_path / 'aliases')
    assert tasks[1].answer == ['yes', 'aye 1']
  assert [task.info.pop('origin') for task in tasks] == ['train', 'train', 'dev']
  passages = {d.id: d for d in qa_data.documents.read_corpus(corpus)}
  assert {(d.title, d.text) for d in passages.values()} == {
    passage
    for where, row in qa_data.documents.read_rows(tmp_path / 'official')
    for passage in qa_data.contexts(where, row)
  }
  for task, other in zip(tasks, official, strict=True):
    gold = [passages[id].title for id in task.info.pop('supporting_ids')]
    assert gold == task.info['supporting_titles']
    if name == 'musique':
      assert task.info.pop('type') == '3hop1'
    assert task == other

  # Once more: nothing is fetched or made again, and the commands are there.
  before = questions.stat().st_mtime_ns
  assert fetch.main(arguments) == 0
  said = capsys.readouterr().out
  assert 'is converted' in said and f'--data={folder}' in said and 'TRUSTED' not in said
  assert questions.stat().st_mtime_ns == before


def test_broken_rows_are_left_out_and_named(project, tmp_path, capsys, monkeypatch):
  rows = [row | {'_id': f'{row["_id"]}-{i}'} for i in range(100) for row in HOTPOT[:1]]
  rows[7] = rows[7] | {'answer': ' '}
  place = 'hotpotqa/hotpot_train_v1.1.json'
  monkeypatch.setitem(Handler.served, place, _array(rows))
  arguments = ['hotpotqa', f'--manifest={project}', f'--to={tmp_path}']
  assert fetch.main(arguments) == 0
  said = capsys.readouterr().out
  assert '99 train' in said and 'left out: ' in said and "row 8: 'answer' is ' '" in said
  rows[9] = rows[8]
  monkeypatch.setitem(Handler.served, place, _array(rows))
  arguments[-1] = f'--to={tmp_path}/other'
  assert fetch.main(arguments) == 1
  assert '2 of 100 rows are broken' in capsys.readouterr().err
  assert not (tmp_path / 'other' / 'hotpotqa' / 'train.jsonl.gz').exists()


def test_without_the_environment_it_says_how_to_convert(
  project, tmp_path, capsys, monkeypatch
):
  monkeypatch.setitem(sys.modules, 'convert_questions', None)
  assert fetch.main(['musique', f'--manifest={project}', f'--to={tmp_path}']) == 1
  said = capsys.readouterr()
  assert 'musique_v1.0.zip: extracted' in said.out and 'make .venv/installed' in said.err
