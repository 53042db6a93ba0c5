"""Logs of episodes as JSON lines: writes them, reads them, prints them on a terminal.

  python -m agent_r1_jax.report.episodes runs/quickstart/trajectories/step-00040-*.jsonl
  grep -l 'Arden Bridge' runs/quickstart/trajectories/*.jsonl
  jq 'select(.reward == 0) | .messages[-1].content' FILE.jsonl

Each line is an episode:

- `id`, `answer`, `info`, `question`: of its task; the question is the last user message;
- `group`, `sample`, `step`: its group, its index there, the update it was sampled for;
- `status`, `error`, `reward` (null if the status is 'error'), `metrics`;
- `turn_rewards`, `turn_tokens`, `turn_segments`: for each turn, the reward, the number of
  sampled tokens and the segment, counted from 0;
- `tokens`, `action_tokens`, `segments`, `mean_logprob`, `policy_steps`;
- `messages`: each has a `role` and its `content` as text; a tool's has its `name`; a
  reply of the policy its `turn`, `reward` and `tokens`, and the `calls` that were
  answered; for each [picture] in the text, `pictures` has a data URL;
- `columns`, in the first config.log_episodes of a log: values of each token
  (TokenTable.list_tokens), such as ids, action mask, log-probs and advantages.

Control characters are stored as JSON escapes, so that `grep` prints none. `jq -r` does:
`main` replaces them by symbols. experiments/convert_episodes.py converts logs.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import functools
import itertools
import json
import math
import os
import pathlib
import re
import sys
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls, pictures
from agent_r1_jax.host import disk, terminal

# JSON escapes only control characters below 0x20. A model's bytes can decode to lone
# surrogates, which UTF-8 cannot encode.
_ESCAPED = re.compile('[\x7f-\x9f\ud800-\udfff]')
# The maximum nesting depth of a log's values; JSON's reader fails on deeper ones. A
# call's arguments have at most calls.MAX_DEPTH.
_MOST_CONTAINERS = 100


def write(
  path: str | os.PathLike,
  trajectories: Sequence[types.Trajectory],
  *,
  step: int,
  columns: Sequence[Mapping[str, Any]] = (),
  parse: calls.Parse = call_formats.HERMES.parse,
) -> None:
  """Writes a log, completely or not at all.

  `columns` are of the tokens of the first episodes. `parse` finds the tool calls of a
  reply, to show each with its result.

  Raises:
    OSError: The disk is full or cannot be written.
  """
  rows = [_describe(trajectory, step, parse) for trajectory in trajectories]
  for row, of_tokens in zip(rows, columns, strict=False):
    row['columns'] = of_tokens
  path = pathlib.Path(path)
  with disk.explain_write_errors(path, 'Trajectories'):
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomically(path, b''.join(map(_to_line, rows)))


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the episodes of a log, in order.

  Raises:
    ValueError: The file cannot be read, or a line is not an episode.
  """
  try:
    lines = pathlib.Path(path).read_bytes().splitlines()
  except OSError as error:
    raise ValueError(f'{path} cannot be read: {error.strerror or error}') from None
  episodes = []
  for number, line in enumerate(lines, start=1):
    try:
      episodes.append(json.loads(line))
      episodes[-1]['messages']
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise ValueError(f'{path}, line {number} is no episode: {error!r}') from None
  return episodes


def format_answer(answer: Any) -> str:
  """Formats a task's answer for people: a list's aliases, or any other value."""
  return ' | '.join(map(str, answer)) if isinstance(answer, list) else _to_text(answer)


def format_episode(episode: Mapping[str, Any]) -> str:
  """Formats an episode for a terminal: its messages, and the reward of each reply."""
  numbers = {'reward': episode['reward'], **episode['metrics']}
  shown = ', '.join(f'{name} {value}' for name, value in numbers.items())
  target = format_answer(episode['answer'])
  lines = [f'--- {episode["id"]}, target: {target}, {episode["status"]}: {shown}']
  lines += [f'error: {episode["error"]}'] if episode['error'] else []
  for message in episode['messages']:
    reward = f' (reward {message["reward"]:g})' if 'reward' in message else ''
    lines.append(f'{message["role"]}{reward}: {message["content"].strip()}')
  return '\n'.join(lines)


def main() -> None:
  """Prints the first episodes of logs, and of all logs in folders."""
  parser = argparse.ArgumentParser(description='Prints episodes.')
  parser.add_argument('logs', nargs='+', metavar='LOG.jsonl', help='or a folder of them')
  parser.add_argument('-n', type=int, default=3, help='of each log (default: 3)')
  arguments = parser.parse_args()
  show = lambda text: print(terminal.printable(text, sys.stdout.encoding))
  try:
    for log in itertools.chain.from_iterable(map(_list_logs, arguments.logs)):
      episodes = read(log)
      show(f'=== {log}')
      for episode in episodes[: arguments.n]:
        show(format_episode(episode) + '\n')
    sys.stdout.flush()
  except ValueError as error:
    parser.error(terminal.printable(str(error)))
  except BrokenPipeError:
    # The reader, such as `head`, has closed the pipe. Python flushes again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _list_logs(path: str) -> Iterator[pathlib.Path]:
  """Yields the path itself, or the logs in it if it is a folder."""
  folder = pathlib.Path(path)
  logs = sorted(folder.glob('*.jsonl')) if folder.is_dir() else [folder]
  if not logs:
    inner = sorted({str(log.parent) for log in folder.glob('*/*.jsonl')})
    raise ValueError(
      f'{path} is a folder without logs (*.jsonl)'
      + (f'; there are some in {", ".join(inner)}' if inner else '')
    )
  yield from logs


def _describe(t: types.Trajectory, step: int, parse: calls.Parse) -> dict[str, Any]:
  """Returns an episode's line without the columns of its tokens."""
  questions = [m.get('content') for m in t.task.messages if m['role'] == 'user']
  actions = sum(int(segment.action_mask.sum()) for segment in t.segments)
  logprob = sum(float(segment.behaviour_logprobs.sum()) for segment in t.segments)
  return {
    'id': t.task.id,
    'group': t.group,
    'sample': t.sample,
    'step': step,
    'status': t.status,
    # Errors are masked out of the update, never scored 0.
    'reward': None if t.status == types.Status.FAILED else t.reward,
    'turn_rewards': [float(turn.reward) for turn in t.turns],
    'turn_tokens': [turn.stop - turn.start for turn in t.turns],
    'turn_segments': [turn.segment for turn in t.turns],
    'tokens': sum(len(segment.tokens) for segment in t.segments),
    'action_tokens': actions,
    'segments': len(t.segments),
    'mean_logprob': logprob / actions if actions else None,
    'policy_steps': np.unique(t.policy_steps).tolist(),
    'metrics': t.metrics,
    'error': t.error,
    'question': _to_text(questions[-1]) if questions else '',
    'answer': t.task.answer,
    'info': t.task.info,
    'messages': _describe_messages(t, parse),
  }


def _describe_messages(t: types.Trajectory, parse: calls.Parse) -> list[dict[str, Any]]:
  """Returns the conversation; each reply has its turn, and its answered calls."""
  messages = []
  for message in t.messages:
    shown = {'role': message['role'], 'content': _to_text(message.get('content'))}
    name = {'name': message.get('name', 'tool')} if message['role'] == 'tool' else {}
    urls = _list_pictures(message.get('content'))
    messages.append(shown | name | ({'pictures': urls} if urls else {}))
  replies = [message for message in messages if message['role'] == 'assistant']
  # From the end, since examples of replies in a prompt are not turns.
  pairs = zip(reversed(t.turns), reversed(replies), strict=False)
  for number, (turn, reply) in enumerate(pairs):
    reply['turn'] = len(t.turns) - number
    reply['reward'], reply['tokens'] = float(turn.reward), turn.stop - turn.start
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      after = itertools.takewhile(lambda m: m['role'] == 'tool', messages[i + 1 :])
      if results := len(list(after)):
        message['calls'] = [*map(_describe_call, parse(message['content'])[:results])]
  return messages


def _describe_call(call: calls.Call) -> dict[str, Any]:
  if isinstance(call, calls.CallError):
    return {'error': call.message}
  return {'name': call.name, 'arguments': call.arguments}


def _to_text(content: Any) -> str:
  if isinstance(content, str):
    return content
  if _list_pictures(content):
    return '\n'.join(part.get('text', '[picture]') for part in content)
  return '' if content is None else _to_json(content)


def _list_pictures(content: Any) -> list[str]:
  """Lists the addresses of the pictures in a message's content, if well formed."""
  try:
    return pictures.find_addresses({'content': content})
  except ValueError:  # An episode that ended for this reason has a log too.
    return []


def _to_line(row: Mapping[str, Any]) -> bytes:
  escape = lambda match: f'\\u{ord(match[0]):04x}'
  return (_ESCAPED.sub(escape, _to_json(row)) + '\n').encode()


def _to_json(content: Any) -> str:
  dump = functools.partial(json.dumps, ensure_ascii=False, default=_show, allow_nan=False)
  try:
    return dump(content)
  except (TypeError, ValueError, RecursionError):  # Rare, and replacing is slow.
    return dump(_make_plain(content))


def _show(value: Any) -> str:
  try:
    return str(value)
  except Exception:  # A user's class, or a cyclic object.
    return f'<{type(value).__name__}>'


def _make_plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
  """Replaces what JSON lacks by strings: NaN, infinity, and keys that are not strings.

  '...' replaces a container inside itself, or nested deeper than _MOST_CONTAINERS.
  """
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if not isinstance(value, Mapping | list | tuple):
    return value
  if id(value) in outer or len(outer) == _MOST_CONTAINERS:
    return '...'
  inner = functools.partial(_make_plain, outer=(*outer, id(value)))
  if isinstance(value, Mapping):
    return {str(key): inner(x) for key, x in value.items()}
  return [inner(x) for x in value]


if __name__ == '__main__':
  main()
