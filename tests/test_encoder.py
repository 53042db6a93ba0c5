"""The encoder against transformers: golden/make_encoder_golden.py made the numbers."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
import script

from agent_r1_jax.retrieval import encoder

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'encoder'
# As in make_encoder_golden.py, which imports torch.
TEXTS = (
  'query: who wrote Été à Oslo?',
  'a',
  '',
  'passage: Ann\nAnn was born in Oslo. 東京 [SEP] 42',
  'the sun rose over the hills and ' * 12,
)


@functools.cache
def _golden(pooling):
  with np.load(GOLDEN / 'vectors.npz') as file:
    return file[pooling]


@pytest.fixture
def directory(tmp_path):
  """A copy of the golden directory to be changed."""
  return pathlib.Path(shutil.copytree(GOLDEN, tmp_path / 'encoder'))


def _edit(path, **fields):
  raw = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps({k: v for k, v in (raw | fields).items() if v is not None}))


@pytest.mark.parametrize('pooling', ['mean', 'cls'])
def test_vectors_are_those_of_transformers(pooling):
  made = encoder.Encoder(GOLDEN, pooling=pooling)
  np.testing.assert_allclose(made.encode_queries(TEXTS), _golden(pooling), atol=2e-6)
  assert made.encode_queries([]).shape == (0, made.dim)


def test_bfloat16_is_close():
  found = encoder.Encoder(GOLDEN, dtype='bfloat16').encode_passages(TEXTS)
  error = np.linalg.norm(found - _golden('mean'), axis=1)
  assert found.dtype == np.float32 and 1e-4 < error.max() < 0.05


def test_a_text_does_not_depend_on_its_batch_and_few_programs_are_compiled():
  made = encoder.Encoder(GOLDEN)
  rng = np.random.default_rng(0)
  texts = [
    ' '.join(rng.choice(['the', 'who', 'born'], n)) for n in rng.integers(1, 60, 90)
  ]
  before = encoder.embed._cache_size()
  together = made.encode_passages(texts)
  assert encoder.embed._cache_size() - before <= 3
  for i in (0, 17, 89):
    alone = made.encode_passages([texts[i]])[0]
    np.testing.assert_allclose(together[i], alone, atol=2e-6)


_MANY = """
import jax, numpy as np
jax.config.update('jax_num_cpu_devices', 3)
from agent_r1_jax.retrieval import encoder
found = encoder.Encoder({directory!r}).encode_queries({texts!r})
assert jax.device_count() == 3
expected = np.load({directory!r} + '/vectors.npz')['mean']
np.testing.assert_allclose(found, expected, atol=2e-6)
"""


def test_texts_are_divided_over_the_devices():
  done = script.run('-c', _MANY.format(directory=str(GOLDEN), texts=TEXTS))
  assert done.returncode == 0, done.stderr


def test_prefixes(directory):
  made = encoder.Encoder(GOLDEN, query_prefix='who ', passage_prefix='the ')
  bare = encoder.Encoder(GOLDEN)
  for prefixed, text in (
    (made.encode_queries(['a']), 'who a'),
    (made.encode_passages(['a']), 'the a'),
  ):
    np.testing.assert_array_equal(prefixed, bare.encode_queries([text]))
  assert (bare.query_prefix, bare.passage_prefix) == ('', '')
  for name, expected in (
    ('e5-base-v2', ('query: ', 'passage: ')),
    ('models--BAAI--bge-small-en-v1.5/snapshots/5c38ec7c4e5f', encoder.PREFIXES['bge']),
    ('ae5b/abge', ('', '')),
  ):
    path = shutil.copytree(directory, directory.parent / name)
    named = encoder.Encoder(path)
    assert (named.query_prefix, named.passage_prefix) == expected
  prompts = {'query': 'ask: ', 'document': 'doc: '}
  _edit(path / 'config_sentence_transformers.json', prompts=prompts)
  named = encoder.Encoder(path)
  assert (named.query_prefix, named.passage_prefix) == ('ask: ', 'doc: ')


def test_the_forms_of_a_directory(directory):
  """Newer pooling files, a model with a head, integers among the tensors, no modules."""
  file = directory / 'model.safetensors'
  arrays = {f'bert.{k}': v for k, v in safetensors.numpy.load_file(file).items()}
  arrays['bert.embeddings.position_ids'] = np.arange(48)[None]
  safetensors.numpy.save_file(arrays, file)
  pooling = directory / '1_Pooling' / 'config.json'
  pooling.write_text('{"pooling_mode": "cls"}')
  made = encoder.Encoder(directory)
  np.testing.assert_allclose(made.encode_queries(TEXTS), _golden('cls'), atol=2e-6)
  (directory / 'modules.json').unlink()
  made = encoder.Encoder(directory, max_tokens=40)
  np.testing.assert_allclose(made.encode_queries(TEXTS), _golden('mean'), atol=2e-6)
  short = encoder.Encoder(directory, max_tokens=8).encode_queries(TEXTS[-1:])
  assert np.abs(short - _golden('mean')[-1:]).max() > 0.01


@pytest.mark.parametrize(
  ('file', 'fields', 'message'),
  [
    ('config.json', {'model_type': 'mpnet'}, 'config.json'),
    ('config.json', {'hidden_act': 'relu'}, 'hidden_act'),
    ('config.json', {'hidden_size': None}, 'hidden_size'),
    ('config.json', {'num_attention_heads': 5}, 'hidden_size'),
    ('config.json', {'num_hidden_layers': 3}, 'encoder.layer'),
    ('config.json', {'intermediate_size': 41}, 'config.json'),
    ('config.json', {'vocab_size': 80}, 'has 88 tokens, the'),
    ('tokenizer.json', {'model': None}, 'tokenizer.json'),
    ('1_Pooling/config.json', {'pooling_mode_max_tokens': True}, 'pooling_mode_max_tok'),
    ('1_Pooling/config.json', {'pooling_mode': 'max'}, 'max'),
    ('sentence_bert_config.json', {'max_seq_length': 'x'}, 'max_seq_length'),
  ],
)
def test_what_is_not_computed_is_refused(refused, directory, file, fields, message):
  _edit(directory / file, **fields)
  with refused(message):
    encoder.Encoder(directory)


def test_other_modules_and_arguments_are_refused(directory):
  for fields, message in (
    ({'max_tokens': 49}, 'max_tokens is 49; it must be 3 to 48'),
    ({'dtype': 'fp16'}, "dtype is 'fp16'"),
    ({'pooling': 'max'}, "pooling is 'max'"),
  ):
    with pytest.raises(ValueError, match=message):
      encoder.Encoder(GOLDEN, **fields)
  path = directory / 'modules.json'
  for text, message in (
    ('[{"type": "a.Dense", "path": "2"}]', 'module Dense is not supported'),
    ('[{"type": "a.Transformer", "path": ""}]', 'has no Pooling'),
    ('[{"path": ""}]', 'a module lacks type or path'),
    ('{}', 'holds no JSON array'),
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
      encoder.Encoder(directory)
