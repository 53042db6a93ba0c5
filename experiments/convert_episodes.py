"""Converts logs of episodes for other programs: for Inspect's viewer, and to ATIF.

  python -m experiments.convert_episodes --to=atif runs/quickstart/trajectories
  python -m experiments.convert_episodes --to=inspect runs/quickstart/trajectories

The arguments are logs (agent_r1_jax/report/episodes.py), or folders of them.
experiments/atif.py says how an episode is written as ATIF. Only absl-py is needed for it.
`--to=inspect` needs inspect_ai, which brings 80 packages and is better in an environment
of its own; `make test-with-inspect` makes .venv-inspect.

In Inspect's words, a sample is a group's task, its epochs are the members of the group
(the first is 1), and a score is the reward or a metric.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import datetime
import itertools
import json
import pathlib
from typing import Any

from absl import app, flags

from experiments import atif

_TO = flags.DEFINE_enum('to', None, ['atif', 'inspect'], 'The format.', required=True)
_OUT = flags.DEFINE_string('out', '', 'Where it writes (default: FORMAT/ beside a log).')
_SCORES = flags.DEFINE_list('scores', ['em'], "Metrics that are Inspect's scores.")

# What Inspect shows in a place of its own.
_SHOWN = ('id', 'sample', 'question', 'answer', 'messages', 'error')
# What this script reads of every episode, and its type.
_FIELDS: dict[str, type | tuple[type, ...]] = {
  **dict.fromkeys(('id', 'status', 'question'), str),
  **dict.fromkeys(('group', 'sample', 'step', 'tokens', 'action_tokens'), int),
  **dict.fromkeys(('messages', 'turn_tokens', 'turn_rewards'), list),
  'metrics': dict,
  'reward': (int, float, str, type(None)),
  'error': (str, type(None)),
  **dict.fromkeys(('answer', 'info'), object),
}


def read_episodes(log: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the episodes of a log.

  Raises:
    ValueError: It cannot be read, or a line of it is no episode.
  """
  try:
    with log.open('rb') as lines:
      for number, line in enumerate(lines, start=1):
        try:
          yield _parse(line)
        except (ValueError, RecursionError) as error:
          raise ValueError(f'{log}, line {number} is no episode: {error}') from None
  except OSError as error:
    raise ValueError(f'{log} cannot be read: {error.strerror}') from None


def _parse(line: bytes) -> dict[str, Any]:
  episode = json.loads(line.rstrip(b'\n'), parse_constant=_refuse_constant)
  if not isinstance(episode, dict):
    raise ValueError('it is no object')
  if missing := sorted(_FIELDS.keys() - episode.keys()):
    raise ValueError(f'it has no {", ".join(missing)}')
  for name, kind in _FIELDS.items():
    if not isinstance(episode[name], kind):
      raise ValueError(f'its {name} is a {type(episode[name]).__name__}')
  for message in episode['messages']:
    match message:
      case {'role': str(), 'content': str()}:
        continue
    raise ValueError(f'a message has no role or no text: {json.dumps(message):.80}')
  return episode


def _refuse_constant(name: str):
  raise ValueError(f'{name} is no number of JSON')


def read_config(log: pathlib.Path) -> dict[str, Any]:
  """Returns the configuration of the run that wrote a log, or {} if it is not there."""
  settings = log.parents[1] / 'config.json'
  return json.loads(settings.read_text()) if settings.exists() else {}


def convert_to_inspect(log: pathlib.Path) -> dict[str, Any]:
  """Returns a log as the fields of Inspect's EvalLog."""
  episodes = [*read_episodes(log)]
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
  config = read_config(log)
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


def write_inspect(log: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Writes a log as one file of Inspect's, and returns its path."""
  from inspect_ai import log as inspect_log  # pyright: ignore[reportMissingImports]

  out = folder / f'{log.stem}.eval'
  inspect_log.write_eval_log(inspect_log.EvalLog(**convert_to_inspect(log)), out)
  return out


def write_atif(log: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Writes each episode of a log as a document of ATIF, and returns their folder."""
  out, model = folder / log.stem, read_config(log).get('model', {}).get('path')
  out.mkdir(exist_ok=True)
  for number, episode in enumerate(read_episodes(log), start=1):
    run = f'{log.parents[1].name}/{log.stem}/{episode["group"]}-{episode["sample"]}'
    try:
      atif.write(episode, out, run=run, model=model or 'policy')
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise ValueError(f'{log}, line {number}: {error!r}') from None
  return out


def main(argv):
  if len(argv) == 1:
    raise app.UsageError('Name the logs, or folders of them.')
  write: Callable[[pathlib.Path, pathlib.Path], pathlib.Path]
  write = {'atif': write_atif, 'inspect': write_inspect}[_TO.value]
  try:
    for path in map(pathlib.Path, argv[1:]):
      logs = sorted(path.glob('*.jsonl')) if path.is_dir() else [path]
      if not logs:
        raise ValueError(f'{path}: there is no log (*.jsonl) in it')
      for log in logs:
        folder = pathlib.Path(_OUT.value or log.parent / _TO.value)
        folder.mkdir(parents=True, exist_ok=True)
        print(write(log.absolute(), folder))
  except ModuleNotFoundError:
    raise SystemExit(
      'There is no inspect_ai here: install it as the top of '
      'experiments/convert_episodes.py says, in an environment of its own.'
    ) from None
  except ValueError as error:
    raise SystemExit(str(error)) from None


if __name__ == '__main__':
  app.run(main)
