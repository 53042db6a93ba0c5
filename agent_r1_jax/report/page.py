"""Writes an HTML page of a run: curves, configuration, episodes and their tokens.

  agent-r1-jax report --workdir=runs/quickstart

The page is one file that loads nothing from elsewhere, and can be made while the run is
going. All data is JSON, deflated, in base64, so that an episode's text cannot become
markup; the browser inflates an episode when it is opened. Each chunk is an element of the
page, which the scripts in page_files/ read by its id:

- `run`: the curves, the configuration, the columns of all episodes (one list per field),
  the groups, and the text of every token id that occurs;
- `text-<k>`: for _SIZES['text'] episodes the fields _OPENED of their lines
  (report/episodes.py), and the answer;
- `tokens-<k>`: the token columns of _SIZES['tokens'] episodes, of those logged with them
  (config.log_episodes).
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import datetime
import html
import importlib.resources
import json
import math
import os
import pathlib
import re
from typing import Any
import zlib

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.host import disk
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.report import episodes as episodes_lib
from agent_r1_jax.train import metrics

_SIZES = {'text': 256, 'tokens': 32}  # Episodes per chunk.
_QUESTION = 200  # Maximum characters of a task in the list of episodes.
_LOG = re.compile(r'step-(\d+)-(.*)\.jsonl')
_SCRIPTS = ('data.js', 'curves.js', 'colors.js', 'episode.js', 'page.js')
# The columns of the list of episodes; `tokens` is an episode's index among those with
# token columns, or -1.
_COLUMNS = ('group', 'sample', 'status', 'reward', 'turns', 'length', 'calls')
_COLUMNS += ('tool_errors', 'format_errors', 'tools', 'tokens')
# Further fields, shown when an episode is opened.
_OPENED = ('messages', 'turn_tokens', 'metrics', 'info', 'error')


def write_page(workdir: str | os.PathLike, path: str | os.PathLike) -> str:
  """Writes the page of a run, completely or not at all.

  The run's directory is only read.

  Returns:
    A sentence about what is on the page, and what could not be read.

  Raises:
    ValueError: The directory has neither metrics nor trajectories.
    OSError: The file cannot be written.
  """
  run, texts, tokens = collect(pathlib.Path(workdir))
  chunks = {'run': run}
  for kind, episodes in (('text', texts), ('tokens', tokens)):
    size = _SIZES[kind]
    starts = range(0, len(episodes), size)
    chunks |= {f'{kind}-{i // size}': episodes[i : i + size] for i in starts}
  path = pathlib.Path(path)
  disk.write_atomically(path, _render(run['name'], chunks).encode())
  lines = [
    f'{path}: {len(run["metrics"]["steps"])} lines of metrics, {len(texts)} episodes, '
    f'{len(tokens)} of them with tokens; {path.stat().st_size / 1e6:.1f} MB.'
  ]
  return '\n'.join(lines + run['problems'])


def collect(workdir: pathlib.Path) -> tuple[dict[str, Any], list[dict], list[dict]]:
  """Reads the current content of a workdir.

  Returns:
    The content of `run` (see the module docstring); the text of each episode; and the
    token columns of the episodes that have them.

  Raises:
    ValueError: The directory has neither metrics nor trajectories.
  """
  problems: list[str] = []
  lines = _try(lambda: metrics.read(workdir), [], problems)
  logs = sorted((workdir / 'trajectories').glob('*.jsonl'))
  if not lines and not logs:
    raise ValueError(
      f'{workdir} has no metrics.jsonl with a line in it and no trajectories/*.jsonl: '
      'give the --workdir of a run that has finished its first step or evaluation'
    )
  run: dict[str, Any] = {'logs': [], 'groups': [], 'sizes': _SIZES}
  rows: list[dict[str, Any]] = []
  texts, tokens = [], []
  for log in logs:
    step, name = match.groups() if (match := _LOG.fullmatch(log.name)) else (0, log.stem)
    numbers: dict[int, int] = {}
    for episode in _try(lambda log=log: episodes_lib.read(log), [], problems):
      if episode['group'] not in numbers:
        numbers[episode['group']] = len(run['groups'])
        group = [len(run['logs']), episode['id'], episode['question'][:_QUESTION]]
        run['groups'].append(group)
      columns = episode.pop('columns', None)
      if columns and columns.get('behaviour_logprobs') == columns.get('old_logprobs'):
        del columns['behaviour_logprobs']
      index = len(tokens) if columns else -1
      number = numbers[episode['group']]
      rows.append(_describe(episode) | {'group': number, 'tokens': index})
      answer = {'answer': episodes_lib.format_answer(episode['answer'])}
      texts.append(answer | {name: episode.get(name) for name in _OPENED})
      tokens += [columns] if columns else []
    run['logs'].append({'step': int(step), 'name': name})
  saved = _try(lambda: _read_config(workdir / 'config.json'), {}, problems)
  run |= {
    'name': workdir.resolve().name,
    'made': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'config': _compare_config(saved),
    'metrics': _transpose(lines),
    'episodes': {name: [row[name] for row in rows] for name in _COLUMNS},
    'vocabulary': _vocabulary(tokens, workdir, saved, problems),
    'problems': problems,
  }
  return run, texts, tokens


def _try(read, otherwise, problems: list[str]):
  """Returns read(), or `otherwise` if a file is missing, damaged or incomplete."""
  try:
    return read()
  except FileNotFoundError:
    return otherwise
  except (OSError, ValueError) as error:
    problems.append(f'Left out: {error}')
    return otherwise


def _read_config(path: pathlib.Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is no JSON: {error}') from None


def _transpose(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Turns lines of metrics into columns; null where a line has no finite value."""
  names = dict.fromkeys(name for line in lines for name in line if name != 'step')
  return {
    'steps': [line['step'] for line in lines],
    'series': {name: [_round(line.get(name)) for line in lines] for name in names},
  }


def _round(x: float | None) -> float | None:
  return float(f'{x:.5g}') if x is not None and math.isfinite(x) else None


def _compare_config(saved: Mapping[str, Any]) -> list[list[Any]]:
  """Returns [dotted name, value, whether it differs from the default] for each field."""
  default = workdir_lib.flatten_fields(dataclasses.asdict(config_lib.Config()))
  fields = workdir_lib.flatten_fields(saved) if saved else {}
  return [[name, str(x), x != default.get(name)] for name, x in fields.items()]


def _describe(episode: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an episode's row in the list of episodes, without group and tokens."""
  count = lambda name: _round(float(episode['metrics'].get(name, 0))) or 0
  tools = [m['name'] for m in episode['messages'] if m['role'] == 'tool']
  reward = episode['reward']
  return {
    'sample': episode['sample'],
    'status': episode['status'],
    'reward': None if reward is None else _round(float(reward)),
    'turns': len(episode['turn_tokens']),
    'length': episode['tokens'],
    'calls': len(tools),
    'tool_errors': count('tool_errors'),
    'format_errors': count('format_errors'),
    'tools': sorted(set(tools)),
  }


def _vocabulary(
  tokens: Iterable[Mapping[str, Any]],
  workdir: pathlib.Path,
  saved: Mapping[str, Any],
  problems: list[str],
) -> dict[str, str]:
  """Returns the text of each token id that occurs, one character per byte."""
  ids = sorted({i for columns in tokens for i in columns['tokens']})
  if not ids:
    return {}
  folders = [saved.get('model', {}).get('path', ''), workdir / 'model']
  folder = next((f for f in folders if f and pathlib.Path(f).is_dir()), workdir / 'model')
  tokenizer = _try(lambda: tokenizer_lib.load(folder), None, problems)
  if tokenizer is None:
    return {}
  added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
  try:
    known = dict(enumerate(tokenizer_lib.token_bytes(tokenizer)))
  except ValueError:  # A SentencePiece tokenizer, in which '▁' is a space.
    words = tokenizer.convert_ids_to_tokens(ids)
    known = {
      i: str(word).replace('▁', ' ').encode() for i, word in zip(ids, words, strict=True)
    }
  known |= {i: '▦'.encode() for i in ids if i >= types.FIRST_PICTURE_ID}
  piece = lambda i: added[i].encode() if i in added else known.get(i, b'')
  return {str(i): piece(i).decode('latin-1') for i in ids}


def _render(name: str, chunks: Mapping[str, Any]) -> str:
  """Puts the data, the style and the scripts into page.html."""
  folder = importlib.resources.files('agent_r1_jax.report') / 'page_files'
  read = lambda file: (folder / file).read_text(encoding='utf-8')
  data = ''.join(
    f'<script type="text/plain" id="{id_}">{_encode(content)}</script>\n'
    for id_, content in chunks.items()
  )
  values = {
    '{{name}}': html.escape(name),
    '{{style}}': read('page.css'),
    '{{data}}': data,
    '{{scripts}}': '\n'.join(map(read, _SCRIPTS)),
  }
  pattern = re.compile('|'.join(map(re.escape, values)))
  return pattern.sub(lambda match: values[match[0]], read('page.html'))


def _encode(content: Any) -> str:
  text = json.dumps(content, ensure_ascii=False, separators=(',', ':'))
  return base64.b64encode(zlib.compress(text.encode('utf-8', 'replace'))).decode()
