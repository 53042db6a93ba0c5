"""Who may import whom (CONTRIBUTING.md), read from the syntax of every file."""

import ast
from collections.abc import Iterator
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = 'agent_r1_jax'
TEXT = ('agent', 'grammars', 'tools', 'retrieval', 'tasks')
DEVICE = ('models', 'engine', 'rl')
# The ground floor is the algorithm and the machine under it; the rooms of the upper floor
# stand on it, and it imports none of them.
GROUND = ('types', 'fields', 'config', 'host', *DEVICE, 'agent', 'rollout', 'train')
UPPER = (
  'checks',
  'grammars',
  'guided',
  'playing',
  'report',
  'retrieval',
  'serve',
  'sft',
  'tasks',
  'testing',
  'tools',
  'web',
)
# What is contributed stands on both floors. Nobody imports it: a caller passes in what
# its folders offer. No folder imports another.
CONTRIB = 'contrib'
# Folders of contrib/ that are as light as the rooms of TEXT.
LIGHT = ('benchmarks', 'environments', 'logs', 'mcp', 'sandbox_fusion')
# A retriever's own encoder is a model: where TEXT may import DEVICE.
ENCODER = f'{PACKAGE}/retrieval/encoder.py'
# Each of these libraries has one place or two, so that it can be exchanged.
OWNERS = {
  'flax': f'{PACKAGE}/models/',
  'orbax': f'{PACKAGE}/host/checkpoint.py',
  'faiss': f'{PACKAGE}/retrieval/dense.py',
  'outlines_core': f'{PACKAGE}/grammars/',
  'transformers': f'{PACKAGE}/agent/tool_schema.py {PACKAGE}/agent/tokenizer.py '
  f'{PACKAGE}/agent/template_process.py',
  'gguf': f'{PACKAGE}/contrib/gguf/files.py {PACKAGE}/contrib/gguf/names.py',
  'PIL': f'{PACKAGE}/agent/picture_files.py experiments/worlds/grid.py '
  'experiments/worlds/forged_pictures.py',
  'huggingface_hub': f'third_party/transfers.py {PACKAGE}/contrib/hub/',
  'jsonschema': f'{PACKAGE}/agent/tool_schema.py',
  'tokenizers': f'{PACKAGE}/agent/tokenizer.py experiments/train_tokenizer.py '
  f'{PACKAGE}/retrieval/encoder.py',
  'ray': f'{PACKAGE}/contrib/ray/',
  'math_verify': f'{PACKAGE}/tasks/mathematics.py',
  'httpx2': f'{PACKAGE}/contrib/search_servers/client.py {PACKAGE}/web/bounded_http.py '
  f'{PACKAGE}/guided/judge.py {PACKAGE}/contrib/sandbox_fusion/remote_sandbox.py '
  f'{PACKAGE}/contrib/environments/nemo_gym.py {PACKAGE}/contrib/external/server.py',
  'pydantic': f'{PACKAGE}/web/http.py {PACKAGE}/serve/ {PACKAGE}/contrib/tinker/wire.py '
  f'{PACKAGE}/contrib/dialects/ {PACKAGE}/contrib/search_servers/server.py experiments/',
  'pyseccomp': f'{PACKAGE}/tools/sandbox_worker.py',
  'tenacity': f'{PACKAGE}/contrib/search_servers/client.py '
  f'{PACKAGE}/contrib/external/server.py',
  'google': f'{PACKAGE}/contrib/tinker/messages.py',
  'mcp': f'{PACKAGE}/contrib/mcp/mcp_server.py',
  'tensorflow_datasets': f'{PACKAGE}/tasks/qa_tfds.py',
  'gymnasium': f'{PACKAGE}/contrib/environments/text_games.py experiments/worlds/lake.py',
  'textworld': f'{PACKAGE}/contrib/environments/text_games.py '
  f'{PACKAGE}/contrib/environments/game_process.py',
  'alfworld': f'{PACKAGE}/contrib/environments/game_process.py',
  'reasoning_gym': f'{PACKAGE}/contrib/environments/reasoning.py',
  'inspect_ai': f'{PACKAGE}/contrib/logs/inspect_logs.py',
  'openenv': f'{PACKAGE}/contrib/environments/openenv.py',
  'verifiers': f'{PACKAGE}/contrib/environments/verifiers.py',
  'opentelemetry': f'{PACKAGE}/contrib/opentelemetry/',
  'uvicorn': f'{PACKAGE}/web/http.py',
  'openai': 'experiments/',
  'pydantic_ai': 'experiments/miniwiki/agents.py',
  'mlflow': f'{PACKAGE}/report/sinks.py',
  'wandb': f'{PACKAGE}/report/sinks.py',
}
# These show what others' libraries do in our place, in environments of their own.
BESIDE = ('experiments/bench/light/peer.py',)
# Imported inside the functions that need them: slow, and not everybody's.
LAZY = (
  'PIL',
  'alfworld',
  'bm25s',
  'faiss',
  'gguf',
  'google',
  'gymnasium',
  'httpx2',
  'inspect_ai',
  'jsonschema',
  'math_verify',
  'matplotlib',
  'mcp',
  'mlflow',
  'openai',
  'openenv',
  'outlines_core',
  'prometheus_client',
  'pydantic_ai',
  'ray',
  'reasoning_gym',
  'rich',
  'scipy',
  'starlette',
  'tenacity',
  'tensorboardX',
  'textworld',
  'tokenizers',
  'transformers',
  'uvicorn',
  'verifiers',
  'wandb',
)
MAX_LINES = 400
BANNED_NAMES = ('base', 'core', 'helpers', 'manager', 'registry', 'trainer', 'utils')


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
  """Every imported name in full, `importlib.import_module('...')` included."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((node, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      start = '.' * node.level + (node.module or '')
      yield from ((node, f'{start}.{alias.name}') for alias in node.names)
    elif isinstance(node, ast.Call) and 'import' in ast.unparse(node.func):
      yield from ((node, a.value) for a in node.args if _is_text(a))


def _is_text(node: ast.AST) -> bool:
  return isinstance(node, ast.Constant) and isinstance(node.value, str)


def at_import_time(tree: ast.Module) -> set[ast.AST]:
  """The nodes that run when the module is imported: none of a function's body."""
  found: set[ast.AST] = set()
  waiting: list[ast.AST] = [*tree.body]
  while waiting:
    node = waiting.pop()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
      continue
    if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test):
      continue
    found.add(node)
    waiting.extend(ast.iter_child_nodes(node))
  return found


def violations(path: str, source: str) -> list[str]:
  """What a file does against the rules; `path` is relative to the repository."""
  tree = ast.parse(source)
  early = at_import_time(tree)
  parts = pathlib.PurePosixPath(path).parts
  room = parts[1] if parts[0] == PACKAGE and len(parts) > 2 else ''
  others = {
    room: rooms
    for rooms in (TEXT, DEVICE)
    for room in (TEXT + DEVICE)
    if room not in rooms
  }
  found = []
  for node, name in imports(tree):
    first, *rest = name.split('.')
    target = rest[0] if first == PACKAGE and rest else ''
    if name.startswith('.'):
      found.append(f'{name}: a relative import')
    here = room or parts[-1].removesuffix('.py')
    ground = parts[0] == PACKAGE and here in GROUND
    if ground and target in UPPER:
      found.append(f'{name}: {target} is on the upper floor')
    elif target == CONTRIB and room != CONTRIB and parts[0] == PACKAGE:
      found.append(f'{name}: nobody imports what is contributed')
    elif target == room == CONTRIB and rest[1:2] != [parts[2]]:
      found.append(f'{name}: a folder of contrib/ imports another')
    elif target in others.get(room, ()) and path != ENCODER:
      found.append(f'{name}: {room} and {target} meet in rollout and train only')
    if room == 'types' and first == PACKAGE and target not in ('types', *UPPER):
      found.append(f'{name}: types imports nothing of ours')
    if first in OWNERS and not path.startswith((*OWNERS[first].split(), *BESIDE)):
      found.append(f'{name}: only {OWNERS[first]} imports {first}')
    if first == 'experiments' and parts[0] != first:
      found.append(f'{name}: experiments alone import experiments')
    if first in LAZY and node in early and not path.startswith(BESIDE):
      found.append(f'{name}: import it inside the function that needs it')
  lines, allowed = source.count('\n'), MAX_LINES
  if lines > allowed:
    found.append(f'{lines} lines, {allowed} are allowed')
  if parts[-1].removesuffix('.py').split('_')[0] in BANNED_NAMES:
    found.append(f'{parts[-1]} says nothing about what is in it')
  return found


FILES = sorted(
  str(path.relative_to(ROOT))
  for folder in (PACKAGE, 'experiments', 'third_party')
  for path in (ROOT / folder).rglob('*.py')
  if 'downloads' not in path.parts
)


@pytest.mark.parametrize('path', FILES)
def test_file(path):
  assert violations(path, (ROOT / path).read_text()) == []


def _list_imported(path: str) -> Iterator[str]:
  """The files of this package that a file imports."""
  for _, name in imports(ast.parse((ROOT / path).read_text())):
    for dotted in (name, name.rpartition('.')[0]):
      if (found := f'{dotted.replace(".", "/")}.py') in FILES:
        yield found
        break


def _room(path: str) -> str:
  return path.split('/')[1]


def test_every_room_is_on_a_floor():
  rooms = {_room(path).removesuffix('.py') for path in FILES if PACKAGE in path}
  assert rooms == {*GROUND, *UPPER, CONTRIB, '__init__', '__main__'}


def test_neither_rooms_nor_files_import_each_other_in_a_circle():
  files = {path: {*_list_imported(path)} - {path} for path in FILES if PACKAGE in path}
  rooms = {_room(path): set() for path in files}
  for path, found in files.items():
    rooms[_room(path)] |= {_room(other) for other in found} - {_room(path)}
  assert len(rooms['train']) > 5
  for graph in (files, rooms):
    graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_all_files_are_looked_at():
  assert f'{PACKAGE}/types/__init__.py' in FILES and 'third_party/fetch.py' in FILES


def test_text_rooms_are_light():
  """Whoever writes a tool or a reward waits for none of the slow libraries."""
  light = tuple(f'{PACKAGE}/{CONTRIB}/{name}/' for name in LIGHT)
  modules = [
    path.removesuffix('.py').replace('/', '.')
    for path in FILES
    if path.split('/')[1] in TEXT or path.startswith(light)
    if path not in (ENCODER, OWNERS['tensorflow_datasets'])
  ]
  heavy = (*LAZY, 'tensorflow_datasets', 'flax', 'orbax', 'numba', 'pydantic')
  script = f'import sys, {", ".join(modules)}; print({{*{heavy}}} & {{*sys.modules}})'
  command = [sys.executable, '-c', script]
  result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
  remedy = (
    'Import slow libraries inside the functions that use them. @tool imports '
    'transformers: a ready-made tool is a factory, as in tools/calculator.py.'
  )
  assert result.stdout == 'set()\n', result.stdout + result.stderr + remedy


@pytest.mark.parametrize(
  ('path', 'source', 'message'),
  [
    ('agent/chat.py', 'from agent_r1_jax import models', 'agent and models meet in'),
    ('agent/chat.py', 'import agent_r1_jax.rl.loss as x', 'agent and rl meet in'),
    (
      'tasks/qa.py',
      'def f():\n  from agent_r1_jax.engine import request',
      'tasks and engine',
    ),
    ('rl/loss.py', 'from agent_r1_jax.tools.search import f', 'tools is on the upper'),
    ('engine/engine.py', 'from agent_r1_jax import agent as a', 'engine and agent meet'),
    (
      'models/x.py',
      "import importlib\nimportlib.import_module('agent_r1_jax.agent')",
      'meet',
    ),
    ('types/x.py', 'from agent_r1_jax import metrics', 'types imports nothing of ours'),
    ('rl/loss.py', 'import flax.linen as nn', 'only agent_r1_jax/models/ imports flax'),
    (
      'train/loop.py',
      'def f():\n  from orbax import checkpoint',
      'checkpoint.py imports orbax',
    ),
    ('retrieval/bm25.py', 'def f():\n  import faiss', 'dense.py imports faiss'),
    ('agent/chat.py', 'def f():\n  from transformers import X', 'imports transformers'),
    ('agent/chat.py', 'def f():\n  import tokenizers', 'encoder.py imports tokenizers'),
    (
      'train/loop.py',
      'from experiments import x',
      'experiments alone import experiments',
    ),
    ('agent/chat.py', 'from . import env', 'a relative import'),
    ('agent/chat.py', 'from ..engine import request', 'a relative import'),
    ('retrieval/dense.py', 'import faiss', 'inside the function that needs it'),
    ('agent/tokenizer.py', 'class A:\n  import transformers', 'inside the function'),
    (
      'train/metrics.py',
      'try:\n  import matplotlib.pyplot\nfinally:\n  pass',
      'inside the func',
    ),
    ('train/loop.py', 'x = 1\n' * 401, '401 lines, 400 are allowed'),
    ('train/loop.py', 'from agent_r1_jax import report', 'report is on the upper floor'),
    (
      'types/__init__.py',
      'def f():\n  from agent_r1_jax.serve import server',
      'serve is on the upper floor',
    ),
    ('serve/server.py', 'from agent_r1_jax.contrib.mcp import x', 'nobody imports what'),
    ('contrib/a/x.py', 'from agent_r1_jax.contrib.b import y', 'imports another'),
    ('contrib/a/x.py', 'from agent_r1_jax.contrib import b', 'imports another'),
    ('rl/utils.py', '', 'says nothing'),
    ('rl/base_loss.py', '', 'says nothing'),
  ],
)
def test_the_checker_sees(path, source, message):
  (found,) = violations(f'{PACKAGE}/{path}', source)
  assert message in found


@pytest.mark.parametrize(
  ('path', 'source'),
  [
    ('train/loop.py', 'from agent_r1_jax import rl\nfrom agent_r1_jax.agent import env'),
    (
      'tools/search.py',
      'from agent_r1_jax import types\nfrom agent_r1_jax.tasks import qa',
    ),
    ('rl/loss.py', 'from agent_r1_jax.models import decoder\nimport agent_r1_jax'),
    ('models/decoder.py', 'from flax import linen as nn'),
    ('host/checkpoint.py', 'from orbax.checkpoint import v1 as ocp'),
    ('retrieval/dense.py', 'def f():\n  import faiss'),
    ('agent/tokenizer.py', 'if TYPE_CHECKING:\n  import transformers'),
    ('retrieval/database.py', 'import rlax, modelsx'),
    ('contrib/a/x.py', 'from agent_r1_jax.contrib.a import y'),
    ('contrib/a/x.py', 'from agent_r1_jax.engine import request'),
  ],
)
def test_the_checker_allows(path, source):
  assert violations(f'{PACKAGE}/{path}', source) == []
