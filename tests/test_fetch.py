"""The fetcher verifies what comes, from a server on this machine."""

import hashlib
import http.server
import importlib.util
import json
import pathlib
import threading

import pytest

ROOT = pathlib.Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location('fetch', ROOT / 'third_party' / 'fetch.py')
assert _spec and _spec.loader
fetch = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fetch)

CONTENT = bytes(range(256)) * 40
SUM = hashlib.sha256(CONTENT).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
  """/whole knows ranges, /plain does not, /cut ends early at first, /page is HTML."""

  requests: list[tuple[str, str | None]] = []

  def do_GET(self):
    wanted = self.headers.get('Range')
    self.requests.append((self.path, wanted))
    if self.path == '/missing':
      return self.send_error(404)
    start = 0
    if wanted and self.path != '/plain':
      start = int(wanted.removeprefix('bytes=').removesuffix('-'))
      if start >= len(CONTENT):
        return self.send_error(416)
    body = CONTENT[start:]
    self.send_response(206 if start else 200)
    kind = 'text/html' if self.path == '/page' else 'application/octet-stream'
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body[:5000] if self.path == '/cut' and not start else body)

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


@pytest.fixture
def run(address, tmp_path, capsys):
  """Runs the command on a manifest with one file; returns its status and what it said."""
  _Handler.requests.clear()

  def command(*arguments, url='/whole', sha256: str | None = SUM, path='a/data.bin'):
    manifest = tmp_path / 'manifest.json'
    if not manifest.exists():
      file = {'path': path, 'url': address + url, 'sha256': sha256}
      entry = {
        'what': 'w',
        'version': '1',
        'licence': 'MIT',
        'home': 'h',
        'files': [file],
      }
      manifest.write_text(json.dumps({'entries': {'thing': entry}}))
    status = fetch.main([*arguments, f'--manifest={manifest}', f'--to={tmp_path}'])
    captured = capsys.readouterr()
    return status, captured.out + captured.err

  return command


def test_a_known_file_is_verified_and_kept(run, tmp_path):
  status, said = run('thing')
  assert status == 0 and 'licence MIT' in said
  assert (tmp_path / 'thing' / 'a' / 'data.bin').read_bytes() == CONTENT
  status, said = run('thing')
  assert status == 0 and 'a/data.bin is there' in said
  assert len(_Handler.requests) == 1


def test_a_damaged_file_is_fetched_again(run, tmp_path):
  run('thing')
  (tmp_path / 'thing' / 'a' / 'data.bin').write_bytes(b'damaged')
  assert run('thing')[0] == 0
  assert (tmp_path / 'thing' / 'a' / 'data.bin').read_bytes() == CONTENT


def test_another_sum_is_refused_and_nothing_kept(run, tmp_path):
  status, said = run('thing', sha256='0' * 64)
  assert status == 1 and f'has the sha256 {SUM} and not {"0" * 64}' in said
  assert [p.name for p in (tmp_path / 'thing' / 'a').iterdir()] == []


def test_an_unknown_sum_is_refused_unless_recorded(run, tmp_path):
  status, said = run('thing', sha256=None)
  assert status == 1 and 'a/data.bin is not known' in said and '--record' in said
  assert _Handler.requests == []
  assert run('thing', '--record')[0] == 0
  manifest = json.loads((tmp_path / 'manifest.json').read_text())
  assert manifest['entries']['thing']['files'][0]['sha256'] == SUM
  assert run('thing')[0] == 0


def test_record_does_not_overwrite_a_known_sum(run):
  assert run('thing', '--record', sha256='0' * 64)[0] == 1


def test_a_cut_download_goes_on(run, tmp_path):
  status, said = run('thing', url='/cut')
  assert status == 1 and 'ended after 5000 of 10240 bytes' in said
  assert run('thing')[0] == 0
  assert _Handler.requests == [('/cut', None), ('/cut', 'bytes=5000-')]
  assert (tmp_path / 'thing' / 'a' / 'data.bin').read_bytes() == CONTENT


@pytest.mark.parametrize(('url', 'have'), [('/plain', 5000), ('/whole', 10240)])
def test_servers_without_ranges_and_parts_that_are_complete(run, tmp_path, url, have):
  part = tmp_path / 'thing' / 'a' / 'data.bin.part'
  part.parent.mkdir(parents=True)
  part.write_bytes(CONTENT[:have])
  assert run('thing', url=url)[0] == 0
  assert part.with_suffix('').read_bytes() == CONTENT


def test_answers_that_are_no_file(run):
  status, said = run('thing', url='/missing')
  assert status == 1 and 'answered 404' in said


def test_a_web_page_is_never_recorded(run, tmp_path):
  status, said = run('thing', '--record', url='/page', sha256=None)
  assert status == 1 and 'answered with a web page' in said
  assert 'null' in (tmp_path / 'manifest.json').read_text()


def test_names_and_paths_that_are_wrong(run):
  status, said = run('thong', path='../x')
  assert status == 1 and '../x is outside of its folder' in said


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
    assert f'{name} ' in listed
  assert fetch.main(['imagenet']) == 1
  assert "no entry 'imagenet'; there are hotpotqa," in capsys.readouterr().err


def test_the_project_manifest_is_complete():
  entries = fetch.read_manifest(ROOT / 'third_party' / 'manifest.json')['entries']
  for name, entry in entries.items():
    paths = [file['path'] for file in entry['files']]
    assert len(set(paths)) == len(paths) > 0, name
    assert entry['licence'] and entry['version'], name
