"""experiments/bench/compile_for.py: programs compiled for chips that are not here."""

import importlib.util
import json
import pathlib

import pytest
import script

from experiments.bench import compile_for

ROOT = pathlib.Path(__file__).parents[1]


def run(*command: str) -> str:
  """What a Python process prints."""
  done = script.run(*command)
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout


@pytest.mark.parametrize(
  ('name', 'chips', 'tokens', 'given', 'expected'),
  [
    ('qwen2.5-7b', 64, 32_768, {}, (1, 16, 1, 4)),
    # 896 = 128 · 7 numbers a token cannot be split over more.
    ('qwen2.5-0.5b', 256, 8192, {}, (2, 128, 1, 1)),
    ('qwen2.5-32b', 128, 8193, {'tensor': 4}, (1, 16, 4, 2)),
  ],
)
def test_chips_and_tokens_give_the_axes_of_the_mesh(name, chips, tokens, given, expected):
  config = compile_for.model(name)
  sizes = compile_for.mesh_for(config, chips, tokens, given)
  axes = ('data', 'fsdp', 'tensor', 'context')
  assert tuple(sizes[axis] for axis in axes) == expected


@pytest.mark.parametrize('size', ['0.5B', '7B'])
def test_sizes_are_the_published_ones(data_dir, size):
  published = compile_for.model(f'{data_dir}/models/qwen2.5/config-{size}.json')
  ours = compile_for.model(f'qwen2.5-{size.lower()}')
  fields = ('vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'num_kv_heads')
  for field in (*fields, 'head_dim', 'mlp_dim', 'tie_embeddings', 'family'):
    assert getattr(ours, field) == getattr(published, field), field


needs_libtpu = pytest.mark.skipif(
  not importlib.util.find_spec('libtpu'), reason="no libtpu: pip install 'jax[tpu]'"
)


@needs_libtpu
def test_the_gradient_along_trees_compiles_for_v5e_16():
  flags = ['--topology=v5e:4x4', '--config.model.path=tiny', '--tokens=256', '--trees']
  out = run('-m', 'experiments.bench.compile_for', *flags, '--program=gradient')
  gradient = json.loads(out)
  assert gradient['trees'] and gradient['fits']
  # As below, in each of the two layers.
  assert gradient['kernels']['attention']['calls'] == 8


@needs_libtpu
def test_training_and_sampling_compile_for_v5e_16():
  flags = [
    '--topology=v5e:4x4',
    '--config.model.path=tiny',
    '--tokens=256',
    '--context=2',
  ]
  flags += ['--tensor=2', '--slots=256', '--texts=4']
  out = run('-m', 'experiments.bench.compile_for', *flags)
  lines = [json.loads(line) for line in out.splitlines()]
  assert [line['program'] for line in lines] == ['gradient', 'apply', 'prefill', 'decode']
  assert all(
    line['fits'] and line['seconds'] > 0 and not line['missing'] for line in lines
  )
  gradient = lines[0]
  assert gradient['mesh'] == {'data': 1, 'fsdp': 4, 'tensor': 2, 'context': 2}
  # The attention kernel: forward, forward again, and two of its gradient.
  assert gradient['kernels']['attention']['calls'] == 8
  # One a layer, which reads pages.
  decode = lines[3]
  assert decode['mesh']['tensor'] == 2 and decode['kernels']['attention']['calls'] == 2
  assert decode['needed'] <= decode['bytes'] < 1.1 * decode['needed']
  # Seven a layer, none of them two in one kernel, and the head.
  assert decode['kernels']['product']['calls'] == 7 * 2 + 1
  # Parameters are gathered, tokens exchanged for heads.
  assert {'all-gather', 'all-to-all'} <= {*gradient['exchanged']}


@needs_libtpu
def test_a_chip_with_several_key_value_heads_copies_no_cache():
  flags = ['--topology=v5p:2x2x1', '--config.model.path=tiny', '--tensor=1']
  flags += ['--slots=1024', '--texts=16', '--program=decode']
  decode = json.loads(run('-m', 'experiments.bench.compile_for', *flags))
  assert decode['needed'] <= decode['bytes'] < 1.3 * decode['needed']


needs_cuda = pytest.mark.skipif(
  not importlib.util.find_spec('jax_cuda12_plugin'),
  reason="no compiler for GPUs: pip install 'jax[cuda12]'",
)


@needs_cuda
@pytest.mark.parametrize('topology', ['h100:1', 'a100:2', 'b200:2x2'])
def test_training_and_sampling_compile_for_gpus(topology):
  flags = [f'--topology={topology}', '--config.model.path=tiny', '--tokens=256']
  out = run('-m', 'experiments.bench.compile_for', *flags, '--slots=256', '--texts=4')
  lines = [json.loads(line) for line in out.splitlines()]
  assert [line['program'] for line in lines] == ['gradient', 'apply', 'prefill', 'decode']
  assert all(
    line['fits'] and line['seconds'] > 0 and not line['missing'] for line in lines
  )
  # Four blocks of a row, of 64 tokens, in two layers: forward, forward again, backward.
  # On one GPU XLA finds that the second forward of an unrolled layer is the first.
  times = 2 if topology == 'h100:1' else 3
  assert lines[0]['kernels']['attention']['calls'] == 4 * times * 2
  assert ('all-gather' in lines[0]['exchanged']) == (topology != 'h100:1')
  # A decode's kernel, one a layer, is for an H100.
  assert ('attention' in lines[3]['kernels']) == (topology == 'h100:1')


@needs_cuda
def test_chips_that_share_few_key_value_heads_have_all_of_them():
  flags = ['--topology=h100:4', '--config.model.path=tiny', '--tensor=4']
  flags += ['--slots=1024', '--texts=16', '--program=decode']
  decode = json.loads(run('-m', 'experiments.bench.compile_for', *flags))
  assert not decode['missing'] and decode['data_loops'] == 1
  # Each chip has a copy of the cache, of which it reads a head.
  assert decode['needed'] <= decode['bytes'] < 1.4 * decode['needed']


def test_an_unknown_topology_names_those_that_are_known():
  flags = ['--topology=h1000:1', '--config.model.path=tiny']
  done = script.run('-m', 'experiments.bench.compile_for', *flags)
  assert done.returncode == 1 and 'known are v5e, v5p' in done.stderr


@pytest.mark.skipif(
  importlib.util.find_spec('jax_cuda12_plugin') is not None,
  reason='the compiler for GPUs is installed',
)
def test_without_the_compiler_its_installation_is_named():
  flags = ['--topology=h100:1', '--config.model.path=tiny']
  done = script.run('-m', 'experiments.bench.compile_for', *flags)
  assert done.returncode == 1 and "pip install 'agent_r1_jax[cuda]'" in done.stderr
