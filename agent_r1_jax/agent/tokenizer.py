"""Loads and inspects tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any

from agent_r1_jax.agent import template_process
from agent_r1_jax.host import model_paths

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerFast

# The chat template of models that we train from scratch: Qwen2.5's, with the shortest
# possible system message.
CHATML = """\
{%- set ns = namespace(system='') %}
{%- if messages and messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
{%- endif %}
{%- if tools %}
    {%- set ns.system = ns.system + ('\\n' if ns.system else '') + 'Tools: ' +
          (tools | map(attribute='function.name') | join(', ')) %}
{%- endif %}
{%- if ns.system %}
    {{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def load(directory: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
  """Loads a tokenizer in Hugging Face layout from a local directory.

  Given a file, it uses the file's directory.

  tokenizer.json is used unchanged. (AutoTokenizer of transformers 5 does the same, except
  with model_type 'qwen2' in config.json: it then replaces the pre-tokenizer of a
  tokenizer from experiments/train_tokenizer.py with Qwen2's, and the ids differ. Use
  another family for your own models.)

  Raises:
    ValueError: The directory or a file in it is missing, truncated or unreadable, or the
      chat template does not end in time.
  """
  # Set before the import, which otherwise warns that PyTorch is missing.
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  from transformers import PreTrainedTokenizerFast

  directory = model_paths.get_directory(directory)
  if not directory.is_dir():
    raise ValueError(
      f'tokenizer directory {directory} does not exist; give the folder that holds '
      'tokenizer.json and tokenizer_config.json.'
    )
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    _read_json(directory / name)
  try:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
      str(directory), local_files_only=True
    )
  except Exception as error:  # The library raises a bare Exception.
    raise ValueError(
      f'{directory} holds no readable fast tokenizer ({error}); copy tokenizer.json and '
      'tokenizer_config.json again.'
    ) from error
  templates = tokenizer.chat_template or {}
  for template in templates.values() if isinstance(templates, dict) else [templates]:
    if template != CHATML and (
      problem := template_process.find_process(template).problem
    ):
      raise ValueError(
        f'{directory}: its chat template {problem} on a conversation of a few words. '
        'Take the model from where you trust it, or fix "chat_template" in '
        'tokenizer_config.json (or chat_template.jinja).'
      )
  return tokenizer


def make_plain_encoder(
  tokenizer: PreTrainedTokenizerFast, mark: str = ''
) -> Callable[[str], list[int]]:
  """Makes an encoder without control tokens: '<|im_end|>' becomes ordinary text.

  It encodes any string; lone surrogates become '?'. With a mark, the text f'{mark}7z' is
  encoded as the control token 7 with that token's settings (whitespace that it absorbs,
  how the text after it is split), and f'{mark}z' as -1, which stands for preceding text.
  """
  import tokenizers

  backend = tokenizer.backend_tokenizer
  twin = tokenizers.Tokenizer(backend.model)
  twin.normalizer = backend.normalizer
  twin.pre_tokenizer = backend.pre_tokenizer
  ids: dict[Any, int] = {}
  if mark:
    marks = {-1: tokenizers.AddedToken(f'{mark}z', normalized=False)}
    for i, token in backend.get_added_tokens_decoder().items():
      strips = {'lstrip': token.lstrip, 'rstrip': token.rstrip}
      normalized = token.normalized
      marks[i] = tokenizers.AddedToken(f'{mark}{i}z', normalized=normalized, **strips)
    twin.add_tokens([*marks.values()])
    ids = {twin.token_to_id(token.content): i for i, token in marks.items()}

  def encode(text: str) -> list[int]:
    text = text.encode('utf-8', errors='replace').decode('utf-8')
    # Unlike `encode`, this releases the GIL and computes no offsets, which take a hundred
    # times the text's memory.
    encoded = twin.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return [ids.get(i, i) for i in encoded] if mark else encoded

  return encode


def find_affixes(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
  """Returns the ids that the tokenizer adds before and after a text, such as a BOS."""
  backend = tokenizer.backend_tokenizer
  text, both = (backend.encode('x', add_special_tokens=s).ids for s in (False, True))
  starts = range(len(both) - len(text) + 1)
  start = next((i for i in starts if both[i : i + len(text)] == text), 0)
  return both[:start], both[start + len(text) :]


def make_stream_decoder(
  tokenizer: PreTrainedTokenizerFast,
) -> Callable[[list[int]], str]:
  """Makes a function that decodes a reply incrementally, given its next tokens.

  An incomplete character at the end waits for the next tokens.
  """
  from tokenizers import decoders

  stream = decoders.DecodeStream(skip_special_tokens=False)
  return lambda ids: stream.step(tokenizer.backend_tokenizer, ids) or ''


def longest_token(tokenizer: PreTrainedTokenizerFast) -> int:
  """Returns the maximum number of characters of a text that one token can stand for.

  A byte-level token is written with one character per byte, which is a character of the
  text or part of one. A normalizer may compose characters: NFC composes at most 3
  characters into one of 2 bytes.
  """
  longest = max(map(len, tokenizer.get_vocab()))
  return longest if tokenizer.backend_tokenizer.normalizer is None else 2 * longest


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
  """Returns the bytes of each id; b'' for special tokens and unused ids.

  A model's vocabulary may have more rows than the tokenizer has ids.

  Raises:
    ValueError: The tokenizer is not byte-level.
  """
  chars = _map_byte_chars()
  added = tokenizer.added_tokens_decoder
  size = 1 + max(tokenizer.get_vocab().values())
  result = [b''] * size
  for token, i in tokenizer.get_vocab().items():
    try:
      # Learned tokens are written in GPT-2's characters, one per byte.
      if i not in added:
        result[i] = bytes(chars[char] for char in token)
      elif not added[i].special:
        result[i] = added[i].content.encode()
    except KeyError:
      raise ValueError(
        f'token {token!r} ({i}) of {tokenizer.name_or_path} is not byte-level; use a '
        'model with a byte-level BPE tokenizer (Qwen2, Qwen3, Llama 3).'
      ) from None
  return result


def eos_ids(tokenizer: PreTrainedTokenizerFast) -> list[Any]:
  """Returns the ids that end generation: eos, and generation_config.json's."""
  path = pathlib.Path(tokenizer.name_or_path) / 'generation_config.json'
  listed: Any = _read_json(path).get('eos_token_id') if path.is_file() else None
  ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
  return [i for i in dict.fromkeys(ids) if i is not None]


def render(
  tokenizer: PreTrainedTokenizerFast,
  messages: list[Any],
  tools: Sequence[dict[str, Any]],
  options: dict[str, Any],
) -> str:
  """Renders messages with the tokenizer's chat template.

  The option 'strftime_now' is the date that a template's function of that name formats.

  Raises:
    ValueError: The template rejects the messages, or exceeds its time or memory limit.
  """
  template = tokenizer.get_chat_template(tools=list(tools) or None)
  if template == CHATML:
    options = {'tools': list(tools) or None, 'tokenize': False, **options}
    text: Any = tokenizer.apply_chat_template(messages, **options)
    return text
  # The library also drops fields that are None.
  messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
  options = {**tokenizer.special_tokens_map, **options}
  return template_process.find_process(template).render(
    [messages], list(tools) or None, options
  )


def _map_byte_chars() -> dict[str, int]:
  """Maps GPT-2's printable characters to the bytes that they stand for."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  chars = {chr(byte): byte for byte in printable}
  return chars | {chr(256 + i): byte for i, byte in enumerate(others)}


def _read_json(path: pathlib.Path) -> dict:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror}); copy it from the model.'
    ) from error
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{path} is not valid JSON ({error}); the file is truncated or only a pointer to a '
      'large file: copy it again.'
    ) from error
