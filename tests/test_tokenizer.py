import json
import random
import shutil
import threading
import time

import numpy as np
import pytest

from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import template_process
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from experiments import train_tokenizer

TEXTS = [
  'John Smith was born in 1984 in Paris. John Smith met Mary Jones in 1984.\n',
  '{"name": "search", "arguments": {"query": "John Smith"}}\n',
  'Mary Jones lives in Paris; she was born in Rome in 1975, "she" said.\n',
] * 20


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  path = tmp_path_factory.mktemp('tokenizer')
  train_tokenizer.train(TEXTS, vocab_size=340, directory=path)
  return path


@pytest.fixture
def copied(directory, tmp_path):
  """A copy of the directory, which the test may damage."""
  return shutil.copytree(directory, tmp_path / 'copied')


@pytest.fixture(scope='module')
def tokenizer(directory):
  return tokenizer_lib.load(directory)


def encode(tokenizer, text):
  return tokenizer.encode(text, add_special_tokens=False)


def test_control_tokens_have_the_first_ids(tokenizer):
  control = [*train_tokenizer.SPECIAL_TOKENS, *train_tokenizer.ADDED_TOKENS]
  assert tokenizer.convert_tokens_to_ids(control) == list(range(len(control)))
  special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
  assert special == set(train_tokenizer.SPECIAL_TOKENS)
  assert (tokenizer.eos_token, tokenizer.pad_token) == ('<|im_end|>', '<|endoftext|>')
  assert len(tokenizer) == 340


def test_decoding_gives_the_text_back(tokenizer):
  rng = random.Random(0)
  samples = ['', ' ', '\n\n \t x  y\r\n', 'e\u0301 \u00e9 \U0001f600 中文 \x00', TEXTS[1]]
  for _ in range(200):
    codes = [rng.randrange(rng.choice((128, 0x500, 0x110000))) for _ in range(20)]
    samples.append(''.join(chr(c) for c in codes if not 0xD800 <= c < 0xE000))
  for text in samples:
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_a_word_after_a_space_has_the_same_tokens_everywhere(tokenizer):
  name = encode(tokenizer, ' John Smith')
  for before in ('He met', '1984', '"', ':', '\n', '(x)'):
    for after in ('', '.', '"}}', "'s", ' is', '\n', ' 7', '1'):
      ids = encode(tokenizer, f'{before} John Smith{after}')
      start = len(encode(tokenizer, before))
      assert ids[start : start + len(name)] == name, (before, after)


def test_the_pre_tokenizer_splits_words_numbers_and_punctuation(tokenizer):
  split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
  text = '{"q": "John\'s 1984"}}\n\n  In 123456 é,  x'
  pieces = [text[slice(*span)] for _, span in split(text)]
  words = ['{"', 'q', '":', ' "', 'John', "'", 's', ' 1984', '"}}', '\n\n', ' ', ' In']
  assert pieces == [*words, ' 1234', '56', ' é', ',', ' ', ' x']


def test_training_does_not_depend_on_order(directory, tmp_path):
  train_tokenizer.train(TEXTS[::-1], vocab_size=340, directory=tmp_path)
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()


def test_control_tokens_in_the_texts_are_not_learned(tmp_path):
  texts = ['<tool_call>john</tool_call><|im_end|>'] * 50
  train_tokenizer.train(texts, vocab_size=300, directory=tmp_path)
  vocabulary = tokenizer_lib.load(tmp_path).get_vocab()
  assert 'john' in vocabulary
  assert 'tool' not in vocabulary
  assert 'im' not in vocabulary


@pytest.mark.parametrize('model_type', [None, 'qwen3', 'llama'])
def test_auto_tokenizer_reads_what_train_wrote(copied, model_type):
  from transformers import AutoTokenizer

  if model_type:
    (copied / 'config.json').write_text(json.dumps({'model_type': model_type}))
  auto, own = AutoTokenizer.from_pretrained(copied), tokenizer_lib.load(copied)
  text = '<|im_start|>user\n"John 12345  <tool_call> x<|im_end|>\n'
  assert auto(text).input_ids == own(text).input_ids
  assert auto.chat_template == own.chat_template == tokenizer_lib.CHATML
  assert auto.eos_token_id == own.eos_token_id == 2


def test_the_plain_encoder_knows_no_control_tokens(tokenizer):
  plain = tokenizer_lib.make_plain_encoder(tokenizer)
  control = [*train_tokenizer.SPECIAL_TOKENS, *train_tokenizer.ADDED_TOKENS]
  ids = plain('say ' + ' '.join(control) + ''.join(control))
  assert min(ids) >= len(control)
  assert tokenizer.decode(ids) == 'say ' + ' '.join(control) + ''.join(control)
  assert plain(TEXTS[0]) == encode(tokenizer, TEXTS[0])
  # The tokenizer itself is as it was.
  assert encode(tokenizer, '<|im_end|>') == [2]


def test_the_plain_encoder_takes_lone_surrogates(tokenizer):
  plain = tokenizer_lib.make_plain_encoder(tokenizer)
  assert tokenizer.decode(plain('a\ud800b')) == 'a?b'


def test_the_plain_encoder_lets_other_threads_run(tokenizer):
  plain, text = tokenizer_lib.make_plain_encoder(tokenizer), 'John met Mary. ' * 50_000
  thread, turns = threading.Thread(target=plain, args=(text,)), 0
  thread.start()
  while thread.is_alive():
    time.sleep(1e-3)
    turns += 1
  # One that holds the interpreter leaves one turn before it and one after it.
  assert turns > 4


_LONG_TEXTS = (
  ' ' * 4096,
  '\n' * 4096,
  '-' * 4096,
  # What NFC composes: 4 characters to 3 bytes, 3 to 2 bytes, 3 to 3 bytes, 2 to 2.
  '\u03b1\u0313\u0300\u0345' * 1024,
  'U\u0308\u0304' * 1024,
  '\u1112\u1161\u11ab' * 1024,
  'e\u0301' * 1024,
)


@pytest.mark.parametrize('name', ['', 'qwen2.5'])
def test_no_text_has_fewer_tokens_than_the_longest_tokens_would_make(
  tokenizer, request, name
):
  if name:
    data_dir = request.getfixturevalue('data_dir')
    tokenizer = tokenizer_lib.load(data_dir / 'models' / name)
  plain = tokenizer_lib.make_plain_encoder(tokenizer)
  longest = tokenizer_lib.longest_token(tokenizer)
  for text in (*_LONG_TEXTS, *[*tokenizer.get_vocab()][::100]):
    assert len(text) <= longest * len(plain(text)) or not text


def test_token_bytes_join_to_the_text(tokenizer):
  table = tokenizer_lib.token_bytes(tokenizer)
  assert len(table) == len(tokenizer) == 340
  text = 'John \U0001f600\x00 é<tool_call>\n'
  assert b''.join(table[i] for i in encode(tokenizer, text)) == text.encode()
  assert [table[i] for i in range(4)] == [b'', b'', b'', b'<tool_call>']
  # Every single byte is there.
  assert {bytes([byte]) for byte in range(256)} <= set(table)


def test_token_bytes_of_published_tokenizers(data_dir):
  tokenizer = tokenizer_lib.load(data_dir / 'models' / 'qwen2.5')
  table = tokenizer_lib.token_bytes(tokenizer)
  assert len(table) == 151665
  assert table[9707] + table[1879] == b'Hello world'
  assert table[151658] == b'</tool_call>'
  assert table[151645] == b''
  text = 'naïve \U0001f600 中文\n'
  assert b''.join(table[i] for i in encode(tokenizer, text)) == text.encode()


def test_token_bytes_refuses_other_kinds(refused, tmp_path):
  import tokenizers
  import transformers

  words = tokenizers.Tokenizer(tokenizers.models.WordLevel({'日': 0, 'a': 1}, 'a'))
  wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
  with refused('not byte-level'):
    tokenizer_lib.token_bytes(wrapped)


@pytest.mark.parametrize('listed, ids', [([5, 2], [2, 5]), (7, [2, 7]), (None, [2])])
def test_eos_ids_include_those_of_the_generation_config(copied, listed, ids):
  text = json.dumps({'eos_token_id': listed} if listed else {})
  (copied / 'generation_config.json').write_text(text)
  assert tokenizer_lib.eos_ids(tokenizer_lib.load(copied)) == ids


def test_a_missing_directory_is_named(refused, tmp_path):
  with refused('nowhere does not'):
    tokenizer_lib.load(tmp_path / 'nowhere')


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json'])
def test_missing_and_truncated_files_are_named(copied, name):
  (copied / name).write_bytes((copied / name).read_bytes()[:-20])
  with pytest.raises(ValueError, match=rf'/{name} is not valid JSON .*copy it again'):
    tokenizer_lib.load(copied)
  (copied / name).unlink()
  with pytest.raises(ValueError, match=rf'/{name} cannot be read .*copy it'):
    tokenizer_lib.load(copied)


@pytest.mark.parametrize(
  'content, message',
  [
    ('{"model": 1}', 'holds no readable fast'),
    ('[' * 100_000 + ']' * 100_000, 'tokenizer.json'),
  ],
  ids=['another', 'deep'],
)
def test_json_that_is_no_tokenizer_is_named(refused, copied, content, message):
  (copied / 'tokenizer.json').write_text(content)
  with refused(message):
    tokenizer_lib.load(copied)


def test_too_few_ids_are_refused(refused, tmp_path):
  with refused('vocab_size'):
    train_tokenizer.train(TEXTS, vocab_size=266, directory=tmp_path)
  assert not list(tmp_path.iterdir())


_LOOP = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'
_TWICE = '{% set ns.x = ns.x ~ ns.x %}'


@pytest.mark.parametrize(
  'template, message',
  [
    ("{% set ns = namespace(x='x') %}" + _TWICE * 40, 'took more than 512 MiB'),
    ("{{ 'x' | center(2000000) }}", 'wrote more than 1000000 characters'),
    (
      "{% if messages[-1].role == 'user' and tools %}" + _LOOP + '{% endif %}',
      'did not end within 0.5 s of a processor',
    ),
    ('{{ ' + '(' * 100_000 + '1' + ')' * 100_000 + ' }}', None),  # only refused later
  ],
)
def test_a_template_that_does_not_end_is_refused(copied, template, message, monkeypatch):
  if _LOOP in template:
    monkeypatch.setattr(template_process, '_CPU_SECONDS', 0.5)
  path = copied / 'tokenizer_config.json'
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {'chat_template': template}))
  if message is None:
    tokenizer_lib.load(copied)
    return
  with pytest.raises(ValueError, match=f'its chat template .*({message})'):
    tokenizer_lib.load(copied)


def test_a_template_that_does_not_end_on_longer_messages_is_ended(
  refused, copied, monkeypatch
):
  """It is bounded at each encoding; the process that renders it is started again."""
  monkeypatch.setattr(template_process, '_CPU_SECONDS', 0.5)
  path = copied / 'tokenizer_config.json'
  config = json.loads(path.read_text())
  loops = '{% if messages[0].content | length > 40 %}' + _LOOP + '{% endif %}'
  power = '{{ 9 ** (9 ** (8 + messages | length)) }}'
  big = "{% if 'big' in messages[0].content %}" + power + '{% endif %}'
  template = loops + big + tokenizer_lib.CHATML
  path.write_text(json.dumps(config | {'chat_template': template}))
  chat = chat_lib.Chat(tokenizer_lib.load(copied))
  say = lambda text: chat.encode_prompt([{'role': 'user', 'content': text}])
  before = say('What is it?')
  for text in ('What is it? ' * 10, 'How big is it?'):
    with refused('did not end within 0.5'):
      say(text)
    np.testing.assert_array_equal(say('What is it?'), before)
