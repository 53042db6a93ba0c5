"""Counts operations, bytes and collectives of a compiled program's kernels, with loops.

A compiled program says which kernels run in which loops, with all shapes. XLA's own
`cost_analysis` counts one pass of each loop, leaves out kernels of Pallas and cuDNN, and
counts nothing for a GPU that is not present.

Counts are what the program asks for; a chip's caches are ignored. Bytes are those of main
memory: only the slice counts if a fusion slices a stacked parameter, only the update if
it updates an array in place, and arrays in a TPU's vector memory (`S(1)` in the text) do
not count.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import math
import re
from typing import NamedTuple

from experiments.bench import hlo

# Instructions that take no time: names of arrays, and the ends of asynchronous ones.
_FREE = frozenset(
  'parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id '
  'iota opt-barrier copy-done slice-done async-done async-update add-dependency'.split()
)
# Custom calls that are only hints to the compiler.
_NOTES = ('AllocateBuffer', 'AssumeGatherIndicesInBound', 'Sharding')
# Instructions that only move numbers, or change their dtype.
_MOVES = frozenset(
  'copy copy-start slice-start transpose reshape bitcast slice dynamic-slice pad '
  'dynamic-update-slice concatenate convert broadcast reverse'.split()
)
_COLLECTIVES = frozenset(
  'all-gather all-reduce reduce-scatter all-to-all collective-permute'.split()
)
_SLICES = frozenset(('dynamic-slice', 'slice', 'gather'))
# Instructions that update their first operand in place -> the operand with the update.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
# Operations of Pallas attention kernels, in units of T x T x H: 2 per product, halved
# for causal kernels. The two products of a prefill are not halved.
_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4, 'forward': 2, 'queries': 3, 'keys': 4}
_PRODUCTS |= {'prefill_attention': 4}
# Our attention kernels for GPUs, over the slots of a cache and over rows.
_SLOTS, _ROWS = 'slot_attention', 'row_attention_'
# JAX's kernels in group_products.py: the target on GPUs, the instruction's name on TPUs.
_HOPPER_GROUPS, _GROUPS = 'body', re.compile(r't?gmm[.\d]*')
KINDS = ('attention', 'product', 'exchange', 'move', 'sort', 'other')


class Kernel(NamedTuple):
  """A kernel, with its costs.

  Attributes:
    name: The instruction's name.
    kind: One of KINDS.
    part: JAX's name for the operation (`op_name`).
    target: The target of a custom call.
    calls: How often it runs.
    operations: Multiplications and additions of matrix products, in one call.
    bytes: Bytes of main memory that one call reads and writes.
    exchanged: Bytes of the results of its collectives, in one call.
    cycles: The TPU compiler's estimate for one call, or 0; for moves of 16 or 8 bits, a
      half or a quarter of it.
    inside: The loops around it whose trip count depends on the data.
    beside: Whether it overlaps with other work, such as a copy between memories.
  """

  name: str
  kind: str
  part: str
  target: str
  calls: int
  operations: float
  bytes: int
  exchanged: dict[str, int]
  cycles: int
  inside: tuple[str, ...]
  beside: bool


def list_kernels(
  program: hlo.Program, guess: Callable[[str], int] = lambda part: 1
) -> list[Kernel]:
  """Returns the kernels of all computations; `calls` includes the passes of loops.

  `guess` returns a loop's passes, if they depend on the data, from its JAX name.
  """
  return list(_Walk(program, guess).visit(program.entry, 1, ()))


def guess_passes(blocks: int, part: str) -> int:
  """Guesses the passes of a loop that depend on the data, from its JAX name.

  Loops of the head take `blocks`, if every token has a loss. A mixture's experts take one
  round (models/experts.py), which a gradient computes before its loop.
  """
  if '/moe/' in part:
    return int('transpose(' not in part or 'rematted' in part)
  return blocks


class _Walk:
  """Walks a program in the order of execution."""

  def __init__(self, program: hlo.Program, guess: Callable[[str], int]):
    self._program, self._guess = program, guess
    # The piece that counts of each collective in several pieces.
    self._chains: dict[tuple[str, ...], str] = {}

  def visit(self, name: str, calls: int, inside: tuple[str, ...]) -> Iterator[Kernel]:
    """Yields the kernels of computation `name`, which runs `calls` times."""
    for i in self._program.computations[name].values():
      if i.opcode in _FREE or i.target in _NOTES:
        continue
      if i.opcode == 'while':
        passes = self._program.count_passes(name, i)
        around = inside if passes else (*inside, i.name)
        body = re.findall(r'body=%([\w.-]+)', i.text)[0]
        passes = self._guess(i.part) if passes is None else passes
        yield from self.visit(body, calls * passes, around)
      elif i.opcode == 'conditional':
        # The cheapest branch: rare requests (a guide, top tokens) do not count.
        branches = [list(self.visit(x, calls, inside)) for x in i.called]
        yield from min(branches, key=lambda b: sum(k.calls * k.bytes for k in b))
      elif i.opcode in ('call', 'async-start'):
        for called in i.called:
          yield from self.visit(called, calls, inside)
      else:
        yield self._describe(name, i, calls, inside)

  def _describe(self, name: str, i: hlo.Instruction, calls: int, inside) -> Kernel:
    within = list(_list_within(self._program, name, i))
    opcodes = {x.opcode for _, x in within}
    operations = sum(_count_operations(self._program, *x) for x in within)
    exchanged = self._count_exchanged([x for _, x in within])
    attends = re.search(rf'fmha|tpu_custom_call|{_SLOTS}|{_ROWS}', i.target)
    attends = attends and not _GROUPS.fullmatch(i.name)
    exchanges = {re.sub(r'-(start|done)$', '', x) for x in opcodes} & _COLLECTIVES
    if (exchanges or 'AsyncCollective' in i.text) and not operations:
      kind = 'exchange'
    elif attends:
      kind = 'attention'
    elif operations:
      kind = 'product'
    elif opcodes & {'sort', 'scatter'}:
      kind = 'sort'
    else:
      kind = 'move' if opcodes <= _MOVES | _FREE | {'fusion'} else 'other'
    found = re.search(r'"estimated_cycles":"(\d+)"', i.text)
    cycles = int(found[1]) if found else 0
    if kind == 'move':
      # The compiler's estimate assumes 32 bits per number; see docs/scaling.md.
      arrays = (i.result, *self._program.operands(name, i))
      bits = [x.bits for several in arrays for x in several if x.shape]
      cycles = cycles * min(32, max(bits, default=32)) // 32
    moved = _count_bytes(self._program, name, i)
    if kind == 'exchange':  # Other arrays that it names are only passed on.
      moved = 2 * sum(exchanged.values())
    return Kernel(
      name=i.name,
      kind=kind,
      part=i.part,
      target=i.target,
      calls=calls,
      operations=operations,
      bytes=moved,
      exchanged=exchanged,
      cycles=cycles,
      inside=inside,
      beside=i.opcode.endswith('-start'),
    )

  def _count_exchanged(self, within: Sequence[hlo.Instruction]) -> dict[str, int]:
    """Counts the bytes of collectives' results, by kind.

    An asynchronous collective counts once: at its end (-done), or, if the TPU compiler
    split it into several fusions, in the first fusion of its chain.
    """
    total: dict[str, int] = {}
    for i in within:
      kind = i.opcode.removesuffix('-done')
      chain = re.search(r'channel_id=(\d+),.*chain_id="(\d+)"', i.text)
      if kind not in _COLLECTIVES:
        continue
      if chain and self._chains.setdefault(chain.groups(), i.name) != i.name:
        continue
      total[kind] = total.get(kind, 0) + sum(x.size for x in i.result)
    return total


def _list_within(
  program: hlo.Program, name: str, i: hlo.Instruction
) -> Iterator[tuple[str, hlo.Instruction]]:
  """Yields an instruction, or the instructions of a fusion, with their computations."""
  if i.opcode != 'fusion':
    yield name, i
    return
  for called in i.called:
    for x in program.computations[called].values():
      yield from _list_within(program, called, x)


def _count_operations(program: hlo.Program, name: str, i: hlo.Instruction) -> float:
  operands = program.operands(name, i)
  if i.opcode == 'dot':
    left = operands[0][0].shape
    axes = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', i.text)
    contracted = [left[int(n)] for n in axes[1].split(',') if n] if axes else []
    return 2.0 * math.prod(i.result[0].shape) * math.prod(contracted)
  if i.opcode == 'convolution':
    return _count_convolution(i, operands[0][0].shape, operands[1][0].shape)
  if 'fmha' in i.target:
    return _count_attention(i, operands)
  if i.target == _SLOTS:  # All slots; see roofline.read_used_slots.
    queries, keys, *_ = _find_slots(operands)
    return 4.0 * math.prod(queries.shape) * keys.shape[2]
  # From [S, X] to [S, Y]; or, with [S, Y], to [E, X, Y].
  if i.target == _HOPPER_GROUPS or _GROUPS.fullmatch(i.name):
    rows = next(x for arrays in operands for x in arrays if x.dtype == 'bf16')
    return 2.0 * math.prod(rows.shape) * i.result[0].shape[-1]
  if i.target.startswith(_ROWS):
    T, N, H = max(x[0].shape[1:] for x in operands if len(x[0].shape) == 4)
    return _PRODUCTS[i.target.removeprefix(_ROWS)] * i.result[0].shape[0] * N * T * T * H
  return _count_pallas(i, operands) if i.target == 'tpu_custom_call' else 0.0


def _count_bytes(program: hlo.Program, name: str, i: hlo.Instruction) -> int:
  operands = program.operands(name, i)
  if i.opcode == 'fusion':
    called = i.called[0]
    reads = sum(
      _count_read(program, called, n, arrays) for n, arrays in enumerate(operands)
    )
    return reads + _count_written(program, called, i.result)
  written = sum(x.bytes for x in i.result)
  if i.opcode in _SLICES:
    return 2 * written
  if i.opcode in _UPDATES:
    return 2 * sum(x.bytes for x in operands[_UPDATES[i.opcode]])
  if i.opcode == 'copy-start':  # Its result also contains its argument.
    return written
  if i.opcode == 'slice-start':  # The same: the array, the slice and a flag.
    return written - i.result[0].bytes + (0 if i.result[0].space else i.result[1].size)
  if i.opcode.endswith('-start') or i.opcode.endswith('-done'):
    return 0
  read = sum(x.bytes for arrays in operands for x in arrays)
  if i.target == _SLOTS:  # It reads only the heads of its queries.
    queries, *slots = _find_slots(operands)
    unread = 1 - queries.shape[1] / slots[0].shape[1]
    read -= int(unread * sum(x.bytes for x in slots))
  return written + read


def _find_slots(operands: Sequence[tuple[hlo.Array, ...]]) -> list[hlo.Array]:
  """Returns queries, keys, values and scales of slot_attention.py's kernel."""
  arrays = [arrays[0] for arrays in operands if arrays]
  order = {'bf16': 0, 's8': 1, 'f32': 2}
  return sorted((x for x in arrays if x.dtype in order), key=lambda x: order[x.dtype])


def _count_read(
  program: hlo.Program, name: str, index: int, arrays: tuple[hlo.Array, ...]
) -> int:
  """Counts the bytes that a fused computation reads of argument `index`."""
  whole = sum(x.bytes for x in arrays)
  found = list(program.computations[name].values())
  inside = re.compile(rf'\({index}\)')
  parameter = next(
    (i for i in found if i.opcode == 'parameter' and inside.match(i.text)), None
  )
  return _count_used(program, name, parameter, whole) if parameter and whole else 0


def _count_used(program: hlo.Program, name: str, i: hlo.Instruction, whole: int) -> int:
  """Counts the bytes that an instruction's users read, at most `whole`."""
  if i is program.roots[name]:
    return whole
  total = 0
  for user in program.computations[name].values():
    for n, operand in enumerate(user.operands):
      if operand != i.name:
        continue
      if user.opcode == 'bitcast':
        total += _count_used(program, name, user, whole)
      elif user.opcode in _SLICES and n == 0:
        total += sum(x.size for x in user.result)
      elif user.opcode == 'fusion':
        total += _count_read(program, user.called[0], n, i.result)
      elif user.opcode == 'tuple' or (user.opcode in _UPDATES and n == 0):
        continue  # Updated in place or passed on: not read.
      else:
        return whole
  return min(total, whole)


def _count_written(program: hlo.Program, name: str, result: tuple[hlo.Array, ...]) -> int:
  root = program.roots[name]
  found = program.computations[name]
  roots = [found[x] for x in root.operands] if root.opcode == 'tuple' else [root]
  if len(roots) != len(result):
    return sum(x.bytes for x in result)
  total = 0
  for array, i in zip(result, roots, strict=True):
    while i.opcode == 'bitcast':
      i = found[i.operands[0]]
    if array.space or i.opcode == 'parameter':
      continue
    if i.opcode in _UPDATES:
      total += sum(x.size for x in found[i.operands[_UPDATES[i.opcode]]].result)
    else:
      total += array.size
  return total


def _count_convolution(i: hlo.Instruction, left, right) -> float:
  """Counts the operations of a convolution; matrix products on TPUs are convolutions."""
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', i.text)
  assert labels, i
  inputs, kernel, outputs = labels.groups()
  result = i.result[0].shape
  total = 2.0 * result[outputs.index('b')] * result[outputs.index('f')]
  total *= right[kernel.index('i')]
  window = re.search(r'window=\{([^}]*)\}', i.text)
  asked = dict(x.split('=') for x in window[1].split()) if window else {}
  spatial = sorted(x for x in outputs if x.isdigit())
  read = lambda key, n, default: asked[key].split('x')[n] if key in asked else default
  for n, label in enumerate(spatial):
    low, _, _ = str(read('pad', n, '0_0')).partition('_')
    total *= _count_pairs(
      size=left[inputs.index(label)],
      kernel=right[kernel.index(label)],
      result=result[outputs.index(label)],
      low=int(low),
      stride=int(read('stride', n, 1)),
      dilation=int(read('rhs_dilate', n, 1)),
      base=int(read('lhs_dilate', n, 1)),
    )
  return total


@functools.cache
def _count_pairs(*, size, kernel, result, low, stride, dilation, base) -> int:
  """Counts the pairs of result and kernel positions that meet an input number."""
  end = (size - 1) * base
  total = 0
  for place in range(kernel):
    first = place * dilation - low
    places = range(first, first + result * stride, stride)
    total += sum(1 for x in places if 0 <= x <= end and x % base == 0)
  return total


def _count_attention(i: hlo.Instruction, operands) -> float:
  """Counts the operations of cuDNN's attention, which skips no block of a mask."""
  backward = i.target.endswith('Backward')
  B, T, N, H = operands[0][0].shape
  S = operands[1][0].shape[1]
  # Scores and values; backward, the scores again and four gradients.
  return (10.0 if backward else 4.0) * B * N * T * S * H


def _count_pallas(i: hlo.Instruction, operands) -> float:
  """Counts the operations of a TPU's attention kernel over rows or a cache.

  Its name says which products it computes: scores and values, or in a gradient the scores
  again, the gradient of the probabilities, and one or two more gradients.
  """
  products = next((n for name, n in _PRODUCTS.items() if name in i.name), 0)
  arrays = [x[0].shape for x in operands if x and x[0].dtype == 'bf16']
  arrays = [x for x in arrays if len(x) >= 3]
  if not products or len(arrays) < 2:
    return 0.0
  *rows, T, H = arrays[0]
  S = arrays[1][-2]
  return products * math.prod(rows) * T * S * H
