"""Saving a Hugging Face directory: whole or not at all, with its tokenizer."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import test_weights

from agent_r1_jax.models.files import tensor_files, weights


def _edit(file, **fields):
  file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def llama():
  """The config and the parameters of a small model."""
  config = test_weights.make_config('llama')
  return config, test_weights.make_params(config)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda p: p['final_norm'].clear(), 'params: no final_norm/scale, which config'),
    (lambda p: p.update(extra={'x': np.ones(3)}), 'params: extra/x has no place'),
    (lambda p: p['lm_head'].update(kernel=np.ones((40, 12), 'f4')), r'is \(12, 40\)'),
    (lambda p: p['lm_head'].update(kernel=np.ones((12, 40))), 'dtype is float64'),
  ],
)
def test_wrong_params_are_named_and_nothing_is_written(tmp_path, change, message, llama):
  config, params = llama
  change(params)
  with pytest.raises(ValueError, match=message):
    weights.save(tmp_path / 'model', config, params)
  assert not list(tmp_path.iterdir())


@pytest.fixture
def earlier(tmp_path):
  """A model that was saved: its config, its parameters and its tensors."""
  config = test_weights.make_config('qwen3')
  params = test_weights.make_params(config)
  weights.save(tmp_path / 'model', config, params)
  return config, params, test_weights.read_tensors(tmp_path / 'model')


def test_a_crash_while_writing_keeps_the_earlier_model(tmp_path, monkeypatch, earlier):
  (config, params, before), target = earlier, tmp_path / 'model'
  worse = jax.tree.map(np.zeros_like, params)
  write_file, calls = tensor_files._write_file, []

  def fails_at_the_third(*args):
    calls.append(args)
    if len(calls) == 3:
      raise OSError('the disk went away')
    write_file(*args)

  with monkeypatch.context() as patch:
    patch.setattr(tensor_files, '_write_file', fails_at_the_third)
    with pytest.raises(OSError, match='the disk went away'):
      weights.save(target, config, worse, max_shard_bytes=2000)
  assert len(calls) == 3
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  assert test_weights.read_tensors(target) == before
  weights.save(target, config, worse, max_shard_bytes=2000)
  assert not any(np.any(x) for x in jax.tree.leaves(weights.load(target)[1]))
  assert not (target / 'model.safetensors').exists()  # the earlier one's
  assert [path.name for path in tmp_path.iterdir()] == ['model']


def test_the_earlier_model_is_kept_until_the_new_one_has_its_name(
  tmp_path, monkeypatch, earlier
):
  config, params, before = earlier
  rename = pathlib.Path.rename

  def fails_at_the_second(path, target):
    if path.name == '.model.partial':
      assert test_weights.read_tensors(tmp_path / '.model.previous') == before
      raise OSError('no more renames')
    return rename(path, target)

  monkeypatch.setattr(pathlib.Path, 'rename', fails_at_the_second)
  with pytest.raises(OSError, match='no more renames'):
    weights.save(tmp_path / 'model', config, jax.tree.map(np.zeros_like, params))
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  assert test_weights.read_tensors(tmp_path / 'model') == before


def test_a_model_that_a_killed_save_put_aside_comes_back(tmp_path, monkeypatch, earlier):
  config, params, before = earlier
  # Killed between the two renames, in the middle of its clean-up.
  (tmp_path / 'model').rename(tmp_path / '.model.previous')
  (tmp_path / '.model.partial').mkdir()
  free = shutil.disk_usage(tmp_path)._replace(free=0)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: free)
  with pytest.raises(OSError, match=r'the model needs [\d,]+ bytes, 0 are free') as error:
    weights.save(tmp_path / 'model', config, params)
  assert error.value.filename == str(tmp_path / 'model')
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  assert test_weights.read_tensors(tmp_path / 'model') == before


def test_a_directory_with_other_files_is_not_replaced(tmp_path, llama):
  config, params = llama
  (tmp_path / 'notes.txt').write_text('mine')
  with pytest.raises(ValueError, match='holds notes.txt, which is no part of a model'):
    weights.save(tmp_path, config, params)
  with pytest.raises(ValueError, match='notes.txt: is a file; give a directory'):
    weights.save(tmp_path / 'notes.txt', config, params)
  assert (tmp_path / 'notes.txt').read_text() == 'mine'


def _tokenizer(directory, size=40):
  directory.mkdir()
  vocab = {f't{i}': i for i in range(3, size)}
  special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
  added = [{'id': i, 'content': text} for i, text in enumerate(special)]
  vocab |= {text: i for i, text in enumerate(special)}
  files = {
    'tokenizer.json': {'added_tokens': added, 'model': {'vocab': vocab}},
    'tokenizer_config.json': {
      'eos_token': '<|im_end|>',
      'pad_token': {'content': '<|endoftext|>'},
    },
    'generation_config.json': {'temperature': 0.7},
  }
  for name, content in files.items():
    (directory / name).write_text(json.dumps(content))
  (directory / 'README.md').write_text('no part of a tokenizer')
  return directory


def test_tokenizer_files_are_copied_and_name_the_special_ids(tmp_path, llama):
  config, params = llama
  source, target = _tokenizer(tmp_path / 'source'), tmp_path / 'model'
  weights.save(target, config, params, tokenizer_from=source)
  copied = ('tokenizer.json', 'tokenizer_config.json', 'generation_config.json')
  for name in copied:
    assert (target / name).read_bytes() == (source / name).read_bytes()
  assert {path.name for path in target.iterdir()} == {
    *copied,
    'config.json',
    'model.safetensors',
  }
  raw = json.loads((target / 'config.json').read_text())
  assert (raw['eos_token_id'], raw['pad_token_id']) == (2, 0)
  # A model's own config.json knows better than its tokenizer.
  _edit(target / 'config.json', eos_token_id=[2, 0])
  weights.save(target, config, params)
  assert (target / 'tokenizer.json').read_bytes() == (
    source / 'tokenizer.json'
  ).read_bytes()
  assert json.loads((target / 'config.json').read_text())['eos_token_id'] == [2, 0]


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, llama):
  config, params = llama
  with pytest.raises(ValueError, match=r'tokenizer_from: .* has no tokenizer.json'):
    weights.save(
      tmp_path / 'model',
      config,
      params,
      tokenizer_from=tmp_path,
    )
  source = _tokenizer(tmp_path / 'source', size=41)
  with pytest.raises(ValueError, match='has ids up to 40, yet config.vocab_size is 40'):
    weights.save(tmp_path / 'model', config, params, tokenizer_from=source)
  assert not (tmp_path / 'model').exists()
