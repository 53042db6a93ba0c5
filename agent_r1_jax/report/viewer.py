"""Logs of trajectories in the `.eval` format of Inspect, and a viewer for the terminal.

  pip install inspect_ai   (in an environment of its own)
  inspect view --log-dir runs/quickstart/trajectories

or, as plain text and without anything to install:

  python -m agent_r1_jax.report.viewer runs/quickstart/trajectories/step-00040-*.eval

In Inspect's words, a sample is the task of a group, its epochs are the members of the
group (the first is 1), and a score is the reward. The metadata of the first
config.log_episodes samples of a log has `columns`, those of their tokens
(TokenTable.list_tokens): ids, action mask, log-probs, policy steps and, in a training
rollout, rewards, values and advantages. The format is a ZIP of JSON files that
inspect_ai 0.3.285 reads (tests/test_viewer.py); only the standard library writes it.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import datetime
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import sys
from typing import Any
import zipfile
import zlib

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.host import disk, terminal

_VERSION = 2  # of Inspect's log schema
_LIMITS = {'truncated': 'token', 'max_turns': 'turn'}
# The most containers of a log's values that lie in each other, where JSON's reader would
# give up if there were more. A call's arguments have at most calls.MAX_DEPTH.
_MOST_CONTAINERS = 100


def write_log(
  path: str | os.PathLike,
  trajectories: Sequence[types.Trajectory],
  *,
  task: str,
  model: str,
  config: Mapping[str, Any],
  step: int,
  scores: Sequence[str] = ('em',),
  extra: Sequence[Mapping[str, Any]] | None = None,
  parse: Callable[[str], Sequence[calls.Call]] = call_formats.HERMES.parse,
) -> None:
  """Writes a log, completely or not at all.

  Args:
    path: The file, whose name must end in '.eval'. Its directory is made if missing.
    trajectories: The trajectories in any order; members of a group share `group`.
    task: The log's title, for example 'miniwiki, training'.
    model: The policy's name.
    config: The run's configuration, shown with the log.
    step: The update that the trajectories were sampled for.
    scores: Names of metrics to show as scores beside the reward.
    extra: More metadata for each trajectory, such as {'advantage': 0.3}.
    parse: Parses the tool calls of a reply, to show each with its result.

  Raises:
    ValueError: `path` does not end in '.eval', or two trajectories are the same member
      of the same group.
    OSError: The disk is full or cannot be written.
  """
  path = pathlib.Path(path)
  if path.suffix != '.eval':
    raise ValueError(f'path={path}: Inspect finds logs by their ending, .eval')
  ids = _ids(trajectories)
  more = extra or [{}] * len(trajectories)
  samples = [
    _sample(t, sample_id, _messages(t, parse), model, step, scores, e)
    for t, sample_id, e in zip(trajectories, ids, more, strict=True)
  ]
  names = [f'samples/{s["id"]}_epoch_{s["epoch"]}.json' for s in samples]
  if len(set(names)) < len(names):
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f'two trajectories are {twice}: give members of a group numbers')
  spec = _spec(samples, task, model, config, step)
  header = {
    'version': _VERSION,
    'status': 'success',
    'eval': spec,
    'plan': {},
    'results': _results(samples),
    'stats': {'started_at': spec['created'], 'completed_at': spec['created']},
  }
  members = {'_journal/start.json': {'version': _VERSION, 'eval': spec, 'plan': {}}}
  members |= dict(zip(names, samples, strict=True))
  members |= {
    'summaries.json': [_summary(s) for s in samples],
    'header.json': header,
  }
  _zip(path, members)


def read_log(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the samples of a log that `write_log` wrote, in their order.

  Raises:
    ValueError: The file is no such log, or cannot be read.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      names = [name for name in archive.namelist() if name.startswith('samples/')]
      return [json.loads(archive.read(name)) for name in names]
  except OSError as error:
    raise ValueError(f'{path} cannot be read: {error.strerror or error}') from None
  except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} is no log of trajectories: {error}') from None


def format_sample(sample: Mapping[str, Any]) -> str:
  """Formats a sample for a terminal: each message, and the reward of each reply."""
  scores = {name: score['value'] for name, score in sample.get('scores', {}).items()}
  target = sample['target']
  target = target if isinstance(target, str) else ' | '.join(target)
  status = sample['metadata']['status']
  lines = [f'--- {sample["id"]}, target: {target}, {status} {scores}']
  for message in sample['messages']:
    turn = message.get('metadata', {})
    reward = f' (reward {turn["reward"]:g})' if 'reward' in turn else ''
    lines.append(f'{message["role"]}{reward}: {message["content"].strip()}')
  return '\n'.join(lines)


def main() -> None:
  """Prints the first samples of logs, and of all logs in folders."""
  parser = argparse.ArgumentParser(description='Prints trajectories.')
  parser.add_argument('logs', nargs='+', metavar='LOG.eval', help='or a folder of them')
  parser.add_argument('-n', type=int, default=3, help='of each log (default: 3)')
  arguments = parser.parse_args()
  try:
    for log in (log for path in arguments.logs for log in _list_logs(path)):
      samples = read_log(log)
      print(_printable(f'=== {log}'))
      for sample in samples[: arguments.n]:
        print(_printable(format_sample(sample)) + '\n')
    sys.stdout.flush()
  except ValueError as error:
    parser.error(terminal.printable(str(error)))
  except BrokenPipeError:
    # The reader, such as `head`, has ended. Python flushes again at its exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _list_logs(path: str) -> list[str]:
  """Returns the path itself, or the logs in it if it is a folder."""
  if not os.path.isdir(path):
    return [path]
  logs = sorted(map(str, pathlib.Path(path).glob('*.eval')))
  if not logs:
    inner = sorted({str(log.parent) for log in pathlib.Path(path).glob('*/*.eval')})
    raise ValueError(
      f'{path} is a folder without logs (*.eval)'
      + (f'; there are some in {", ".join(inner)}' if inner else '')
    )
  return logs


def _printable(text: str) -> str:
  return terminal.printable(text, sys.stdout.encoding)


def _zip(path: pathlib.Path, members: Mapping[str, Any]) -> None:
  with disk.explain_write_errors(path.parent, 'The folder of trajectories'):
    path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_suffix('.part')
  with disk.explain_write_errors(path, 'Trajectories'):
    try:
      with zipfile.ZipFile(part, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
          archive.writestr(name, _to_json(content))
      part.replace(path)
    finally:
      part.unlink(missing_ok=True)


def _to_json(content: Any) -> bytes:
  # A model's bytes can decode to lone surrogates, which UTF-8 cannot encode.
  dump = functools.partial(json.dumps, ensure_ascii=False, default=_text, allow_nan=False)
  try:
    text = dump(content)
  except (TypeError, ValueError, RecursionError):  # Rare: replacing takes time.
    text = dump(_make_plain(content))
  return text.encode('utf-8', errors='replace')


def _text(value: Any) -> str:
  try:
    return str(value)
  except RecursionError:
    return '...'


def _make_plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
  """Replaces what JSON lacks by strings: NaN, infinity, and keys that are no text.

  '...' stands for a container in itself, and for one in _MOST_CONTAINERS others.
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


def _ids(trajectories: Sequence[types.Trajectory]) -> list[str]:
  """Returns each task's id, with the group where several groups share the task."""
  groups: dict[str, set[int]] = {}
  # The names of a ZIP's members are UTF-8, and end at a NUL.
  names = [
    t.task.id.encode('utf-8', 'replace').decode().replace('\0', '?') for t in trajectories
  ]
  for name, t in zip(names, trajectories, strict=True):
    groups.setdefault(name, set()).add(t.group)
  return [
    name if len(groups[name]) == 1 else f'{name}#{t.group}'
    for name, t in zip(names, trajectories, strict=True)
  ]


def _spec(samples, task: str, model: str, config: Mapping[str, Any], step: int) -> dict:
  created = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
  name = hashlib.sha256(f'{task} {model} {step} {created}'.encode()).hexdigest()[:22]
  ids = list(dict.fromkeys(sample['id'] for sample in samples))
  return {
    'eval_id': name,
    'run_id': name,
    'task_id': name,
    'created': created,
    'task': task,
    'dataset': {'name': task, 'samples': len(ids), 'sample_ids': ids},
    'model': model,
    'config': {'epochs': max((sample['epoch'] for sample in samples), default=1)},
    'metadata': {'step': step, 'config': config},
  }


def _sample(
  t: types.Trajectory,
  sample_id: str,
  messages: list[dict[str, Any]],
  model: str,
  step: int,
  scores: Sequence[str],
  extra: Mapping[str, Any],
) -> dict[str, Any]:
  replies = [message for message in messages if message['role'] == 'assistant']
  tokens = sum(len(segment.tokens) for segment in t.segments)
  actions = sum(int(segment.action_mask.sum()) for segment in t.segments)
  usage = {'input_tokens': tokens - actions, 'output_tokens': actions}
  usage['total_tokens'] = tokens
  choice = {'message': replies[-1], 'stop_reason': 'stop'} if replies else None
  sample = {
    'id': sample_id,
    'epoch': t.sample + 1,
    'input': [_message(message) for message in t.task.messages],
    'target': _target(t.task.answer),
    'messages': messages,
    'output': {
      'model': model,
      'choices': [choice] if choice else [],
      'completion': replies[-1]['content'] if replies else '',
      'usage': usage,
    },
    'model_usage': {model: usage},
    'turn_count': len(t.turns),
    'metadata': _metadata(t, step, tokens, actions) | dict(extra),
  }
  if t.status == 'error':  # masked out of the update, and without a score
    text = t.error or 'unknown error'
    return sample | {
      'error': {'message': text, 'traceback': text, 'traceback_ansi': text}
    }
  shown = {'reward': t.reward} | {n: t.metrics[n] for n in scores if n in t.metrics}
  answer = {'answer': replies[-1]['content'][-200:]} if replies else {}
  sample['scores'] = {
    name: {'value': float(value)} | answer for name, value in shown.items()
  }
  if t.status in _LIMITS:
    limits = {'token': tokens, 'turn': len(t.turns)}
    kind = _LIMITS[t.status]
    sample['limit'] = {'type': kind, 'limit': limits[kind], 'reason': t.status}
  return sample


def _metadata(
  t: types.Trajectory, step: int, tokens: int, actions: int
) -> dict[str, Any]:
  logprob = sum(float(segment.behaviour_logprobs.sum()) for segment in t.segments)
  return {
    'step': step,
    'policy_steps': np.unique(t.policy_steps).tolist(),
    'status': t.status,
    'reward': t.reward,
    'turn_rewards': [float(turn.reward) for turn in t.turns],
    'turn_tokens': [turn.stop - turn.start for turn in t.turns],
    'tokens': tokens,
    'action_tokens': actions,
    'environment_tokens': tokens - actions,
    'mean_logprob': logprob / actions if actions else None,
    'segments': len(t.segments),
    'group': t.group,
    'metrics': t.metrics,
    'info': t.task.info,
  }


def _messages(t: types.Trajectory, parse: Callable) -> list[dict[str, Any]]:
  """Returns the conversation; each reply has its reward and length as metadata."""
  messages = [
    _message(message) | {'id': f'{i}'} for i, message in enumerate(t.messages, start=1)
  ]
  _link_tools(messages, parse)
  replies = [message for message in messages if message['role'] == 'assistant']
  # From the end, because a prompt may contain examples of replies, which are no turns.
  pairs = zip(reversed(t.turns), reversed(replies), strict=False)
  for number, (turn, reply) in enumerate(pairs):
    reply['source'] = 'generate'
    reply['metadata'] = {
      'turn': len(t.turns) - number,
      'reward': float(turn.reward),
      'tokens': turn.stop - turn.start,
    }
  return messages


def _link_tools(messages: Sequence[dict[str, Any]], parse: Callable) -> None:
  """Links a tool's message to its call; Inspect shows it only under that call."""
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      results = list(
        itertools.takewhile(lambda m: m['role'] == 'tool', messages[i + 1 :])
      )
      parsed = list(parse(message['content']))
      parsed += [None] * (len(results) - len(parsed))
      for result, call in zip(results, parsed, strict=False):
        result['tool_call_id'] = f'call-{result["id"]}'
        message.setdefault('tool_calls', []).append(_call(result, call))
  for message in messages:  # a result without a call before it
    if message['role'] == 'tool' and 'tool_call_id' not in message:
      message |= {'role': 'user', 'metadata': {'role': 'tool'}}


def _call(result: Mapping[str, Any], call: Any) -> dict[str, Any]:
  shown = {'id': result['tool_call_id'], 'function': result['function'], 'arguments': {}}
  if isinstance(call, calls.ToolCall):
    shown |= {'function': call.name, 'arguments': call.arguments}
  if isinstance(call, calls.CallError):
    shown |= {'parse_error': call.message}
  return shown | {'type': 'function'}


def _message(message: types.Message) -> dict[str, Any]:
  role, content = message['role'], message.get('content') or ''
  content = content if isinstance(content, str) else _to_json(content).decode()
  if role == 'tool':
    return {'role': 'tool', 'content': content, 'function': message.get('name', 'tool')}
  if role in ('system', 'user', 'assistant'):
    return {'role': role, 'content': content}
  return {'role': 'user', 'content': content, 'metadata': {'role': role}}


def _target(answer: Any) -> str | list[str]:
  if answer is None:
    return ''
  if isinstance(answer, list | tuple):
    return [_text(alias) for alias in answer]
  return answer if isinstance(answer, str) else _to_json(answer).decode()


def _summary(sample: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a sample's entry in the list of samples."""
  names = ('id', 'epoch', 'input', 'target', 'scores', 'model_usage', 'turn_count')
  summary: dict[str, Any] = {name: sample[name] for name in names if name in sample}
  flat = {k: v for k, v in sample['metadata'].items() if not isinstance(v, dict | list)}
  summary |= {'metadata': flat, 'completed': True}
  summary['message_count'] = len(sample['messages'])
  if 'error' in sample:
    summary['error'] = sample['error']['message']
  if 'limit' in sample:
    summary['limit'] = sample['limit']['type']
  return summary


def _results(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  scored = [sample['scores'] for sample in samples if 'scores' in sample]
  names = dict.fromkeys(name for scores in scored for name in scores)
  return {
    'total_samples': len(samples),
    'completed_samples': len(scored),
    'scores': [
      _score(name, [s[name]['value'] for s in scored if name in s]) for name in names
    ],
  }


def _score(name: str, values: Sequence[float]) -> dict[str, Any]:
  return {
    'name': name,
    'scorer': name,
    'scored_samples': len(values),
    'metrics': {'mean': {'name': 'mean', 'value': sum(values) / len(values)}},
  }


if __name__ == '__main__':
  main()
