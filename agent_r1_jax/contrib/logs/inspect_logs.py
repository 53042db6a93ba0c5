"""Writes logs of episodes for Inspect's viewer.

In Inspect's terms, a sample is a group's task, its epochs are the group's members (from
1), and a score is the reward or a metric.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import datetime
import itertools
import pathlib
from typing import Any

from agent_r1_jax.contrib.logs import log_files

# Fields that Inspect shows in a place of their own.
_SHOWN = ('id', 'sample', 'question', 'answer', 'messages', 'error')


def convert(log: pathlib.Path, scores: Sequence[str]) -> dict[str, Any]:
  """Converts a log to the fields of Inspect's EvalLog; `scores` names metrics."""
  episodes = [*log_files.read_episodes(log)]
  groups = {(episode['id'], episode['group']) for episode in episodes}
  counts = collections.Counter(id_ for id_, _ in groups)
  # Several groups may have the same task.
  name = lambda e: e['id'] + (f'#{e["group"]}' if counts[e['id']] > 1 else '')
  samples = [make_sample(episode, scores) | {'id': name(episode)} for episode in episodes]
  values = collections.defaultdict(list)
  for sample in samples:
    for key, score in sample.get('scores', {}).items():
      values[key].append(score['value'])
  mean = lambda numbers: {'name': 'mean', 'value': sum(numbers) / len(numbers)}
  config = log_files.read_config(log)
  written = datetime.datetime.fromtimestamp(int(log.stat().st_mtime), datetime.UTC)
  spec = {
    'created': written.isoformat(),
    'task': log.stem,
    'dataset': {'name': log.stem, 'samples': len(groups)},
    'model': config.get('model', {}).get('path') or 'policy',
    'config': {'epochs': max((sample['epoch'] for sample in samples), default=1)},
    'metadata': {'config': config},
  }
  results = {
    'total_samples': len(samples),
    'completed_samples': sum('scores' in sample for sample in samples),
    'scores': [
      {'name': key, 'scorer': key, 'metrics': {'mean': mean(numbers)}}
      for key, numbers in values.items()
    ],
  }
  return {'status': 'success', 'eval': spec, 'results': results, 'samples': samples}


def make_sample(episode: Mapping[str, Any], scores: Sequence[str]) -> dict[str, Any]:
  """Converts an episode to the fields of Inspect's EvalSample, except its id."""
  messages = [*make_messages(episode['messages'])]
  replies = [message for message in messages if message['role'] == 'assistant']
  actions, tokens = episode['action_tokens'], episode['tokens']
  turns, answer, status = (episode[x] for x in ('turn_tokens', 'answer', 'status'))
  aliases = answer if isinstance(answer, list) else [answer]
  usage = {'input_tokens': tokens - actions, 'output_tokens': actions}
  output = {'choices': [{'message': reply} for reply in replies[-1:]]}
  sample = {
    'epoch': episode['sample'] + 1,
    'input': episode['question'],
    'target': ['' if alias is None else str(alias) for alias in aliases],
    'messages': messages,
    'output': output | {'usage': usage | {'total_tokens': tokens}},
    'turn_count': len(turns),
    'metadata': {name: x for name, x in episode.items() if name not in _SHOWN},
  }
  if status == 'error':  # It has no reward.
    fields = ('message', 'traceback', 'traceback_ansi')
    return sample | {'error': dict.fromkeys(fields, episode['error'] or 'unknown')}
  numbers = {'reward': episode['reward']} | episode['metrics']
  names = [name for name in ('reward', *scores) if name in numbers]
  sample['scores'] = {name: {'value': float(numbers[name])} for name in names}
  limits = {'truncated': ('token', tokens), 'max_turns': ('turn', len(turns))}
  if status in limits:
    kind, limit = limits[status]
    sample['limit'] = {'type': kind, 'limit': limit, 'reason': status}
  return sample


def make_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
  """Yields messages; Inspect shows a result only under the call that it names."""
  ids = iter(())
  for number, message in enumerate(messages):
    role, shown = message['role'], {}
    if role == 'assistant':
      after = itertools.takewhile(lambda m: m['role'] == 'tool', messages[number + 1 :])
      pairs = itertools.zip_longest(after, message.get('calls', ()), fillvalue={})
      shown['tool_calls'] = [
        {
          'id': f'call-{number}-{i}',
          'function': call.get('name', result.get('name')),
          'arguments': call.get('arguments', {}),
          'parse_error': call.get('error'),
        }
        for i, (result, call) in enumerate(pairs)
      ]
      ids = iter([call['id'] for call in shown['tool_calls']])
      shown['metadata'] = {name: message.get(name) for name in ('turn', 'reward')}
    elif role == 'tool' and (id_ := next(ids, None)):
      shown = {'tool_call_id': id_, 'function': message['name']}
    elif role not in ('system', 'user'):
      role, shown = 'user', {'metadata': {'role': role}}
    yield {'role': role, 'content': message['content']} | shown


def write_log(
  log: pathlib.Path, folder: pathlib.Path, scores: Sequence[str] = ('em',)
) -> pathlib.Path:
  """Writes a log as one Inspect file; returns its path.

  Args:
    log: The log.
    folder: The folder of the file.
    scores: Metrics to include as scores, besides the reward.
  """
  from inspect_ai import log as inspect_log  # pyright: ignore[reportMissingImports]

  out = folder / f'{log.stem}.eval'
  inspect_log.write_eval_log(inspect_log.EvalLog(**convert(log, scores)), out)
  return out
