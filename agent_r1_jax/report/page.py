"""Writes an HTML page of a run: curves, configuration, episodes and their tokens.

  python -m experiments.report --workdir=runs/quickstart

The page is one file that loads nothing from elsewhere, and it can be made while the run
goes on. All data is JSON, deflated, in base64, so that no text of an episode can become
markup; the browser inflates an episode when it is opened. The scripts in page_files/ read
these parts:

- `run`: the curves, the configuration, the columns of all episodes (one list for each
  quantity), the groups, and the text of every token id that occurs;
- `text-<k>`: the messages of _TEXTS episodes each;
- `tokens-<k>`: the columns of the tokens of _TOKENS episodes each, for the episodes that
  were logged with them (config.log_episodes).
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
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.report import viewer
from agent_r1_jax.train import metrics

_TEXTS, _TOKENS = 256, 32  # How many episodes are inflated together.
_QUESTION = 200  # The most characters of a task in the list of episodes.
_LOG = re.compile(r'step-(\d+)-(.*)\.eval')
_SCRIPTS = ('data.js', 'curves.js', 'colors.js', 'episode.js', 'page.js')
# The columns of the list of episodes; `tokens` is the index of an episode among those
# with columns of tokens, or -1.
_COLUMNS = ('group', 'sample', 'status', 'reward', 'turns', 'length', 'calls')
_COLUMNS += ('tool_errors', 'format_errors', 'tools', 'tokens')


def write_page(workdir: str | os.PathLike, path: str | os.PathLike) -> str:
  """Writes the page of a run, completely or not at all.

  Args:
    workdir: The run's directory, which is only read.
    path: The HTML file.

  Returns:
    A sentence about what is on the page, and what could not be read.

  Raises:
    ValueError: The directory has neither metrics nor trajectories.
    OSError: The file cannot be written.
  """
  run, texts, tokens = collect(pathlib.Path(workdir))
  parts = {'run': run}
  parts |= {f'text-{i}': part for i, part in enumerate(_split(texts, _TEXTS))}
  parts |= {f'tokens-{i}': part for i, part in enumerate(_split(tokens, _TOKENS))}
  path = pathlib.Path(path)
  part = path.with_name(path.name + '.part')
  try:
    part.write_text(_render(run['name'], parts), encoding='utf-8')
    part.replace(path)
  finally:
    part.unlink(missing_ok=True)
  lines = [
    f'{path}: {len(run["metrics"]["steps"])} lines of metrics, {len(texts)} episodes, '
    f'{len(tokens)} of them with tokens; {path.stat().st_size / 1e6:.1f} MB.'
  ]
  return '\n'.join(lines + run['problems'])


def collect(workdir: pathlib.Path) -> tuple[dict[str, Any], list[dict], list[dict]]:
  """Reads the present content of a workdir.

  Returns:
    The content of `run` (see the top of this file); the text of each episode; and the
    columns of the tokens of those that have them.

  Raises:
    ValueError: The directory has neither metrics nor trajectories.
  """
  problems: list[str] = []
  lines = _try(lambda: metrics.read(workdir), [], problems)
  logs = sorted((workdir / 'trajectories').glob('*.eval'))
  if not lines and not logs:
    raise ValueError(
      f'{workdir} has no metrics.jsonl with a line in it and no trajectories/*.eval: '
      'give the --workdir of a run that has finished its first step or evaluation'
    )
  run: dict[str, Any] = {'logs': [], 'groups': [], 'texts': _TEXTS, 'chunk': _TOKENS}
  rows: list[dict[str, Any]] = []
  texts, tokens = [], []
  for log in logs:
    step, name = match.groups() if (match := _LOG.fullmatch(log.name)) else (0, log.stem)
    numbers: dict[str, int] = {}
    for sample, row, text in _try(lambda log=log: _read(log), [], problems):
      if sample['id'] not in numbers:
        numbers[sample['id']] = len(run['groups'])
        run['groups'].append(_group(sample, len(run['logs'])))
      columns = sample['metadata'].get('columns')
      if columns and columns.get('behaviour_logprobs') == columns.get('old_logprobs'):
        del columns['behaviour_logprobs']
      index = len(tokens) if columns else -1
      rows.append(row | {'group': numbers[sample['id']], 'tokens': index})
      texts.append(text)
      tokens += [columns] if columns else []
    run['logs'].append({'step': int(step), 'name': name})
  saved = _try(lambda: _read_config(workdir / 'config.json'), {}, problems)
  run |= {
    'name': workdir.resolve().name,
    'made': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'config': _config(saved),
    'metrics': _series(lines),
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


def _read(log: pathlib.Path) -> list[tuple[dict, dict, dict]]:
  """Returns the samples of a log, with the row and the text of each."""
  try:
    return [(sample, _row(sample), _text(sample)) for sample in viewer.read_log(log)]
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{log} was written by another program: {error!r}') from None


def _series(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Turns lines of metrics into columns; null where a line has no finite number."""
  names = dict.fromkeys(name for line in lines for name in line if name != 'step')
  return {
    'steps': [line['step'] for line in lines],
    'series': {name: [_round(line.get(name)) for line in lines] for name in names},
  }


def _round(x: float | None) -> float | None:
  return float(f'{x:.5g}') if x is not None and math.isfinite(x) else None


def _config(saved: Mapping[str, Any]) -> list[list[Any]]:
  """Returns [dotted name, value, whether it is not the default] of each field."""
  default = dict(_flatten(dataclasses.asdict(config_lib.Config())))
  return [[k, str(v), v != default.get(k)] for k, v in _flatten(saved)]


def _flatten(fields: Mapping[str, Any], prefix: str = '') -> Iterable[tuple[str, Any]]:
  for name, value in fields.items():
    if isinstance(value, Mapping):
      yield from _flatten(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _group(sample: Mapping[str, Any], log: int) -> list[Any]:
  questions = [m['content'] for m in sample['input'] if m['role'] == 'user']
  return [log, sample['id'], ' '.join(questions[-1:])[:_QUESTION]]


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an episode's row in the list of episodes, without group and tokens."""
  metadata = sample['metadata']
  count = lambda name: _round(float(metadata['metrics'].get(name, 0))) or 0
  calls = [c for m in sample['messages'] for c in m.get('tool_calls', ())]
  return {
    'sample': sample['epoch'] - 1,
    'status': metadata['status'],
    # An episode of status 'error' has no score.
    'reward': None if 'error' in sample else _round(float(metadata['reward'])),
    'turns': len(metadata['turn_tokens']),
    'length': metadata['tokens'],
    'calls': len(calls),
    'tool_errors': count('tool_errors'),
    'format_errors': count('format_errors'),
    'tools': sorted({call['function'] for call in calls}),
  }


def _text(sample: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the messages of an episode, and its details besides its row."""
  metadata = sample['metadata']
  messages = []
  for message in sample['messages']:
    shown = {'role': message['role'], 'content': message['content']}
    shown |= message.get('metadata', {})
    if 'function' in message:
      shown['tool'] = message['function']
    if 'tool_calls' in message:
      names = ('function', 'arguments', 'parse_error')
      shown['calls'] = [[c.get(name) for name in names] for c in message['tool_calls']]
    messages.append(shown)
  target = sample['target']
  return {
    'messages': messages,
    'target': target if isinstance(target, str) else ' | '.join(target),
    'turns': metadata['turn_tokens'],
    'metrics': metadata['metrics'],
    'info': metadata['info'],
    'error': sample.get('error', {}).get('message'),
  }


def _vocabulary(
  tokens: Iterable[Mapping[str, Any]],
  workdir: pathlib.Path,
  saved: Mapping[str, Any],
  problems: list[str],
) -> dict[str, str]:
  """Returns the text of each token id that occurs, with one character for each byte."""
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
  except ValueError:  # A tokenizer of SentencePiece, in which '▁' is a space.
    words = tokenizer.convert_ids_to_tokens(ids)
    known = {
      i: str(word).replace('▁', ' ').encode() for i, word in zip(ids, words, strict=True)
    }
  piece = lambda i: added[i].encode() if i in added else known.get(i, b'')
  return {str(i): piece(i).decode('latin-1') for i in ids}


def _split(items: list[Any], size: int) -> list[list[Any]]:
  return [items[i : i + size] for i in range(0, len(items), size)]


def _render(name: str, parts: Mapping[str, Any]) -> str:
  """Puts the data, the style and the scripts into page.html."""
  folder = importlib.resources.files('agent_r1_jax.report') / 'page_files'
  read = lambda file: (folder / file).read_text(encoding='utf-8')
  data = ''.join(
    f'<script type="text/plain" id="{part}">{_encode(content)}</script>\n'
    for part, content in parts.items()
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
