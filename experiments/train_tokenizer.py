"""Trains the tokenizers of models trained from scratch."""

from collections.abc import Iterable, Sequence
import json
import os
import pathlib
import re
from typing import Any

from agent_r1_jax.agent import tokenizer

SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
# The brackets distinguish a control token from anything that merges can build.
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

# The units within which BPE merges: a word with its leading space, so that a name has the
# same tokens in every text; a number of up to four digits (a year); a run of punctuation
# (`{"`, `":`, `"}}`); a run of newlines.
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


def train(
  texts: Iterable[str],
  *,
  vocab_size: int,
  directory: str | os.PathLike[str],
  chat_template: str = tokenizer.CHATML,
  more_tokens: Sequence[str] = (),
) -> None:
  """Trains a lossless byte-level BPE tokenizer and writes it in Hugging Face layout.

  The ids are SPECIAL_TOKENS, ADDED_TOKENS, `more_tokens`, the 256 bytes and the merges,
  in this order. The result depends on the texts, but not on their order or the machine.

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
  trained = _train_bpe(texts, vocab_size, control)
  for token in trained['added_tokens']:
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
  for name, value in (('tokenizer', trained), ('tokenizer_config', config)):
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
