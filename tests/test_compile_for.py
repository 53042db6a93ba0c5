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
  # Elsewhere on this machine somebody may compile for TPUs too.
  settings = {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
  done = script.run(*command, **settings)
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


_FOUR = """
import jax, jax.numpy as jnp
jax.config.update('jax_num_cpu_devices', 4)
from jax.sharding import PartitionSpec as P
from experiments.bench import compile_for

def work(x, n):  # A chip has 2 of 8 numbers.
  def body(_, x):
    every = jax.lax.all_gather(x, 'a', tiled=True)  # 32 bytes, and 8 come back.
    return jax.lax.psum_scatter(jnp.sin(every), 'a', tiled=True)
  x = jax.lax.fori_loop(0, 5, body, x)
  y = jax.lax.while_loop(lambda y: y.sum() < n, lambda y: jax.lax.psum(y, 'a'), x)
  return jax.lax.ppermute(y, 'a', [(0, 1)])

auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((4,), ('a',), axis_types=auto)
program = jax.shard_map(work, mesh=mesh, in_specs=(P('a'), P()), out_specs=P('a'),
                        check_vma=False)
text = jax.jit(program).lower(jnp.ones(8), 1.0).compile().as_text()
print(compile_for.collectives(text))
"""


def test_collectives_count_as_often_as_their_loop_runs():
  counts = {
    'all-gather': 5 * 32,
    'reduce-scatter': 5 * 8,
    'all-reduce': 8,
    'collective-permute': 8,
  }
  assert run('-c', _FOUR) == f'{(counts, 1)}\n'


# As a TPU's compiler writes it, shortened: a gather that runs beside other work is two
# fusions, and how often the loop runs is in its condition only.
_PIECES = """
%begin (p: bf16[2,8]) -> (bf16[4,8], u32[]) {
  %g.1 = bf16[4,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, x={chain_id="3"}
}
%end (p: bf16[2,8]) -> bf16[4,8] {
  %g.2 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7, x={chain_id="3"}
}
%body (t: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %a = (bf16[4,8], u32[]) fusion(%p), kind=kCustom, calls=%begin
  %b = bf16[4,8] fusion(%a), kind=kCustom, calls=%end
  %s = (f32[4], f32[2]) all-reduce-start(%x, %y), channel_id=1, to_apply=%add
  %d = (f32[4], f32[2]) all-reduce-done(%s)
}
%while_condition (t: (s32[], bf16[2,8])) -> pred[] {
  %n = s32[]{:T(128)} constant(12)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}
ENTRY %main (p: bf16[2,8]) -> bf16[2,8] {
  %w = (s32[], bf16[2,8]) while(%t), condition=%while_condition, body=%body
}
"""


def test_pieces_of_one_collective_count_once():
  counts = {'all-gather': 12 * 64, 'all-reduce': 12 * 24}
  assert compile_for.collectives(_PIECES) == (counts, 0)


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
  assert gradient['kernels'] == 8


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
  assert all(line['fits'] and line['operations'] > 0 for line in lines)
  gradient = lines[0]
  assert gradient['mesh'] == {'data': 1, 'fsdp': 4, 'tensor': 2, 'context': 2}
  # The attention kernel: forward, forward again, and two of its gradient.
  assert gradient['kernels'] > 0
  # One a layer, which reads pages.
  assert lines[3]['mesh']['tensor'] == 2 and lines[3]['kernels'] == 2
  # Parameters are gathered, tokens exchanged for heads.
  assert {'all-gather', 'all-to-all'} <= {*gradient['collectives']}
