"""Writes the model card of a run: the README.md of its repository on the Hub."""

from collections.abc import Iterator
import re

from agent_r1_jax.contrib.hub import run_record
from agent_r1_jax.report import tables

# Placeholder for the repository in a card, until the upload.
REPOSITORY = 'USER/NAME'

# vLLM's parsers of our tool call formats; 'auto' is mostly the first. vLLM has none for
# the other formats.
_PARSERS = {
  'auto': 'hermes',
  'hermes': 'hermes',
  'qwen3_coder': 'qwen3_coder',
  'mistral': 'mistral',
  'llama3': 'llama3_json',
}
_TRANSFORMERS = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained('{repository}')
tokenizer = AutoTokenizer.from_pretrained('{repository}')
```
"""
_PEFT = """
```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained('{repository}')  # And its base model.
```
"""
_OURS = """
```
hf download {repository} --local-dir policy
agent-r1-jax serve --config.model.path=policy
agent-r1-jax evaluate --config.model.path=policy --task=...
```
"""
_OUR_ADAPTER = """
```
hf download {base} --local-dir base
hf download {repository} --local-dir adapter
agent-r1-jax serve --config.model.path=base --adapter=mine=adapter
```
"""
_VLLM = """
```
vllm serve {repository}{parser}
```
"""
_VLLM_ADAPTER = """
```
vllm serve {base} --enable-lora \\
  --lora-modules mine={repository} --max-lora-rank {rank}{parser}
```
"""


def write(record: run_record.RunRecord, *, base: str = '', license_id: str = '') -> str:
  """Returns the text of a run's model card.

  It has no path of this machine. `upload.push` replaces USER/NAME by the repository.

  Args:
    record: The run.
    base: The Hub repository of the initial model; '' if it has none.
    license_id: The licence, by the Hub's identifier, such as 'apache-2.0'.
  """
  from huggingface_hub import ModelCardData  # Takes a second.

  is_adapter = record.part == 'adapter'
  sees = 'vision_config' in record.shape
  metadata = ModelCardData(
    library_name='peft' if is_adapter else 'transformers',
    pipeline_tag='image-text-to-text' if sees else 'text-generation',
    base_model=base or None,
    base_model_relation=('adapter' if is_adapter else 'finetune') if base else None,
    license=license_id or None,
    tags=['agent_r1_jax', 'reinforcement-learning', 'agent', 'tool-use'],
  )
  sections = {
    'Training': _describe_training(record, base),
    'Curve': _describe_curve(record),
    'Held-out tasks': re.sub('^#', '##', record.table.strip(), flags=re.M),
    'Configuration': _describe_config(record),
    'Use': _describe_use(record, base),
    'Limits': _list_limits(record, base, license_id),
  }
  text = ''.join(f'\n## {title}\n\n{body}\n' for title, body in sections.items() if body)
  head = f'---\n{metadata.to_yaml().strip()}\n---\n\n# {REPOSITORY}\n\n'
  return f'{head}{_introduce(record)}\n{text}'


def _introduce(record: run_record.RunRecord) -> str:
  """Writes a paragraph about the model."""
  count = sum(record.sizes.values())
  kind = ', '.join([*record.shape.get('architectures', ()), *sorted(record.sizes)])
  what = {
    'model': f'A language model of {count / 1e6:,.2f}M parameters ({kind})',
    'adapter': f'LoRA adapters of {count / 1e6:,.2f}M parameters ({kind})',
  }
  tools = [f'`{name}`' for name in run_record.list_tools(record)]
  acts = f' that call {_join(tools)}' if tools else ''
  return (
    f'{what[record.part]}, trained by reinforcement learning over episodes of several '
    f'turns{acts}. The training is a run of agent_r1_jax, an implementation of '
    '[Agent-R1](https://arxiv.org/abs/2511.14460) in JAX.'
  )


def _join(parts: list[str]) -> str:
  return ' and '.join([', '.join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _describe_training(record: run_record.RunRecord, base: str) -> str:
  """Makes a table of the model, the data and the training method."""
  config, made_of = record.config, record.made_of
  environment = made_of.get('environment') or {}
  reward = environment.get('reward') or ''
  reward = reward.get('function', '') if isinstance(reward, dict) else reward
  named = run_record.list_changes(record).get('model.path', '')
  local = f'a local model, in a folder named {named!r}' if named else ''
  rank = config.get('model.lora_rank')
  facts = {
    'base model': f'[{base}](https://huggingface.co/{base})' if base else local,
    'tasks': f'{count:,}' if (count := (made_of.get('tasks') or {}).get('count')) else '',
    'tools': ', '.join(run_record.list_tools(record)),
    'reward': run_record.shorten(reward),
    **run_record.describe_algorithm(record),
    'adapters': f'LoRA of rank {rank}' if rank else '',
    'steps': f'{record.steps:,} of {config["schedule.steps"]:,}, each of '
    f'{config["schedule.tasks"]} tasks with {config["schedule.samples"]} episodes',
    'learning rate': f'{config["optimizer.learning_rate"]:g}',
    'devices': config.get('devices', ''),
    'version': config.get('version', 'not recorded'),
  }
  rows = {name: {'': _escape(fact)} for name, fact in facts.items() if fact}
  return tables.format_table(rows, [''], corner='')


def _describe_curve(record: run_record.RunRecord) -> str:
  """Makes a table of the first and last reward and scores."""
  curve = run_record.summarize_curve(record)
  if not curve:
    return ''
  rows = {
    f'`{_escape(name)}`': {
      'first': f'{change.first:.4g} (step {change.first_step})',
      'last': f'{change.last:.4g} (step {change.last_step})',
      'episodes': '-' if change.episodes is None else str(change.episodes),
    }
    for name, change in curve.items()
  }
  columns = ['first', 'last', 'episodes']
  return (
    '`rollout/` is the mean over the training episodes of a step, and `eval/SET/` the '
    'mean over the tasks of SET that were played during the training to watch it.\n\n'
    + tables.format_table(rows, columns, corner='metric')
  )


def _describe_config(record: run_record.RunRecord) -> str:
  """Makes a table of the fields that differ from the defaults."""
  changes = run_record.list_changes(record)
  rows = {name: {'value': f'`{_escape(value)}`'} for name, value in changes.items()}
  table = tables.format_table(rows, ['value'], corner='field')
  return f'What is not a default of agent_r1_jax:\n\n{table}' if rows else ''


def _escape(text: str) -> str:
  """Escapes a text for a table cell."""
  return ' '.join(text.replace('|', r'\|').replace('`', "'").split())


def _describe_use(record: run_record.RunRecord, base: str) -> str:
  """Describes how to load it with transformers, this project and vLLM."""
  is_adapter = record.part == 'adapter'
  parser = _PARSERS.get(record.config['chat.tool_format'])
  options = f' \\\n  --enable-auto-tool-choice --tool-call-parser {parser}'
  names = {
    'repository': REPOSITORY,
    'base': base,
    'rank': record.config.get('model.lora_rank'),
    'parser': options if parser else '',
  }
  parts = {
    'With PEFT' if is_adapter else 'With transformers': (
      _PEFT if is_adapter else _TRANSFORMERS
    ),
    'With agent_r1_jax, which samples as in the training': (
      _OUR_ADAPTER if is_adapter else _OURS
    ),
    'With vLLM (not run by the training)': _VLLM_ADAPTER if is_adapter else _VLLM,
  }
  used = (f'{title}:\n{text.format(**names)}' for title, text in parts.items())
  return '\n'.join(used).strip()


def _list_limits(record: run_record.RunRecord, base: str, license_id: str) -> str:
  return '\n'.join(f'- {limit}' for limit in _find_limits(record, base, license_id))


def _find_limits(
  record: run_record.RunRecord, base: str, license_id: str
) -> Iterator[str]:
  """Yields what a reader must know before using the model."""
  config = record.config
  yield (
    f'Episodes of the training had at most {config["limits.max_turns"]} replies of '
    f'{config["limits.max_turn_tokens"]} tokens, in a context of '
    f'{config["engine.slots"]} tokens. Longer ones were not seen.'
  )
  yield (
    'It has learned what its reward pays for, in the prompts and with the tools of its '
    'training. Nothing else was measured, neither other tasks nor safety.'
  )
  if not record.table:
    yield 'There is no table of held-out tasks: the curve above was watched, not tested.'
  if not license_id:
    owner = f'of {base}' if base else 'of its base model and of its training data'
    yield f'No licence is stated here; the licence {owner} applies.'
