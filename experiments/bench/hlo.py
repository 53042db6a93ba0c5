"""Parses the text of a compiled program (HLO): computations, arrays and loops."""

import math
import re
from typing import NamedTuple

_ARRAY = re.compile(r'\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?')
_HEAD = re.compile(r'(ENTRY )?%?([\w.-]+) .*{$')
_NAME = re.compile(r'\s+(ROOT )?%?([\w.-]+) = ')
_CALLED = re.compile(
  r'(?:calls|body|to_apply|branch_computations|true_computation|false_computation)='
  r'(\{[^}]*\}|%[\w.-]+)'
)


class Array(NamedTuple):
  """An array in an instruction's result."""

  dtype: str  # As HLO writes it, for example bf16.
  shape: tuple[int, ...]
  space: int  # Its memory space; 0 is the chip's main memory.

  @property
  def bits(self) -> int:
    """Bits per number."""
    digits = re.match(r'[a-z]+(\d+)', self.dtype)
    return int(digits[1]) if digits else 8

  @property
  def size(self) -> int:
    """Bytes, in any memory space."""
    return math.prod(self.shape) * self.bits // 8

  @property
  def bytes(self) -> int:
    """Bytes in main memory."""
    return 0 if self.space else self.size


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  result: tuple[Array, ...]
  opcode: str
  operands: tuple[str, ...]
  text: str  # The arguments and attributes.

  @property
  def called(self) -> list[str]:
    """The computations that it calls."""
    return [
      name
      for found in _CALLED.findall(self.text)
      for name in re.findall(r'%([\w.-]+)', found)
    ]

  @property
  def constant(self) -> int | None:
    """The value of an integer constant; None for other instructions."""
    found = re.match(r'\((\d+)\)', self.text) if self.opcode == 'constant' else None
    return int(found[1]) if found else None

  @property
  def part(self) -> str:
    """JAX's name for the operation (`op_name`)."""
    found = re.search(r'op_name="([^"]*)"', self.text)
    return found[1] if found else ''

  @property
  def target(self) -> str:
    """The target of a custom call; for a Pallas kernel on GPUs, the kernel's name."""
    found = re.search(r'custom_call_target="([^"]+)"', self.text)
    kernel = re.search(r'/(\w+)/mpmd_map', self.part)
    if kernel and found and found[1].startswith('mosaic_gpu'):
      return kernel[1]
    return found[1] if found else ''


class Program:
  """The computations of a compiled program, parsed from `jax.stages.Compiled.as_text`.

  Attributes:
    entry: The name of the entry computation.
    computations: The instructions of each computation, by their names.
    roots: The instruction that is the result of each computation.
  """

  def __init__(self, text: str):
    """Parses the text."""
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.roots: dict[str, Instruction] = {}
    self.entry = name = ''
    for line in text.splitlines():
      if found := _NAME.match(line):
        instruction = _parse(found[2], line[found.end() :])
        self.computations[name][instruction.name] = instruction
        if found[1]:
          self.roots[name] = instruction
      elif head := _HEAD.match(line):
        name = head[2]
        self.entry = name if head[1] else self.entry
        self.computations[name] = {}

  def operands(self, name: str, i: Instruction) -> list[tuple[Array, ...]]:
    """Returns the arrays of each operand of an instruction in computation `name`."""
    found = self.computations[name]
    return [found[x].result if x in found else () for x in i.operands]

  def count_passes(self, name: str, loop: Instruction) -> int | None:
    """Returns the trip count of a loop; None if it depends on the data.

    XLA notes it, or the counter's start, step and bound are constants.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
      return int(noted[1])
    condition, body = (
      re.findall(rf'{what}=%([\w.-]+)', loop.text)[0] for what in ('condition', 'body')
    )
    test = self.roots[condition]
    if test.opcode != 'compare' or 'direction=LT' not in test.text:
      return None
    counter, bound = (self.computations[condition].get(x) for x in test.operands)
    if not (counter and bound) or counter.opcode != 'get-tuple-element':
      return None
    index = int(re.findall(r'index=(\d+)', counter.text)[0])
    end = bound.constant
    before = self.computations[name].get(loop.operands[0])
    begin = self._find_constant(name, before, index)
    step = self._find_step(body, index)
    if end is None or begin is None or not step:
      return None
    return max(0, -(-(end - begin) // step))

  def _find_constant(self, name: str, i: Instruction | None, index: int) -> int | None:
    if i is None or i.opcode != 'tuple':
      return None
    element = self.computations[name][i.operands[index]]
    while element.opcode in ('copy', 'bitcast'):
      element = self.computations[name][element.operands[0]]
    return element.constant

  def _find_step(self, body: str, index: int) -> int | None:
    """Returns the step by which element `index` grows in one pass."""
    found, root = self.computations[body], self.roots[body]
    if root.opcode != 'tuple':
      return None
    end = found[root.operands[index]]
    if end.opcode == 'fusion':  # On a GPU, the addition is a separate kernel.
      inner = end.called[0]
      constants = [i.constant for i in self.computations[inner].values()]
      steps = [x for x in constants if x is not None]
      return steps[0] if self.roots[inner].opcode == 'add' and len(steps) == 1 else None
    steps = [found[x].constant for x in end.operands] if end.opcode == 'add' else []
    return next((x for x in steps if x is not None), None)


def _parse(name: str, text: str) -> Instruction:
  shapes, rest = _split(text)
  opcode, _, rest = rest.strip().partition('(')
  arguments, attributes = _split('(' + rest)
  return Instruction(
    name=name,
    result=tuple(
      Array(dtype, tuple(int(n) for n in shape.split(',') if n), int(space or 0))
      for dtype, shape, space in _ARRAY.findall(shapes)
    ),
    opcode=opcode,
    operands=tuple(re.findall(r'%([\w.-]+)', arguments)),
    text=arguments + attributes,
  )


def _split(text: str) -> tuple[str, str]:
  """Splits a text after its first parenthesis closes, or else at the first space."""
  if not text.startswith('('):
    head, _, rest = text.partition(' ')
    return head, rest
  depth = 0
  for n, letter in enumerate(text):
    depth += (letter == '(') - (letter == ')')
    if not depth:
      return text[: n + 1], text[n + 1 :]
  return text, ''
