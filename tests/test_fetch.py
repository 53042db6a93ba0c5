"""The fetcher verifies, extracts and converts what a server on this machine sends."""

import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import os
import pathlib
import stat
import subprocess
import sys
import tarfile
import threading
import zipfile

import pytest

from agent_r1_jax.tasks import qa_data

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / 'third_party' / 'fetch.py'
_spec = importlib.util.spec_from_file_location('fetch', SCRIPT)
assert _spec and _spec.loader
fetch = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fetch)

CONTENT = bytes(range(256)) * 40
OTHER = CONTENT[::-1]
SUM = hashlib.sha256(CONTENT).hexdigest()
COMMIT = '0123456789' * 4
UNVERIFIED = 'could not be verified'


class _Handler(http.server.BaseHTTPRequestHandler):
  """/cut ends early at first, /page is HTML, /served/NAME is SERVED[NAME]."""

  requests: list[tuple[str, str]] = []
  served: dict[str, bytes] = {}
  content = CONTENT

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    self.requests.append((self.path, self.command))
    content = self.content
    if self.path.startswith('/served/'):
      content = self.served.get(self.path.removeprefix('/served/'))
    if self.path == '/missing' or content is None:
      return self.send_error(404)
    self.send_response(200)
    kind = 'text/html' if self.path == '/page' else 'application/octet-stream'
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(len(content)))
    # What the hub's library asks for.
    self.send_header('ETag', f'"{hashlib.md5(content).hexdigest()}"')
    self.send_header('X-Repo-Commit', COMMIT)
    self.end_headers()
    cut = self.path == '/cut' and len(self.requests) == 1
    if self.command == 'GET':
      self.wfile.write(content[:5000] if cut else content)

  def log_message(self, *_):
    pass


@pytest.fixture(scope='module')
def address():
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Handler) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    thread.join()


def _entry(files, **rest):
  return {
    'what': 'w',
    'version': '1',
    'licence': 'MIT',
    'home': 'h',
    **rest,
    'files': files,
  }


@pytest.fixture
def run(address, tmp_path, capsys, monkeypatch):
  """Runs the command on a manifest with one file; returns its status and what it said."""
  _Handler.requests.clear()
  monkeypatch.setattr(_Handler, 'content', CONTENT)

  def command(*arguments, url='/whole', sha256: str | None = SUM, path='a/data.bin'):
    manifest = tmp_path / 'manifest.json'
    if not manifest.exists():
      url = url if '://' in url else address + url
      file = {'path': path, 'url': url, 'sha256': sha256}
      manifest.write_text(json.dumps({'entries': {'thing': _entry([file])}}))
    status = fetch.main([*arguments, f'--manifest={manifest}', f'--to={tmp_path}'])
    captured = capsys.readouterr()
    return status, captured.out + captured.err

  return command


def test_a_known_file_is_verified_and_kept(run, tmp_path):
  status, said = run('thing')
  assert status == 0 and 'licence MIT' in said and 'TRUSTED' not in said
  assert (tmp_path / 'thing' / 'a' / 'data.bin').read_bytes() == CONTENT
  status, said = run('thing')
  assert status == 0 and 'a/data.bin is there, with the sum of the manifest' in said
  assert len(_Handler.requests) == 1
  assert not (tmp_path / 'sums.json').exists()
  assert [p.name for p in (tmp_path / 'thing' / 'a').iterdir()] == ['data.bin']


def test_a_damaged_file_is_fetched_again(run, tmp_path):
  run('thing')
  (tmp_path / 'thing' / 'a' / 'data.bin').write_bytes(b'damaged')
  status, said = run('thing')
  assert status == 0 and 'does not have the sum of the manifest: fetched again' in said
  assert (tmp_path / 'thing' / 'a' / 'data.bin').read_bytes() == CONTENT


def test_another_sum_is_refused_and_nothing_kept(run, tmp_path):
  status, said = run('thing', sha256='0' * 64)
  assert status == 1 and f'has the sha256 {SUM} and not {"0" * 64} (the manifest)' in said
  assert not (tmp_path / 'thing' / 'a' / 'data.bin').exists()
  assert not list(tmp_path.rglob('*.part'))


def test_an_unknown_sum_is_trusted_once_and_aloud(run, tmp_path, monkeypatch):
  status, said = run('thing', sha256=None)
  assert status == 0
  assert 'TRUSTED ON FIRST USE' in said and SUM in said and 'can change' in said
  known = json.loads((tmp_path / 'sums.json').read_text())
  assert known['thing/a/data.bin']['sha256'] == SUM
  # Of the checkout, nothing is changed.
  assert 'null' in (tmp_path / 'manifest.json').read_text()
  status, said = run('thing')
  assert status == 0 and 'is there, with the sum of' in said and 'TRUSTED' not in said
  # Somebody puts another file to the address, and ours is lost.
  (tmp_path / 'thing' / 'a' / 'data.bin').unlink()
  monkeypatch.setattr(_Handler, 'content', OTHER)
  status, said = run('thing')
  assert status == 1 and f'and not {SUM} ({tmp_path}/sums.json, since ' in said
  assert not (tmp_path / 'thing' / 'a' / 'data.bin').exists()


def test_another_address_is_another_file(run, address, tmp_path):
  run('thing', sha256=None)
  manifest = tmp_path / 'manifest.json'
  manifest.write_text(manifest.read_text().replace('/whole', '/plain'))
  status, said = run('thing')
  assert status == 0 and 'TRUSTED ON FIRST USE' in said


def test_strict_refuses_an_unknown_sum_before_anything_is_fetched(run):
  status, said = run('thing', '--strict', sha256=None)
  assert status == 1 and 'knows no sha256 of a/data.bin' in said
  assert _Handler.requests == []


def test_strict_takes_a_known_sum(run):
  assert run('thing', '--strict')[0] == 0


def test_a_file_that_was_put_there_is_taken_and_recorded(run, tmp_path):
  place = tmp_path / 'thing' / 'a' / 'data.bin'
  place.parent.mkdir(parents=True)
  place.write_bytes(OTHER)
  status, said = run('thing', sha256=None)
  assert status == 0 and 'what was in its place already could not be verified' in said
  assert _Handler.requests == [] and place.read_bytes() == OTHER
  place.write_bytes(CONTENT)  # Not what was trusted: fetched again, and refused.
  status, said = run('thing')
  assert status == 1 and f'the sha256 {SUM} and not' in said


def test_damaged_sums_are_never_forgotten(run, tmp_path):
  (tmp_path / 'sums.json').write_text('{')
  status, said = run('thing')
  assert status == 1 and 'sums.json is no JSON' in said and _Handler.requests == []


def test_a_cut_download_is_refused_and_begins_again(run, tmp_path):
  status, said = run('thing', url='/cut', sha256=None)
  assert status == 1 and 'ended after 5000 of 10240 bytes' in said
  assert not (tmp_path / 'sums.json').exists()
  assert run('thing')[0] == 0
  assert (tmp_path / 'thing' / 'a' / 'data.bin').read_bytes() == CONTENT


def test_the_hub_is_asked_for_the_commit_and_its_files_are_checked(address, tmp_path):
  """By its library, against a server that answers as the hub does."""
  entry = _entry(
    [{'path': 'a/data.bin', 'sha256': SUM}, {'path': 'b.txt', 'sha256': None}],
    hub={'repo': 'me/it', 'type': 'dataset'},
    version=COMMIT,
  )
  (tmp_path / 'manifest.json').write_text(json.dumps({'entries': {'it': entry}}))

  home = {'HF_HOME': str(tmp_path / 'home')}  # The library caches something there.

  def command(offline='0'):
    done = subprocess.run(
      [sys.executable, SCRIPT, 'it', f'--manifest={tmp_path}/manifest.json']
      + [f'--to={tmp_path}'],
      env=os.environ | home | {'HF_ENDPOINT': address, 'HF_HUB_OFFLINE': offline},
      capture_output=True,
      text=True,
    )
    return done.returncode, done.stdout + done.stderr

  status, said = command(offline='1')
  assert status == 1 and 'locate the file on the Hub' in said
  for path in ('a/data.bin', 'b.txt'):
    assert f'datasets/me/it/resolve/{COMMIT}/{path}\n    to {tmp_path}/it/{path}' in said
  _Handler.requests.clear()
  status, said = command()
  assert status == 0 and f'b.txt, so what huggingface.co sent {UNVERIFIED}' in said, said
  assert {path for path, _ in _Handler.requests} >= {
    f'/datasets/me/it/resolve/{COMMIT}/{path}' for path in ('a/data.bin', 'b.txt')
  }
  known = json.loads((tmp_path / 'sums.json').read_text())['it/b.txt']
  assert (known['sha256'], known['bytes']) == (SUM, len(CONTENT))
  found = {str(p.relative_to(tmp_path / 'it')) for p in (tmp_path / 'it').rglob('*.*')}
  assert found == {'a/data.bin', 'b.txt'}
  (tmp_path / 'it' / 'b.txt').write_bytes(OTHER)
  status, said = command()
  assert status == 0 and 'b.txt does not have the sum of' in said
  assert (tmp_path / 'it' / 'b.txt').read_bytes() == CONTENT


def test_answers_that_are_no_file(run):
  status, said = run('thing', url='/missing')
  assert status == 1 and 'answered 404' in said


def test_a_server_that_is_not_there(run, tmp_path):
  status, said = run('thing', url='http://127.0.0.1:1/x')
  assert status == 1 and '127.0.0.1 cannot be reached' in said
  assert f'http://127.0.0.1:1/x\n    to {tmp_path}/thing/a/data.bin' in said


def test_a_web_page_is_never_recorded(run, tmp_path):
  status, said = run('thing', url='/page', sha256=None)
  assert status == 1 and 'answered with a web page' in said
  assert not (tmp_path / 'sums.json').exists()


def test_names_paths_and_addresses_that_are_wrong(run, tmp_path):
  status, said = run('thong', path='../x')
  assert status == 1 and '../x is outside of its folder' in said
  (tmp_path / 'manifest.json').unlink()
  status, said = run('thing', url='file:///etc/passwd')
  assert status == 1 and 'file:///etc/passwd is no http(s) address' in said
  hub = _entry([], hub={'repo': 'me/it', 'type': 'model'}, version='main')
  manifest = json.dumps({'entries': {'thing': hub}})
  (tmp_path / 'manifest.json').write_text(manifest)
  assert 'the version main is no commit' in run('thing')[1]


def _zip(**members: bytes) -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, 'w') as archive:
    for name, content in members.items():
      info = zipfile.ZipInfo(name.removesuffix('->'))
      info.external_attr = (stat.S_IFLNK if name.endswith('->') else stat.S_IFREG) << 16
      archive.writestr(info, content)
  return out.getvalue()


def _tar(**members: bytes) -> bytes:
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w:gz') as archive:
    for name, content in members.items():
      info = tarfile.TarInfo(name.removesuffix('->'))
      if name.endswith('->'):
        info.type, info.linkname, content = tarfile.SYMTYPE, content.decode(), b''
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  return out.getvalue()


@pytest.mark.parametrize(('make', 'suffix'), [(_zip, '.zip'), (_tar, '.tar.gz')])
def test_archives_are_extracted_once_and_again_when_they_change(
  run, tmp_path, monkeypatch, make, suffix
):
  monkeypatch.setitem(_Handler.served, 'x', make(**{'in/a.txt': b'one'}))
  status, said = run('thing', url='/served/x', sha256=None, path=f'data{suffix}')
  assert status == 0 and 'extracted to' in said
  found = tmp_path / 'thing' / 'data.extracted' / 'in' / 'a.txt'
  assert found.read_bytes() == b'one'
  status, said = run('thing')
  assert status == 0 and 'extracted to' not in said
  (tmp_path / 'sums.json').unlink()
  (tmp_path / 'thing' / f'data{suffix}').unlink()
  monkeypatch.setitem(_Handler.served, 'x', make(**{'in/a.txt': b'two'}))
  assert run('thing')[0] == 0 and found.read_bytes() == b'two'


@pytest.mark.parametrize(('make', 'suffix'), [(_zip, '.zip'), (_tar, '.tar.gz')])
@pytest.mark.parametrize(
  'name', ['../out', '/tmp/out-of-it', 'a/../../out', 'link->', '', '.']
)
def test_archives_do_not_leave_their_folder(
  run, tmp_path, monkeypatch, make, suffix, name
):
  archive = make(**{'good.txt': b'good', name: b'../../..'})
  monkeypatch.setitem(_Handler.served, 'x', archive)
  status, said = run('thing', url='/served/x', sha256=None, path=f'data{suffix}')
  assert status == 1 and 'nothing is extracted' in said
  there = {p.name for p in tmp_path.rglob('*')}
  assert there == {'manifest.json', 'sums.json', 'thing', f'data{suffix}'}


@pytest.mark.parametrize('suffix', ['.zip', '.tar.gz'])
def test_damaged_archives_are_named(run, monkeypatch, suffix):
  content = (_zip if suffix == '.zip' else _tar)(a=b'x' * 9000)[:-90]
  monkeypatch.setitem(_Handler.served, 'x', content)
  status, said = run('thing', url='/served/x', sha256=None, path=f'data{suffix}')
  assert status == 1 and f'data{suffix} is damaged' in said


def test_damage_anywhere_is_named(tmp_path):
  """A changed byte does no harm, or the error names the archive; 1 is "encrypted"."""
  compressed = io.BytesIO()
  with zipfile.ZipFile(compressed, 'w', zipfile.ZIP_LZMA) as archive:
    archive.writestr('a.txt', b'hello ' * 50)
  named = 0
  for suffix, sound in {
    '.zip': compressed.getvalue(),
    '.tar.gz': _tar(a=b'hello ' * 50),
  }.items():
    for position, value in itertools.product(range(len(sound)), (1, 99, 255)):
      path = tmp_path / f'{position}-{value}{suffix}'
      path.write_bytes(sound[:position] + bytes([value]) + sound[position + 1 :])
      try:
        fetch._extract(path)
      except (ValueError, OSError) as error:
        assert str(path) in str(error)
        named += 1
  assert named > 100


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
    'data_ids_april7.zip': _zip(
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
    'musique_v1.0.zip': _zip(
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
      monkeypatch.setitem(_Handler.served, f'{name}/{file["path"]}', files[file['path']])
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
  assert f'launch/local.sh wikipedia.search --data={folder}' in said

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
  monkeypatch.setitem(_Handler.served, place, _array(rows))
  arguments = ['hotpotqa', f'--manifest={project}', f'--to={tmp_path}']
  assert fetch.main(arguments) == 0
  said = capsys.readouterr().out
  assert '99 train' in said and 'left out: ' in said and "row 8: 'answer' is ' '" in said
  rows[9] = rows[8]
  monkeypatch.setitem(_Handler.served, place, _array(rows))
  arguments[-1] = f'--to={tmp_path}/other'
  assert fetch.main(arguments) == 1
  assert '2 of 100 rows are broken' in capsys.readouterr().err
  assert not (tmp_path / 'other' / 'hotpotqa' / 'train.jsonl.gz').exists()


@pytest.mark.parametrize('command', [[str(SCRIPT)], [sys.executable, str(SCRIPT)]])
def test_both_ways_to_call_it_list_what_there_is(command, tmp_path):
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert 'hotpotqa\n' in done.stdout and 'licence: CC BY-SA 4.0' in done.stdout
  assert 'third_party/fetch.py NAME' in done.stdout
  helped = subprocess.run([*command, '--help'], capture_output=True, text=True)
  assert helped.returncode == 0 and '--strict' in helped.stdout


def test_git_knows_that_it_is_executable():
  listed = subprocess.run(
    ['git', 'ls-files', '-s', 'third_party/fetch.py'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  if listed.returncode or not listed.stdout:
    pytest.skip('this is no checkout of git')
  assert listed.stdout.startswith('100755 ')


def test_an_old_python_finds_a_newer_one(tmp_path):
  """The file is read by an interpreter that says it is 3.8; python3.12 is on the PATH."""
  (tmp_path / 'third_party').mkdir()
  for name in ('fetch.py', 'manifest.json'):
    (tmp_path / 'third_party' / name).write_bytes((SCRIPT.parent / name).read_bytes())
  newer = tmp_path / 'python3.12'
  newer.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  newer.chmod(0o755)
  code = (
    'import runpy, sys; sys.version_info = (3, 8, 18); sys.argv = ["fetch.py"]; '
    f'runpy.run_path({str(tmp_path / "third_party/fetch.py")!r}, run_name="__main__")'
  )
  command = [sys.executable, '-c', code]
  environment = os.environ | {'PATH': str(tmp_path)}
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert done.returncode == 0 and 'hotpotqa' in done.stdout, done.stderr
  newer.unlink()
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert done.returncode != 0 and '3.11 or later is needed' in done.stderr


def test_without_the_environment_it_says_how_to_convert(
  project, tmp_path, capsys, monkeypatch
):
  monkeypatch.setitem(sys.modules, 'agent_r1_jax.tasks.qa_convert', None)
  monkeypatch.delattr('agent_r1_jax.tasks.qa_convert', raising=False)
  assert fetch.main(['musique', f'--manifest={project}', f'--to={tmp_path}']) == 1
  said = capsys.readouterr()
  assert 'musique_v1.0.zip: extracted' in said.out and 'make .venv/installed' in said.err


def test_the_list_and_an_unknown_name(capsys):
  assert fetch.main([]) == 0
  listed = capsys.readouterr().out
  for name in (
    'hotpotqa',
    '2wikimultihopqa',
    'musique',
    'qwen2.5-3b-instruct',
    'wiki-18',
  ):
    assert f'{name}\n' in listed
  assert fetch.main(['imagenet']) == 1
  assert "no entry 'imagenet'; there are hotpotqa," in capsys.readouterr().err


def test_the_project_manifest_is_complete():
  entries = fetch.read_manifest(ROOT / 'third_party' / 'manifest.json')['entries']
  for name, entry in entries.items():
    paths = [file['path'] for file in entry['files']]
    assert len(set(paths)) == len(paths) > 0, name
    assert entry['licence'] and entry['version'], name
