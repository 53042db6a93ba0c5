"""experiments/bench/hlo.py, kernels.py and roofline.py: what compiled programs do."""

import collections
import gzip
import pathlib

import pytest
import script

from experiments.bench import chips, hlo, kernels, roofline

_RECORDED = pathlib.Path(__file__).parent / 'golden' / 'hlo'


def read(name: str) -> list[kernels.Kernel]:
  """The kernels of a recorded program: a text of compile_for without its notes.

  h100-gradient: --topology=h100:1 --config.model.path=qwen2.5-0.5b --tokens=1024, by
  cuDNN (as on other GPUs than an H100 now).
  h100-rows: --topology=h100:1 --config.model.path=tiny --tokens=256.
  v5e-decode: --topology=v5e:4x4 --config.model.path=tiny --slots=256 --texts=4.
  """
  text = gzip.decompress((_RECORDED / f'{name}.txt.gz').read_bytes()).decode()
  return kernels.list_kernels(hlo.Program(text))


def short(name: str) -> str:
  """A program as a compiler writes it, shortened."""
  return (_RECORDED / f'{name}.txt').read_text()


def total(found: list[kernels.Kernel], what: str, kind: str = '') -> float:
  """A number of all calls of all kernels, or of those of a kind."""
  return sum(k.calls * getattr(k, what) for k in found if kind in (k.kind, ''))


def count(found: list[kernels.Kernel], kind: str) -> int:
  """How often kernels of a kind run."""
  return sum(k.calls for k in found if k.kind == kind)


def test_the_operations_of_a_recorded_gradient_are_those_of_its_shape():
  found = read('h100-gradient')
  T, D, L, N, K, H, F, V = 1024, 896, 24, 14, 2, 64, 4864, 151_936
  layers = L * (2 * D * N * H + 2 * D * K * H + 3 * D * F)
  # Forward, forward again without the last product of a layer, and twice that backward.
  products = 8 * layers * T - 2 * L * D * F * T + 8 * D * V * T
  assert total(found, 'operations', 'product') == products
  # Eight blocks of queries, of which the last sees all keys: 9/16 of the square. Two
  # products forward, two again, and five backward.
  assert total(found, 'operations', 'attention') == 18 * L * N * H * T * T * 9 / 16
  assert count(found, 'attention') == 8 * 3 * L
  # Only the head's blocks depend on the data: how many tokens count.
  assert {len(k.inside) for k in found} == {0, 1}
  assert all('head' in k.part or not k.part for k in found if k.inside)


def test_the_kernels_over_rows_compute_half_of_the_square():
  found = read('h100-rows')
  T, layers, N, K, H = 256, 2, 4, 2, 128
  attention = [k for k in found if k.kind == 'attention']
  names = collections.Counter(k.target for k in attention)
  assert names == {f'row_attention_{x}': 2 for x in ('forward', 'queries', 'keys')}
  # Two products forward, which two layers need not recompute; three and four backward.
  assert total(found, 'operations', 'attention') == 9 * layers * N * H * T * T
  # Each reads and writes every number of a token once: queries, keys, values, outputs.
  keys = next(k for k in attention if k.target.endswith('keys'))
  tokens = 2 * (2 * N + 4 * K) * T * H
  numbers = 4 * (2 * N * T + T) + 4 * (2 * 4 + 2)  # And the lists of blocks.
  assert keys.bytes == tokens + numbers


def test_a_recorded_gradient_reads_of_stacked_kernels_one_layer_at_a_time():
  found = read('h100-gradient')
  # All parameters, read three times at the most and written, are 7.4 GB; the activations
  # of a layer and the logits are the rest. Whole stacks in each layer would be 200 GB.
  assert 10e9 < total(found, 'bytes') < 50e9


def test_a_recorded_decode_reads_the_parameters_and_the_cache_once():
  found = read('v5e-decode')
  layers, D, N, K, H, F, V, texts, slots = 2, 128, 4, 2, 128, 256, 1024, 2, 256
  parameters = layers * (2 * D * N * H + 2 * D * K * H + 3 * D * F) + D * V
  cache = 2 * layers * texts * K * slots * H
  # Two chips share both, in bfloat16.
  assert 1.0 < total(found, 'bytes') / (parameters + cache) < 1.1
  assert total(found, 'bytes', 'attention') == pytest.approx(cache, rel=1e-3)
  operations = texts * 2 * parameters / 2
  assert total(found, 'operations') == pytest.approx(operations, rel=1e-6)


def test_what_is_expected_and_not_there_is_named():
  gradient, decode = read('h100-gradient'), read('v5e-decode')
  find = roofline.find_missing
  assert not find(gradient, 'gradient', 'a100')
  assert not find(read('h100-rows'), 'gradient', 'h100')
  assert 'row_attention_forward' in find(gradient, 'gradient', 'h100')
  assert not find(decode, 'decode', 'v5e')
  backward = [k for k in gradient if not k.target.endswith('Backward')]
  assert find(backward, 'gradient', 'a100') == ['fmhaScaleBiasSoftmaxBackward']
  assert find(decode, 'gradient', 'v5e') == ['fwd', 'dq', 'dkv']
  # Compiled for a TPU, a decode has no kernel of a GPU; an A100 has none at all.
  assert find(decode, 'decode', 'h200') == ['slot_attention']
  assert not find(decode, 'decode', 'a100')


def test_texts_that_use_few_slots_read_few_blocks():
  found = read('v5e-decode')
  read_used = lambda used: roofline.read_used_slots(found, used, 4096)
  assert read_used(4096) == found
  half = read_used(1700)  # Pages of 512 slots.
  attention = total(found, 'bytes', 'attention')
  assert total(half, 'bytes', 'attention') == pytest.approx(attention / 2, rel=1e-3)
  one = kernels.Kernel(
    'k', 'attention', '', 'slot_attention', 1, 8e6, 4000, {}, 0, (), False
  )
  [few] = roofline.read_used_slots([one], 60, 256)  # Blocks of 64.
  assert (few.operations, few.bytes) == (2e6, 1000)
  others = total(found, 'bytes') - attention
  assert total(half, 'bytes') - total(half, 'bytes', 'attention') == others


def test_a_kernel_takes_its_estimate_or_the_longer_of_operations_and_bytes():
  one = kernels.Kernel('k', 'product', '', '', 3, 4e12, 1000, {}, 0, (), False)
  gpu, tpu = chips.CHIPS['h100'], chips.CHIPS['v5e']
  assert roofline.count_seconds(one, gpu) == pytest.approx(3 * 4e12 / 989e12)
  large = one._replace(bytes=10**12)
  assert roofline.count_seconds(large, gpu) == pytest.approx(3 * 1e12 / 3.352e12)
  estimated = one._replace(cycles=1503)
  assert roofline.count_seconds(estimated, tpu) == pytest.approx(3e-6, rel=1e-3)


def test_what_runs_beside_the_rest_costs_nothing_until_the_memory_is_full():
  chip = chips.CHIPS['v5e']
  alone = kernels.Kernel('k', 'other', '', '', 1, 0, 0, {}, 1_503_000, (), False)
  copy = kernels.Kernel('c', 'move', '', '', 1, 0, 409_500_000, {}, 0, (), True)
  best, in_turn = roofline.sum_seconds([alone, copy], chip)
  assert best == pytest.approx(1e-3, rel=1e-3) and in_turn == pytest.approx(
    1.5e-3, rel=1e-3
  )
  best, _ = roofline.sum_seconds([alone, copy._replace(calls=4)], chip)
  assert best == pytest.approx(2e-3, rel=1e-3)


def test_a_loop_runs_as_its_counter_says_and_slices_count_as_slices():
  """Of a GPU: the counter grows by 2 from 1 up to 8, in a kernel."""
  found = {k.name: k for k in kernels.list_kernels(hlo.Program(short('loop')))}
  assert {k.calls for k in found.values()} == {4}  # 1, 3, 5 and 7.
  row, number = 64 * 4, 4
  assert found['row'].bytes == 2 * row + number
  # The update in place: the row is read and written, and where it goes is read.
  assert found['new'].bytes == 2 * row + number
  assert found['row'].kind == found['new'].kind == 'move'


def test_a_loop_that_the_data_stop_counts_as_often_as_one_says():
  text = short('loop')
  text = text.replace('%end = s32[] constant(8)', '%end = s32[] get-tuple-element(%t.3)')
  found = kernels.list_kernels(hlo.Program(text), lambda part: 7)
  assert {k.calls for k in found} == {7} and {k.inside for k in found} == {('w',)}


@pytest.mark.parametrize(
  ('part', 'passes'),
  [
    ('jit(f)/jvp(head)/while', 8),
    ('jit(f)/jvp(Decoder)/while/body/layers/moe/while', 1),
    (
      'jit(f)/transpose(jvp(D))/while/checkpoint/rematted_computation/layers/moe/while',
      1,
    ),
    ('jit(f)/transpose(jvp(Decoder))/while/body/checkpoint/layers/moe/while', 0),
  ],
)
def test_experts_take_one_round_and_the_head_all_its_blocks(part, passes):
  assert kernels.guess_passes(8, part) == passes


def test_reads_of_nested_fusions_views_and_copies_count():
  """Of a TPU: a kernel that a nested fusion reads, one row of it, and a quarter of it.

  The quarter is copied to the vector memory, S(1), beside other work.
  """
  found = {k.name: k for k in kernels.list_kernels(hlo.Program(short('reads')))}
  assert set(found) == {'one', 'b', 'y'}
  whole, row = 2 * 64 * 32, 2 * 32
  assert found['y'].bytes == whole and found['y'].operations == 2 * 8 * 64 * 32
  assert found['one'].bytes == row + row  # A row is read and written.
  assert found['b'].bytes == whole // 4 and found['b'].beside


@pytest.mark.parametrize(
  ('window', 'pairs'),
  [('window={size=3 pad=1_1}', 7), ('window={size=3 stride=2 pad=2_2 lhs_dilate=3}', 3)],
)
def test_a_convolution_counts_where_it_meets_numbers(window, pairs):
  """A TPU's products are convolutions: three of [8, 16] x [16, 32] meet in a window."""
  text = short('convolution').replace('WINDOW', window)
  [kernel] = kernels.list_kernels(hlo.Program(text))
  assert kernel.operations == 2 * 8 * 16 * 32 * pairs


_FOUR = """
import jax, jax.numpy as jnp
jax.config.update('jax_num_cpu_devices', 4)
from jax.sharding import PartitionSpec as P
from experiments.bench import hlo, kernels

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
total = {}
found = kernels.list_kernels(hlo.Program(text))
for kernel in found:
  for kind, size in kernel.exchanged.items():
    total[kind] = total.get(kind, 0) + kernel.calls * size
print(dict(sorted(total.items())), len({name for k in found for name in k.inside}))
"""


def test_collectives_count_as_often_as_their_loop_runs():
  counts = {
    'all-gather': 5 * 32,
    'all-reduce': 8,
    'collective-permute': 8,
    'reduce-scatter': 5 * 8,
  }
  done = script.run('-c', _FOUR)
  assert done.stdout == f'{counts} 1\n', done.stderr[-4000:]


def test_pieces_of_one_collective_count_once():
  """On a TPU a gather that runs beside other work is two fusions.

  How often the loop runs is in its condition only.
  """
  counts = {'all-gather': 12 * 64, 'all-reduce': 12 * 24}
  found = kernels.list_kernels(hlo.Program(short('pieces')))
  exchanged = collections.Counter()
  for kernel in found:
    for kind, size in kernel.exchanged.items():
      exchanged[kind] += kernel.calls * size
  assert exchanged == counts and not any(kernel.inside for kernel in found)


def test_an_estimated_product_takes_what_one_took_on_a_chip_less_the_time_to_start_it():
  """Of two arrays of 4,096 x 4,096 numbers on v5e."""
  found = kernels.list_kernels(hlo.Program(short('product')))
  assert sum(k.operations for k in found) == 2 * 4096**3
  best, in_turn = roofline.sum_seconds(found, chips.CHIPS['v5e'])
  assert best == pytest.approx(0.7206e-3, rel=1e-3)
  assert in_turn == pytest.approx(best + 2 * 4096**2 / 819e9, rel=1e-3)
  # The product of 1,024 x 1,024 was measured in the same way, and is nearly all start.
  # Both are of JAX's docs/pallas/tpu/matmul.ipynb.
  start, measured = 0.00011943, 0.00082729
  assert best == pytest.approx(measured - start, rel=0.02)


@pytest.mark.parametrize(
  ('numbers', 'cycles'), [('f32', 800), ('bf16', 400), ('s8', 200)]
)
def test_a_copy_takes_the_part_of_its_estimate_that_its_bits_are_of_32(numbers, cycles):
  array = f'{numbers}[64,128]{{1,0}}'
  text = f"""
ENTRY %main (a: {numbers}[64,128]) -> {numbers}[64,128] {{
  %a = {array} parameter(0)
  ROOT %copy = {array} copy(%a), backend_config={{"estimated_cycles":"800"}}
}}
"""
  (copy,) = kernels.list_kernels(hlo.Program(text))
  assert copy.kind == 'move' and copy.cycles == cycles
