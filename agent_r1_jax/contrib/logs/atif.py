"""Harbor's Agent Trajectory Interchange Format, ATIF 1.8: writes and reads it.

A reply is a step of the agent, with the results of its calls as the step's observation.
Other messages are steps of the user or the system. If the log has an episode's token
columns, a reply has the ids and log-probs of its sampled tokens, and the ids of its
prompt.

Each segment, that is each context, is a document of its own. The last one is the root,
and its `subagent_trajectories` are the earlier ones, whether they were contexts of
sub-agents, forks or dropped contexts: the log does not say. A fork repeats no messages,
but its `prompt_token_ids` are complete.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
import hashlib
import itertools
import json
import pathlib
import re
from typing import Any

import agent_r1_jax
from agent_r1_jax.contrib.logs import log_files

_VERSION = 'ATIF-v1.8'
_AGENT = 'agent_r1_jax'
# The root's fields of an episode, besides the conversation.
_EXTRA = ('id', 'group', 'sample', 'step', 'status', 'error', 'answer', 'info', 'reward')
_CALL = re.compile(r'\s*<tool_call>.*?</tool_call>', re.DOTALL)
_PICTURE = '[picture]'
_SEVERAL = (
  'The episode had several contexts. This is the one that it ended with; the others are '
  'in subagent_trajectories.'
)
_REWRITTEN = (
  'The program gave replies that the policy never gave, so that the metrics of a step '
  'may be those of another reply.'
)
# Two frames of a video are one picture.
_ADDRESS = re.compile(
  'data:image/(jpeg|png|gif|webp);(?:film=[0-9]+;)?base64,(.*)', re.DOTALL
)


def write_log(log: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Writes each episode of a log as an ATIF document; returns their folder."""
  out, model = folder / log.stem, log_files.read_config(log).get('model', {}).get('path')
  out.mkdir(exist_ok=True)
  for number, episode in enumerate(log_files.read_episodes(log), start=1):
    run = f'{log.parents[1].name}/{log.stem}/{episode["group"]}-{episode["sample"]}'
    try:
      write_episode(episode, out, run=run, model=model or 'policy')
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise ValueError(f'{log}, line {number}: {error!r}') from None
  return out


def write_episode(
  episode: Mapping[str, Any], out: pathlib.Path, *, run: str, model: str
) -> pathlib.Path:
  """Writes an episode; returns the path of its document.

  Args:
    episode: A line of a log (agent_r1_jax/report/episodes.py).
    out: The folder for the document and its pictures.
    run: Distinguishes the episode from those of other logs.
    model: The trained model.

  Raises:
    ValueError: The log is of an earlier version, or the episode's parts do not match.
  """
  # A model's bytes can decode to lone surrogates, which readers reject.
  document = make_document(episode, run=run, model=model, folder=out)
  text = json.dumps(document, allow_nan=False, ensure_ascii=False)
  whole = json.loads(text.encode(errors='replace'))
  path = out / f'{int(episode["group"])}-{int(episode["sample"])}.json'
  path.write_text(json.dumps(whole) + '\n')
  return path


def make_document(
  episode: Mapping[str, Any], *, run: str, model: str, folder: pathlib.Path
) -> dict[str, Any]:
  """Returns an episode as an ATIF document; see `write_episode`.

  Pictures are written to `folder`.
  """
  if len(episode.get('turn_segments', ())) != len(episode['turn_tokens']):
    raise ValueError(
      'the log is of an earlier version, whose episodes do not say which segment a turn '
      'belongs to (turn_segments); --to=inspect reads it.'
    )
  metrics = make_metrics(episode)
  documents = []
  for number, messages in enumerate(split(episode)):
    steps = list(make_steps(messages, metrics, folder))
    if not steps:
      text = episode['error'] or 'The episode has no messages.'
      steps = [{'step_id': 1, 'source': 'system', 'message': text}]
    document = {
      'schema_version': _VERSION,
      'session_id': run,
      'trajectory_id': f'{run}/{number}',
      'agent': {'name': _AGENT, 'version': agent_r1_jax.__version__, 'model_name': model},
      'steps': steps,
      'final_metrics': sum_metrics(steps),
    }
    documents.append(document)
  *others, root = documents
  root['extra'] = {name: episode[name] for name in _EXTRA}
  root['final_metrics']['extra'] = {'reward': episode['reward'], **episode['metrics']}
  notes = []
  if others:
    root['subagent_trajectories'] = others
    notes.append(_SEVERAL)
  if episode['metrics'].get('rewritten'):
    notes.append(_REWRITTEN)
  return root | ({'notes': ' '.join(notes)} if notes else {})


def sum_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
  """Returns the sums of a document's metrics, as far as known."""
  of_steps = [step['metrics'] for step in steps if 'metrics' in step]
  sums = {
    f'total_{name}': sum(metrics[name] for metrics in of_steps)
    for name in ('prompt_tokens', 'completion_tokens')
    if all(name in metrics for metrics in of_steps)
  }
  return sums | {'total_steps': len(steps)}


def split(episode: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
  """Splits an episode's messages by segment.

  The log has one segment's messages after another's, and each segment except the last
  ends with a reply. Example replies in a prompt are not turns.
  """
  segments = episode['turn_segments']
  parts, turn = [[] for _ in range(max(segments, default=0) + 1)], 0
  for message in episode['messages']:
    parts[segments[min(turn, len(segments) - 1)] if segments else 0].append(message)
    turn = message.get('turn', turn)
  return parts


def make_metrics(episode: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns ATIF's metrics of each turn, with the ids of its tokens if logged.

  Raises:
    ValueError: The columns do not match the turns.
  """
  made = []
  spans = locate(episode)
  for i, length in enumerate(episode['turn_tokens']):
    extra = {'turn': i + 1, 'reward': episode['turn_rewards'][i]}
    made.append({'completion_tokens': length, 'extra': extra})
    if not spans:
      continue
    columns, (begin, start, stop) = episode['columns'], spans[i]
    prompt = columns['tokens'][begin:start]
    made[-1] |= {
      'prompt_tokens': len(prompt),
      'prompt_token_ids': prompt,
      'completion_token_ids': columns['tokens'][start:stop],
    }
    logprobs = columns['behaviour_logprobs'][start:stop]
    if all(isinstance(x, int | float) for x in logprobs):  # Text stands for NaN.
      made[-1]['logprobs'] = logprobs
    extra['policy_steps'] = sorted({*columns['policy_steps'][start:stop]})
  return made


def locate(episode: Mapping[str, Any]) -> list[tuple[int, int, int]]:
  """Returns each turn's place in the columns: its segment's begin, its start and stop.

  Empty if the episode was logged without token columns.
  """
  if 'columns' not in episode:
    return []
  columns, spans = episode['columns'], []
  begins = [0, *itertools.accumulate(columns['segments'])]
  mask = columns['action_mask']
  ends = dict(enumerate(begins))
  for segment, length in zip(
    episode['turn_segments'], episode['turn_tokens'], strict=True
  ):
    after = ends[segment]
    start = mask.index(1, after) if 1 in mask[after:] else len(mask)
    stop = start + length
    if stop > begins[segment + 1] or not all(mask[start:stop]):
      raise ValueError('the columns of its tokens do not fit its turns')
    spans.append((begins[segment], start, stop))
    ends[segment] = stop
  return spans


def make_steps(
  messages: Sequence[Mapping[str, Any]],
  metrics: Sequence[Mapping[str, Any]],
  folder: pathlib.Path,
) -> Iterator[dict[str, Any]]:
  """Yields the steps of a segment; see `make_document`."""
  numbers = itertools.count(1)
  i = 0
  while i < len(messages):
    message, i = messages[i], i + 1
    role = message['role']
    results = list(itertools.takewhile(lambda m: m['role'] == 'tool', messages[i:]))
    step: dict[str, Any]
    if role == 'tool':  # No reply before it in this context.
      step, results = {'source': 'system', 'message': ''}, [message, *results]
      i -= 1
    elif role == 'assistant':
      step = make_reply(message, metrics)
    else:
      source = role if role == 'user' else 'system'
      step, results = {'source': source, 'message': _make_content(message, folder)}, []
      if role not in ('user', 'system'):
        step['extra'] = {'role': role}
    i += len(results)
    calls: Any = step.get('tool_calls', ())
    ids = itertools.chain(
      (call['tool_call_id'] for call in calls), itertools.repeat(None)
    )
    if results:
      step['observation'] = {
        'results': [
          {
            'source_call_id': id_,
            'content': _make_content(result, folder),
            'extra': {'name': result.get('name')},
          }
          for id_, result in zip(ids, results, strict=False)
        ]
      }
    yield {'step_id': next(numbers)} | step


def make_reply(
  message: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns a step of the agent, without its observation.

  Calls in Hermes form are removed from the message, because readers write a step's calls
  after it; `extra` has the original text. Other forms stay in the message.
  """
  turn, text = message.get('turn'), message['content']
  calls = [
    {
      'tool_call_id': f'call-{turn or 0}-{i}',
      'function_name': str(call.get('name', '')),
      'arguments': call.get('arguments', {}),
    }
    | ({'extra': {'error': call['error']}} if 'error' in call else {})
    for i, call in enumerate(message.get('calls', ()))
  ]
  step: dict[str, Any] = {'source': 'agent', 'message': text}
  if calls and len(_CALL.findall(text)) == len(calls):
    step |= {'message': _CALL.sub('', text), 'extra': {'text': text}}
  if calls:
    step['tool_calls'] = calls
  if turn is None:  # An example in the prompt, which is not trained on.
    return step | {'is_copied_context': True}
  return step | {'metrics': metrics[turn - 1], 'llm_call_count': 1}


def _make_content(message: Mapping[str, Any], folder: pathlib.Path) -> Any:
  """Returns a text, or the parts of a message with pictures, which become files."""
  text, addresses = message['content'], message.get('pictures', ())
  if not addresses:
    return text
  texts = text.split(_PICTURE)
  if len(texts) != len(addresses) + 1:  # The text itself has these words.
    texts = [text, *[''] * len(addresses)]
  parts = []
  for piece, address in itertools.zip_longest(texts, addresses):
    if piece:
      parts.append({'type': 'text', 'text': piece})
    if address:
      parts.append({'type': 'image', 'source': _write_picture(address, folder)})
  return parts


def _write_picture(address: str, folder: pathlib.Path) -> dict[str, str]:
  """Writes a picture, unless it exists; returns its source."""
  if not (match := _ADDRESS.match(address)):
    raise ValueError(f'ATIF has no pictures of this kind: {address:.40}')
  kind, data = match[1], base64.b64decode(match[2])
  path = f'{hashlib.sha256(data).hexdigest()[:16]}.{kind}'
  (folder / path).write_bytes(data)
  return {'media_type': f'image/{kind}', 'path': path}


def read_conversations(
  path: pathlib.Path, render: Callable[[str, dict[str, Any]], str]
) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
  """Reads any agent's document for supervised fine-tuning.

  A document gives one conversation, and so does each of its subagent_trajectories. The
  part after the last reply is left out. Conversations without replies, or with a reply
  copied from elsewhere, are skipped, since all replies of a conversation are learned.

  Args:
    path: The document.
    render: Writes a call, given its name and arguments, in the model's format.

  Returns:
    Each conversation's messages and tool schemas: the fields of an sft.Conversation.

  Raises:
    ValueError: It is not an ATIF document, or has pictures.
  """
  try:
    root = json.loads(path.read_bytes())
    if not root['schema_version'].startswith('ATIF-v1.'):
      raise ValueError(f'its schema_version is {root["schema_version"]!r}')
    documents = [*(root.get('subagent_trajectories') or ()), root]
    made = [_read_document(document, render) for document in documents]
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise ValueError(f'{path} is no document of ATIF: {error!r}') from None
  return [(messages, tools) for messages, tools in made if messages]


def _read_document(document: Mapping[str, Any], render) -> tuple[list, list]:
  messages: list[dict[str, Any]] = []
  for step in document['steps']:
    role = {'agent': 'assistant'}.get(step['source'], step['source'])
    calls = step.get('tool_calls') or ()
    if role == 'assistant' and step.get('is_copied_context'):
      return [], []
    thought = step.get('reasoning_content')
    texts = [f'<think>\n{thought}\n</think>\n'] if thought else []
    texts += [
      step['message'],
      *(render(c['function_name'], c['arguments']) for c in calls),
    ]
    messages.append({'role': role, 'content': '\n'.join(filter(None, texts))})
    names = {call['tool_call_id']: call['function_name'] for call in calls}
    for result in (step.get('observation') or {}).get('results', ()):
      name = names.get(result.get('source_call_id'), 'tool')
      content = result.get('content') or ''
      messages.append({'role': 'tool', 'name': name, 'content': content})
  if not all(isinstance(message['content'], str) for message in messages):
    raise ValueError('a content is no text; pictures are not read')
  while messages and messages[-1]['role'] != 'assistant':
    messages.pop()
  return messages, document['agent'].get('tool_definitions') or []
