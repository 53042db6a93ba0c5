"""Loads, trains and inspects tokenizers; only this file imports the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import json
import os
import pathlib
import re
from typing import TYPE_CHECKING, Any

from agent_r1_jax.agent import template_process
from agent_r1_jax.host import model_paths

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerFast

# The chat template of models that we train ourselves: that of Qwen2.5 with the shortest
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

SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
# The brackets keep a control token different from anything that merges can build.
ADDED_TOKENS = (
  '<tool_call>',
  '</tool_call>',
  '<tool_response>',
  '</tool_response>',
  '<answer>',
  '</answer>',
  '<think>',
  '</think>',
)

# The pieces within which BPE merges: a word with its leading space, so that a name has
# the same tokens in every text; a number of up to four digits (a year); a run of
# punctuation (`{"`, `":`, `"}}`); a run of newlines.
_PIECES = '|'.join(
  (
    r' ?[\p{L}\p{M}]+',
    r' ?\p{N}{1,4}',
    r'[\r\n]+',
    r' ?[^\s\p{L}\p{M}\p{N}]+',
    r'[^\S\r\n]+(?!\S)',
    r'[^\S\r\n]+',
  )
)


def load(directory: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
  """Loads a tokenizer in Hugging Face layout from a local directory.

  For a file it is the directory that holds the file.

  tokenizer.json is used unchanged. (AutoTokenizer of transformers 5 does so too, unless
  config.json has the model_type 'qwen2': then it forces Qwen2's pre-tokenizer on what
  `train` wrote, and the ids differ. Give a model of our own another family.)

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


def train(
  texts: Iterable[str],
  *,
  vocab_size: int,
  directory: str | os.PathLike[str],
  chat_template: str = CHATML,
  more_tokens: Sequence[str] = (),
) -> None:
  """Trains a lossless byte-level BPE tokenizer and writes it in Hugging Face layout.

  The ids are SPECIAL_TOKENS, ADDED_TOKENS, `more_tokens`, the 256 bytes and the merges,
  in this order. The result depends on the texts, and not on their order or the machine.

  Control tokens in the texts are skipped. There are fewer than `vocab_size` ids if the
  texts have too few pairs. `more_tokens` are further texts of one token each.

  Raises:
    ValueError: vocab_size is too small for bytes.
  """
  control = [*SPECIAL_TOKENS, *ADDED_TOKENS, *more_tokens]
  if vocab_size < len(control) + 256:
    raise ValueError(
      f'vocab_size={vocab_size} is too small: {len(control)} control tokens and 256 '
      f'bytes need at least {len(control) + 256}.'
    )
  tokenizer = _train_bpe(texts, vocab_size, control)
  for token in tokenizer['added_tokens']:
    token['special'] = token['content'] in SPECIAL_TOKENS
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'eos_token': '<|im_end|>',
    'pad_token': '<|endoftext|>',
    'clean_up_tokenization_spaces': False,
    'chat_template': chat_template,
  }
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for name, value in (('tokenizer', tokenizer), ('tokenizer_config', config)):
    text = json.dumps(value, ensure_ascii=False, indent=1)
    (directory / f'{name}.json').write_text(text + '\n', encoding='utf-8')


def _train_bpe(
  texts: Iterable[str], vocab_size: int, control: Sequence[str]
) -> dict[str, Any]:
  """Trains byte-level BPE on the text between control tokens; returns tokenizer.json."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    min_frequency=2,
    special_tokens=list(control),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  split = re.compile('|'.join(map(re.escape, control))).split
  bpe.train_from_iterator((part for text in texts for part in split(text)), trainer)
  return json.loads(bpe.to_str())


def make_plain_encoder(
  tokenizer: PreTrainedTokenizerFast, mark: str = ''
) -> Callable[[str], list[int]]:
  """Makes an encoder without control tokens: '<|im_end|>' becomes ordinary text.

  It encodes any string; lone surrogates become '?'. With a mark, the text f'{mark}7z' is
  the control token 7, as that token's settings say (whitespace that belongs to it, how
  the text after it is split), and f'{mark}z' is one that stands for what came before: -1.
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
    # Unlike `encode`, it lets other threads run meanwhile, and it notes no offsets, which
    # take a hundred times the text's memory.
    encoded = twin.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return [ids.get(i, i) for i in encoded] if mark else encoded

  return encode


def find_affixes(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
  """Returns the ids that the tokenizer writes before and after a text, such as a BOS."""
  backend = tokenizer.backend_tokenizer
  text, both = (backend.encode('x', add_special_tokens=s).ids for s in (False, True))
  starts = range(len(both) - len(text) + 1)
  start = next((i for i in starts if both[i : i + len(text)] == text), 0)
  return both[:start], both[start + len(text) :]


def make_stream_decoder(
  tokenizer: PreTrainedTokenizerFast,
) -> Callable[[list[int]], str]:
  """Makes a function that returns the text of further tokens of a reply.

  Where the last of them ends within a character, they wait for the next ones.
  """
  from tokenizers import decoders

  stream = decoders.DecodeStream(skip_special_tokens=False)
  return lambda ids: stream.step(tokenizer.backend_tokenizer, ids) or ''


def longest_token(tokenizer: PreTrainedTokenizerFast) -> int:
  """Returns how many characters of a text one token can stand for, at most.

  A token of a byte-level tokenizer is written with a character for each byte, which is a
  character of the text or a part of one. A normalizer may compose characters: NFC makes
  at most 3 of a text into one of 2 bytes.
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
      # A token that was learned is written in GPT-2's characters, one for each byte.
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
  """Returns the ids that end generation: eos, and those of generation_config.json."""
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

  The option 'strftime_now' is the day of which a template's function of that name tells.

  Raises:
    ValueError: The template refuses them, or takes more than its share of time or memory.
  """
  template = tokenizer.get_chat_template(tools=list(tools) or None)
  if template == CHATML:
    options = {'tools': list(tools) or None, 'tokenize': False, **options}
    text: Any = tokenizer.apply_chat_template(messages, **options)
    return text
  # The library, too, leaves out what is None.
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
