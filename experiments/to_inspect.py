"""Converts logs of episodes for Inspect, whose viewer then shows them.

  python -m venv .venv-inspect
  .venv-inspect/bin/pip install inspect_ai==0.3.285 absl-py
  .venv-inspect/bin/python -m experiments.to_inspect runs/quickstart/trajectories
  .venv-inspect/bin/inspect view --log-dir runs/quickstart/trajectories/inspect

The arguments are logs (agent_r1_jax/report/episodes.py), or folders of them. In Inspect's
words, a sample is a group's task, its epochs are the members of the group (the first is
1), and a score is the reward or a metric. This script needs no package of this project,
because Inspect brings 80 packages and is better in an environment of its own.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import datetime
import itertools
import json
import pathlib
from typing import Any

from absl import app, flags

_OUT = flags.DEFINE_string('out', '', 'Where it writes (default: inspect/ beside a log).')
_SCORES = flags.DEFINE_list('scores', ['em'], 'Metrics that are shown as scores.')

# What Inspect shows in a place of its own.
_SHOWN = ('id', 'sample', 'question', 'answer', 'messages', 'error')


def convert(log: pathlib.Path) -> dict[str, Any]:
  """Returns a log as the fields of Inspect's EvalLog."""
  episodes = [*map(json.loads, log.read_bytes().splitlines())]
  groups = {(episode['id'], episode['group']) for episode in episodes}
  counts = collections.Counter(id_ for id_, _ in groups)
  # Several groups may have one task.
  name = lambda e: e['id'] + (f'#{e["group"]}' if counts[e['id']] > 1 else '')
  samples = [make_sample(episode) | {'id': name(episode)} for episode in episodes]
  scores = collections.defaultdict(list)
  for sample in samples:
    for key, score in sample.get('scores', {}).items():
      scores[key].append(score['value'])
  mean = lambda numbers: {'name': 'mean', 'value': sum(numbers) / len(numbers)}
  settings = log.parents[1] / 'config.json'
  config = json.loads(settings.read_text()) if settings.exists() else {}
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
      for key, numbers in scores.items()
    ],
  }
  return {'status': 'success', 'eval': spec, 'results': results, 'samples': samples}


def make_sample(episode: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an episode as the fields of Inspect's EvalSample, but for its id."""
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
  names = [name for name in ('reward', *_SCORES.value) if name in numbers]
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


def main(argv):
  try:
    from inspect_ai import log as inspect_log  # pyright: ignore[reportMissingImports]
  except ModuleNotFoundError:
    raise SystemExit(
      'There is no inspect_ai here: install it as the top of experiments/to_inspect.py '
      'says, in an environment of its own.'
    ) from None
  for path in map(pathlib.Path, argv[1:]):
    for log in sorted(path.glob('*.jsonl')) if path.is_dir() else [path]:
      folder = pathlib.Path(_OUT.value or log.parent / 'inspect')
      folder.mkdir(parents=True, exist_ok=True)
      out = folder / f'{log.stem}.eval'
      inspect_log.write_eval_log(inspect_log.EvalLog(**convert(log.absolute())), out)
      print(out)


if __name__ == '__main__':
  app.run(main)
