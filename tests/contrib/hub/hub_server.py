"""A server on this machine with the endpoints of the Hub that an upload calls."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading

TOKEN = 'hf_of_the_tests'
USER = 'somebody'
# A file of this many bytes is sent as an object of git LFS.
_LARGE = 4096


class Hub(http.server.ThreadingHTTPServer):
  """Repositories are files by name; `commits` has the names that each commit changed.

  Attributes:
    answers: A part of a path -> the status that is answered there, or None for silence.
    requests: Method and path of each request.
    released: Ends the silence.
  """

  def __init__(self):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.repositories: dict[str, dict[str, bytes]] = {}
    self.public: set[str] = set()
    self.objects: dict[str, bytes] = {}
    self.commits: list[set[str]] = []
    self.answers: dict[str, int | None] = {}
    self.requests: list[str] = []
    self.released = threading.Event()

  @property
  def address(self) -> str:
    return f'http://127.0.0.1:{self.server_port}'

  @contextlib.contextmanager
  def running(self):
    thread = threading.Thread(target=self.serve_forever, args=[0.01])
    thread.start()
    try:
      yield self
    finally:
      self.released.set()
      self.shutdown()
      thread.join()
      self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

  def _serve(self):
    # The body is read first: an answer before it would break the connection.
    body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
    path = self.path.partition('?')[0]
    self.server.requests.append(f'{self.command} {path}')
    for part, status in self.server.answers.items():
      if part in path:
        if status is None:
          self.server.released.wait()
          return self.close_connection
        return self._send(status, {'error': f'the tests say {status}'})
    allowed = self.headers.get('Authorization') == f'Bearer {TOKEN}'
    if not (allowed or path.startswith('/objects/')):
      return self._send(401, {'error': 'Invalid credentials in Authorization header'})
    for pattern, answer in _ROUTES.items():
      if match := re.fullmatch(pattern, path):
        return answer(self, body, *match.groups())
    return self._send(404, {'error': f'no {path} here'})

  do_GET = do_HEAD = do_POST = do_PUT = _serve

  def _send(self, status: int, content: object, **headers: str):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), value)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(data)

  def _create(self, body: bytes):
    asked = json.loads(body)
    if asked['organization'] != USER:
      return self._send(403, {'error': f'no rights in {asked["organization"]}'})
    name = f'{asked["organization"]}/{asked["name"]}'
    exists = name in self.server.repositories
    if not exists:
      self.server.repositories[name] = {'.gitattributes': b''}
      self.server.public |= {name} if asked['visibility'] == 'public' else set()
    url = {'url': f'{self.server.address}/{name}'}
    return self._send(409 if exists else 200, url)

  def _show(self, _: bytes, name: str, *revision: str):
    if name not in self.server.repositories:
      return self._send(404, {'error': 'Repository not found'})
    files = [{'rfilename': file} for file in self.server.repositories[name]]
    private = name not in self.server.public
    shown = {'id': name, 'private': private, 'siblings': files, 'sha': self._sha()}
    return self._send(200, shown)

  def _sha(self) -> str:
    return f'{len(self.server.commits):040x}'

  def _validate(self, body: bytes):
    assert json.loads(body)['content'].startswith('---\n')
    return self._send(200, {'errors': [], 'warnings': []})

  def _preupload(self, body: bytes, name: str):
    files = [
      {
        'path': file['path'],
        'uploadMode': 'lfs' if file['size'] >= _LARGE else 'regular',
        'shouldIgnore': False,
        'oid': None,
      }
      for file in json.loads(body)['files']
    ]
    return self._send(200, {'files': files})

  def _batch(self, body: bytes, name: str):
    objects = [
      {
        'oid': x['oid'],
        'size': x['size'],
        'actions': {'upload': {'href': f'{self.server.address}/objects/{x["oid"]}'}},
      }
      for x in json.loads(body)['objects']
    ]
    return self._send(200, {'transfer': 'basic', 'objects': objects})

  def _put(self, body: bytes, oid: str):
    assert hashlib.sha256(body).hexdigest() == oid
    self.server.objects[oid] = body
    return self._send(200, {})

  def _commit(self, body: bytes, name: str):
    files, changed = self.server.repositories[name], set()
    for line in body.splitlines():
      match json.loads(line):
        case {'key': 'file', 'value': value}:
          files[value['path']] = base64.b64decode(value['content'])
        case {'key': 'lfsFile', 'value': value}:
          files[value['path']] = self.server.objects[value['oid']]
        case {'key': 'deletedFile', 'value': value}:
          del files[value['path']]
        case {'key': 'header'}:
          continue
      changed.add(value['path'])
    self.server.commits.append(changed)
    url = f'{self.server.address}/{name}/commit/{self._sha()}'
    return self._send(200, {'commitUrl': url, 'commitOid': self._sha()})

  def _list(self, _: bytes, name: str, revision: str):
    files = self.server.repositories[name].items()
    tree = [{'type': 'file', 'path': p, 'size': len(x), 'oid': p} for p, x in files]
    return self._send(200, tree)

  def _download(self, _: bytes, name: str, revision: str, file: str):
    content = self.server.repositories[name].get(file)
    if content is None:
      return self._send(404, {'error': 'Entry not found'}, X_Error_Code='EntryNotFound')
    tag = hashlib.sha1(content).hexdigest()
    return self._send(200, content, ETag=f'"{tag}"', X_Repo_Commit=self._sha())

  def log_message(self, *_):
    pass


_NAME = r'([\w.-]+/[\w.-]+)'
_ROUTES = {
  '/api/repos/create': _Handler._create,
  f'/api/models/{_NAME}': _Handler._show,
  f'/api/models/{_NAME}/revision/(.+)': _Handler._show,
  '/api/validate-yaml': _Handler._validate,
  f'/api/models/{_NAME}/preupload/main': _Handler._preupload,
  rf'/{_NAME}\.git/info/lfs/objects/batch': _Handler._batch,
  '/objects/([0-9a-f]+)': _Handler._put,
  f'/api/models/{_NAME}/commit/main': _Handler._commit,
  f'/api/models/{_NAME}/tree/(.+)': _Handler._list,
  f'/{_NAME}/resolve/([^/]+)/(.+)': _Handler._download,
}
