"""Adapters in the files of PEFT, and the server that reads them."""

import functools
import json
import signal

import adapted
import clients
import httpx2
import jax.numpy as jnp
import numpy as np
import openai
import plain
import pytest
from safetensors import numpy as safetensors_numpy
import script
import serving
import tiny

from agent_r1_jax.models import (
  lora,
)
from agent_r1_jax.models.files import peft_files, weights

_TENSOR = 'base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight'


class TestFiles:
  @pytest.mark.parametrize('name', adapted.NAMES)
  def test_what_is_loaded_is_what_was_saved(self, tmp_path, name):
    peft_files.save(tmp_path, adapted.add(name), 'base', tiny.config())
    found = peft_files.load(tmp_path, tiny.config())
    plain.equal(found, adapted.make(name))
    plain.equal(lora.join(clients.params(), found), adapted.add(name))

  @pytest.mark.parametrize(
    ('family', 'layers', 'targets'),
    [
      ('qwen3_moe', 2, 'qkvo'),
      ('gemma4_text', 4, 'qkvo'),
      ('qwen3_5_text', 2, 'qkvozab'),
      ('phi3', 1, 'qv'),
    ],
  )
  def test_of_layers_of_all_kinds(self, tmp_path, family, layers, targets):
    """Experts get no adapters, nor have layers that share keys one of their own.

    Modules of several kernels have all of their ranks, and zeros where one has none.
    """
    config = tiny.config(family, layers)
    params = tiny.add_adapters(tiny.params(config), 2, targets, 4.0, b=0.2)
    peft_files.save(tmp_path, params, 'base', config)
    plain.equal(peft_files.load(tmp_path, config), lora.take(params))
    # And what PEFT adds to the base is what is merged here.
    for name, x in (('base', tiny.params(config)), ('merged', params)):
      weights.save(tmp_path / name, config, x)
    read = lambda file: safetensors_numpy.load_file(tmp_path / file)
    base, merged = (read(f'{name}/model.safetensors') for name in ('base', 'merged'))
    adapter, settings = (
      read('adapter_model.safetensors'),
      tmp_path / 'adapter_config.json',
    )
    settings = json.loads(settings.read_text())
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    names = {f'base_model.model.{name.removesuffix(".weight")}' for name in changed}
    assert {*adapter} == {f'{name}.lora_{x}.weight' for name in names for x in 'AB'}
    for name in changed:
      module = name.removesuffix('.weight')
      a, b = (adapter[f'base_model.model.{module}.lora_{x}.weight'] for x in 'AB')
      end = module.split('.')[-1]
      assert len(a) == settings.get('rank_pattern', {}).get(end, 2)
      scale = settings.get('alpha_pattern', {}).get(end, 4.0) / len(a)
      np.testing.assert_allclose(merged[name], base[name] + scale * b @ a, atol=1e-6)

  @pytest.mark.parametrize('mixes', [False, True])
  def test_of_a_module_of_three_kernels_that_others_have_trained(self, tmp_path, mixes):
    """With one A; at the rank of three, each B must be in a block of its own."""
    config = tiny.config('qwen3_5_text')
    peft_files.save(tmp_path, _full_of(config), 'base', config)
    files = [tmp_path / x for x in ('adapter_config.json', 'adapter_model.safetensors')]
    tensors = safetensors_numpy.load_file(files[1])
    module = 'base_model.model.model.layers.0.linear_attn.in_proj_qkv'
    a, b = (f'{module}.lora_{x}.weight' for x in 'AB')
    if mixes:
      tensors[b][-1, 0] = 1.0
      safetensors_numpy.save_file(tensors, files[1])
      with pytest.raises(ValueError, match='lora_B.weight mixes the outputs of 3'):
        peft_files.load(tmp_path, config)
      return
    one = np.random.default_rng(0).normal(size=(len(tensors[b]), 2)).astype(np.float32)
    tensors |= {a: tensors[a][:2].copy(), b: one}
    safetensors_numpy.save_file(tensors, files[1])
    settings = json.loads(files[0].read_text()) | {
      'rank_pattern': {},
      'alpha_pattern': {},
    }
    files[0].write_text(json.dumps(settings))
    found = peft_files.load(tmp_path, config)['layers']['linear']
    for name in 'qkv':
      plain.equal(found[name]['lora_a'][0], tensors[a].T)
    joined = [found[name]['lora_b'][0].reshape(2, -1) for name in 'qkv']
    plain.equal(np.concatenate(joined, -1), one.T)

  def test_ranks_of_several_kernels_without_their_alphas_are_refused(self, tmp_path):
    config = tiny.config('qwen3_5_text')
    peft_files.save(tmp_path, _full_of(config), 'base', config)
    file = tmp_path / 'adapter_config.json'
    settings = json.loads(file.read_text())
    del settings['alpha_pattern']
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match='alpha_pattern is None, and one rank'):
      peft_files.load(tmp_path, config)

  def test_numbers_of_16_bits_are_read(self, tmp_path):
    peft_files.save(tmp_path, adapted.add('one'), 'base', tiny.config())
    file = tmp_path / 'adapter_model.safetensors'
    tensors = safetensors_numpy.load_file(file)
    halved = {k: x.astype(jnp.bfloat16) for k, x in tensors.items()}
    safetensors_numpy.save_file(halved, file)
    found = peft_files.load(tmp_path, tiny.config())['layers']['attn']['v']['lora_b']
    expected = adapted.make('one')['layers']['attn']['v']['lora_b']
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16).astype('float32'))

  @pytest.mark.parametrize(
    ('settings', 'message'),
    [
      ({'init_lora_weights': 'pissa_niter_4'}, 'only True is computed here; merge'),
      ({'peft_type': 'IA3'}, "adapter_config.json: peft_type is 'IA3', and only 'LORA'"),
      ({'use_rslora': True}, 'use_rslora is True, and only False .*merge_and_unload'),
      ({'alpha_pattern': {'q_proj': 2}}, "alpha_pattern is {'q_proj': 2}"),
      ({'r': 0}, 'adapter_config.json: r is 0; a positive int'),
      ({'lora_alpha': None}, 'adapter_config.json: lora_alpha is None'),
      ({'r': 2}, r'q_proj.lora_A.weight has shape \[3, 16\], by .* it is \[2, 16\]'),
    ],
  )
  def test_other_settings_are_refused(self, tmp_path, settings, message):
    peft_files.save(tmp_path, adapted.add('few'), 'base', tiny.config())
    file = tmp_path / 'adapter_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ValueError, match=message):
      peft_files.load(tmp_path, tiny.config())

  def test_settings_that_are_off_are_none(self, tmp_path):
    peft_files.save(tmp_path, adapted.add('few'), 'base', tiny.config())
    file = tmp_path / 'adapter_config.json'
    off = {'use_dora': None, 'rank_pattern': None, 'modules_to_save': []}
    file.write_text(json.dumps(json.loads(file.read_text()) | off))
    plain.equal(peft_files.load(tmp_path, tiny.config()), adapted.make('few'))

  @pytest.mark.parametrize(
    ('change', 'message'),
    [
      (lambda x: x.pop(_TENSOR), f'no tensor {_TENSOR}; every layer'),
      (lambda x: x.update(extra=np.ones(2)), 'tensor extra has no place in a llama of 1'),
      (lambda x: x[_TENSOR].fill(np.inf), f'{_TENSOR} has numbers that are not finite'),
      (lambda x: x.update({_TENSOR: x[_TENSOR].T.copy()}), r'shape \[3, 32\], by'),
      (lambda x: x.clear(), 'has no tensors; write the adapter again'),
    ],
  )
  def test_tensors_that_do_not_fit_are_refused(self, tmp_path, change, message):
    peft_files.save(tmp_path, adapted.add('few'), 'base', tiny.config())
    file = tmp_path / 'adapter_model.safetensors'
    tensors = {k: x.copy() for k, x in safetensors_numpy.load_file(file).items()}
    change(tensors)
    tensors = {k: x.astype(np.float32) for k, x in tensors.items()}
    safetensors_numpy.save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
      peft_files.load(tmp_path, tiny.config())

  def test_a_missing_or_broken_file_is_named(self, tmp_path):
    for name in ('adapter_model.safetensors', 'adapter_config.json'):
      peft_files.save(tmp_path, adapted.add('few'), 'base', tiny.config())
      (tmp_path / name).write_bytes(b'{')
      with pytest.raises(ValueError, match=f'{name}: '):
        peft_files.load(tmp_path, tiny.config())
      (tmp_path / name).unlink()
      with pytest.raises(ValueError, match=f'{name}: missing; give a directory'):
        peft_files.load(tmp_path, tiny.config())


def _full_of(config):
  return tiny.add_adapters(tiny.params(config), 2, 'qkv', 4.0, b=0.2)


@functools.cache
def _served_adapter():
  return tiny.add_adapters(serving.policy()[1], 2, ('q', 'down'), 4.0, b=0.5)


class TestServer:
  def test_the_script_serves_adapters_of_several_ranks(self, tmp_path):
    shape, params, _ = serving.policy()
    peft_files.save(tmp_path / 'a', _served_adapter(), 'base', shape)
    other = tiny.add_adapters(params, 3, ('v',), 1.0)
    peft_files.save(tmp_path / 'b', other, 'base', shape)
    model = serving.ROOT / 'experiments/miniwiki/model'
    command = ['-m', 'experiments.serve', '--port=0', f'--config.model.path={model}']
    command += [f'--adapter={name}={tmp_path / name}' for name in 'ab']
    sizes = {'rows': 4, 'slots': 64, 'bucket': 64, 'replicas': 1, 'narrow': False}
    command += [f'--config.engine.{name}={size}' for name, size in sizes.items()]
    with script.Process(*command) as process:
      url = next(line for line in process.stdout if line.startswith('http')).strip()
      with openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0) as client:
        body = {'prompt': 'Who', 'max_tokens': 8, 'temperature': 0}
        ask = lambda name: client.completions.create(model=name, **body)
        replies = {name: ask(name) for name in ('policy', 'a', 'b')}
        assert [x.id for x in client.models.list().data] == [*replies]
        assert [x.model for x in replies.values()] == [*replies]
        with pytest.raises(openai.NotFoundError) as refused:
          ask('c')
        assert refused.value.code == 'model_not_found'
        assert "'c' does not exist; there are: policy, a, b" in str(refused.value)
        unnamed = httpx2.post(f'{url}/v1/completions', json=body).json()
        process.send_signal(signal.SIGTERM)
      assert process.wait(60) == 0
    texts = {name: reply.choices[0].text for name, reply in replies.items()}
    # B of the second one is zeros.
    assert texts['policy'] == texts['b'] == unnamed['choices'][0]['text'] != texts['a']

  @pytest.mark.parametrize(
    ('names', 'message'),
    [
      (['=a'], '--adapter==a: give it as NAME=DIR'),
      (['a=b', 'a=c'], '--adapter=a=c: a is the name of another one already'),
      (['policy=b'], '--adapter=policy=b: policy is the name of another one'),
    ],
  )
  def test_a_flag_that_cannot_be_read_is_refused(self, names, message):
    flags = [f'--adapter={name}' for name in names]
    done = script.run('-m', 'experiments.serve', *flags)
    assert done.returncode and message in done.stderr
