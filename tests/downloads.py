"""A server on this machine that third_party/fetch.py downloads from, and archives."""

import hashlib
import http.server
import importlib.util
import io
import pathlib
import stat
import tarfile
import threading
import zipfile

import pytest

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


class Handler(http.server.BaseHTTPRequestHandler):
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
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    thread.join()


def make_zip(**members: bytes) -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, 'w') as archive:
    for name, content in members.items():
      info = zipfile.ZipInfo(name.removesuffix('->'))
      info.external_attr = (stat.S_IFLNK if name.endswith('->') else stat.S_IFREG) << 16
      archive.writestr(info, content)
  return out.getvalue()


def make_tar(**members: bytes) -> bytes:
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w:gz') as archive:
    for name, content in members.items():
      info = tarfile.TarInfo(name.removesuffix('->'))
      if name.endswith('->'):
        info.type, info.linkname, content = tarfile.SYMTYPE, content.decode(), b''
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  return out.getvalue()
