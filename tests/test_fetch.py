"""The fetcher verifies, extracts and converts what a server on this machine sends."""

import io
import itertools
import json
import os
import subprocess
import sys
import zipfile

import downloads
from downloads import (
  COMMIT,
  CONTENT,
  OTHER,
  ROOT,
  SCRIPT,
  SUM,
  UNVERIFIED,
  Handler,
  fetch,
  make_tar,
  make_zip,
)
import pytest

address = downloads.address


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
  Handler.requests.clear()
  monkeypatch.setattr(Handler, 'content', CONTENT)

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


def test_a_known_file_is_verified_and_kept_until_it_is_damaged(run, tmp_path):
  status, said = run('thing')
  assert status == 0 and 'licence MIT' in said and 'TRUSTED' not in said
  assert (tmp_path / 'thing' / 'a' / 'data.bin').read_bytes() == CONTENT
  status, said = run('thing')
  assert status == 0 and 'a/data.bin is there, with the sum of the manifest' in said
  assert len(Handler.requests) == 1
  assert not (tmp_path / 'sums.json').exists()
  assert [p.name for p in (tmp_path / 'thing' / 'a').iterdir()] == ['data.bin']
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
  monkeypatch.setattr(Handler, 'content', OTHER)
  status, said = run('thing')
  assert status == 1 and f'and not {SUM} ({tmp_path}/sums.json, since ' in said
  assert not (tmp_path / 'thing' / 'a' / 'data.bin').exists()


def test_a_sum_trusted_for_one_address_is_not_trusted_for_another(run, address, tmp_path):
  run('thing', sha256=None)
  manifest = tmp_path / 'manifest.json'
  manifest.write_text(manifest.read_text().replace('/whole', '/plain'))
  served = len(Handler.requests)
  status, said = run('thing')
  assert status == 0 and 'TRUSTED ON FIRST USE' in said
  # And what came from the old address is not taken for what is at the new one.
  assert 'is of another version: fetched again' in said
  assert len(Handler.requests) > served
  assert 'is there, with the sum of' in run('thing')[1]


def test_strict_refuses_an_unknown_sum_before_anything_is_fetched(run, tmp_path):
  status, said = run('thing', '--strict', sha256=None)
  assert status == 1 and 'knows no sha256 of a/data.bin' in said
  assert Handler.requests == []
  (tmp_path / 'manifest.json').unlink()
  assert run('thing', '--strict')[0] == 0


def test_a_file_that_was_put_there_is_taken_and_recorded(run, tmp_path):
  place = tmp_path / 'thing' / 'a' / 'data.bin'
  place.parent.mkdir(parents=True)
  place.write_bytes(OTHER)
  status, said = run('thing', sha256=None)
  assert status == 0 and 'what was in its place already could not be verified' in said
  assert Handler.requests == [] and place.read_bytes() == OTHER
  place.write_bytes(CONTENT)  # Not what was trusted: fetched again, and refused.
  status, said = run('thing')
  assert status == 1 and f'the sha256 {SUM} and not' in said


def test_damaged_sums_are_refused_and_not_made_anew(run, tmp_path):
  (tmp_path / 'sums.json').write_text('{')
  status, said = run('thing')
  assert status == 1 and 'sums.json is no JSON' in said and Handler.requests == []


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
  Handler.requests.clear()
  status, said = command()
  assert status == 0 and f'b.txt, so what huggingface.co sent {UNVERIFIED}' in said, said
  assert {path for path, _ in Handler.requests} >= {
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


@pytest.mark.parametrize(
  ('url', 'reason'),
  [
    ('/missing', 'answered 404'),
    ('/page', 'answered with a web page'),
    ('http://127.0.0.1:1/x', '127.0.0.1 cannot be reached'),
    ('file:///etc/passwd', 'file:///etc/passwd is no http(s) address'),
  ],
)
def test_an_address_without_a_file_is_refused_and_never_recorded(
  run, tmp_path, url, reason
):
  status, said = run('thing', url=url, sha256=None)
  assert status == 1 and reason in said
  assert not (tmp_path / 'sums.json').exists()


def test_a_path_outside_and_a_version_that_is_no_commit_are_refused(run, tmp_path):
  status, said = run('thong', path='../x')
  assert status == 1 and '../x is outside of its folder' in said
  (tmp_path / 'manifest.json').unlink()
  hub = _entry([], hub={'repo': 'me/it', 'type': 'model'}, version='main')
  manifest = json.dumps({'entries': {'thing': hub}})
  (tmp_path / 'manifest.json').write_text(manifest)
  assert 'the version main is no commit' in run('thing')[1]


@pytest.mark.parametrize(('make', 'suffix'), [(make_zip, '.zip'), (make_tar, '.tar.gz')])
def test_archives_are_extracted_once_and_again_when_they_change(
  run, tmp_path, monkeypatch, make, suffix
):
  monkeypatch.setitem(Handler.served, 'x', make(**{'in/a.txt': b'one'}))
  status, said = run('thing', url='/served/x', sha256=None, path=f'data{suffix}')
  assert status == 0 and 'extracted to' in said
  found = tmp_path / 'thing' / 'data.extracted' / 'in' / 'a.txt'
  assert found.read_bytes() == b'one'
  status, said = run('thing')
  assert status == 0 and 'extracted to' not in said
  (tmp_path / 'sums.json').unlink()
  (tmp_path / 'thing' / f'data{suffix}').unlink()
  monkeypatch.setitem(Handler.served, 'x', make(**{'in/a.txt': b'two'}))
  assert run('thing')[0] == 0 and found.read_bytes() == b'two'


@pytest.mark.parametrize(('make', 'suffix'), [(make_zip, '.zip'), (make_tar, '.tar.gz')])
@pytest.mark.parametrize(
  'name', ['../out', '/tmp/out-of-it', 'a/../../out', 'link->', '', '.']
)
def test_an_archive_with_a_path_outside_its_folder_is_not_extracted(
  run, tmp_path, monkeypatch, make, suffix, name
):
  archive = make(**{'good.txt': b'good', name: b'../../..'})
  monkeypatch.setitem(Handler.served, 'x', archive)
  status, said = run('thing', url='/served/x', sha256=None, path=f'data{suffix}')
  assert status == 1 and 'nothing is extracted' in said
  there = {p.name for p in tmp_path.rglob('*')}
  assert there == {'manifest.json', 'sums.json', 'thing', f'data{suffix}'}


def test_an_archive_with_a_changed_byte_is_sound_or_named(tmp_path):
  """A changed byte does no harm, or the error names the archive; 1 is "encrypted"."""
  compressed = io.BytesIO()
  with zipfile.ZipFile(compressed, 'w', zipfile.ZIP_LZMA) as archive:
    archive.writestr('a.txt', b'hello ' * 50)
  named = 0
  for suffix, sound in {
    '.zip': compressed.getvalue(),
    '.tar.gz': make_tar(a=b'hello ' * 50),
  }.items():
    for position, value in itertools.product(range(len(sound)), (1, 99, 255)):
      path = tmp_path / f'{position}-{value}{suffix}'
      path.write_bytes(sound[:position] + bytes([value]) + sound[position + 1 :])
      try:
        fetch.archives.extract(path)
      except (ValueError, OSError) as error:
        assert str(path) in str(error)
        named += 1
  assert named > 100


@pytest.mark.parametrize('command', [[str(SCRIPT)], [sys.executable, str(SCRIPT)]])
def test_without_a_name_it_lists_what_there_is_also_as_an_executable(command, tmp_path):
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert 'hotpotqa\n' in done.stdout and 'agent-r1-jax fetch NAME' in done.stdout


def test_an_old_python_finds_a_newer_one(tmp_path):
  """The file is read by an interpreter that says it is 3.8; python3.12 is on the PATH."""
  (tmp_path / 'third_party').mkdir()
  for name in ('fetch.py', 'archives.py', 'transfers.py', 'manifest.json'):
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
  # What an old Python could not import it does not read.
  (tmp_path / 'third_party' / 'archives.py').unlink()
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert done.returncode != 0 and '3.11 or later is needed' in done.stderr


def test_the_project_manifest_is_complete():
  entries = fetch.read_manifest(ROOT / 'third_party' / 'manifest.json')['entries']
  for name, entry in entries.items():
    paths = [file['path'] for file in entry['files']]
    assert len(set(paths)) == len(paths) > 0, name
    assert entry['licence'] and entry['version'], name
