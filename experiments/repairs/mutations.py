"""Small changes of Python source, each of one line: what a person may get wrong."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

_OPERATORS: dict[type, tuple[str, str]] = {
  ast.Add: ('+', '-'),
  ast.Sub: ('-', '+'),
  ast.Mult: ('*', '+'),
  ast.FloorDiv: ('//', '*'),
  ast.Mod: ('%', '//'),
  ast.Lt: ('<', '<='),
  ast.LtE: ('<=', '<'),
  ast.Gt: ('>', '>='),
  ast.GtE: ('>=', '>'),
  ast.Eq: ('==', '!='),
  ast.NotEq: ('!=', '=='),
  ast.Is: ('is', 'is not'),
  ast.IsNot: ('is not', 'is'),
  ast.In: ('in', 'not in'),
  ast.NotIn: ('not in', 'in'),
  ast.And: ('and', 'or'),
  ast.Or: ('or', 'and'),
}
_LARGEST = 1000  # Constants above it are seldom counts or indexes.


class Mutation(NamedTuple):
  """A changed line.

  Attributes:
    line: Its number, from 0.
    old: The line as it was.
    new: The line as it is.
    kind: What was done, in words.
  """

  line: int
  old: str
  new: str
  kind: str

  def apply(self, source: str) -> str:
    """Returns the source with the new line."""
    lines = source.split('\n')
    assert lines[self.line] == self.old
    lines[self.line] = self.new
    return '\n'.join(lines)


def find(source: str) -> list[Mutation]:
  """Returns the mutations of a source, in the order of its lines."""
  lines = source.split('\n')
  found = []
  for node in _walk(ast.parse(source)):
    for line, start, end, new, kind in _changes(node, lines):
      old = lines[line]
      # Columns count bytes.
      data = old.encode()
      changed = (data[:start] + new.encode() + data[end:]).decode()
      if changed != old:
        found.append(Mutation(line, old, changed, kind))
  return sorted(set(found))


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
  """Yields all nodes but those of formatted strings, whose columns are not theirs."""
  yield tree
  for child in ast.iter_child_nodes(tree):
    if not isinstance(child, ast.JoinedStr):
      yield from _walk(child)


def _changes(node: ast.AST, lines: list[str]):
  """Yields (line, first column, last column, new text, kind) of a node's mutations."""
  match node:
    case ast.BinOp(left, operator, right):
      yield from _between(left, right, operator, 'an operator', lines)
    case ast.Compare(left, [operator], [right]):
      yield from _between(left, right, operator, 'a comparison', lines)
    case ast.BoolOp(operator, [left, right]):
      yield from _between(left, right, operator, 'a connective', lines)
    case ast.UnaryOp(ast.Not(), operand) if node.lineno == operand.lineno:
      line = node.lineno - 1
      yield line, node.col_offset, operand.col_offset, '', 'a dropped not'
    case ast.Constant(int(value)) if type(value) is int and value <= _LARGEST:
      line = node.lineno - 1
      text = lines[line].encode()[node.col_offset : node.end_col_offset]
      if text == str(value).encode():
        yield line, node.col_offset, node.end_col_offset, str(value + 1), 'a constant'


def _between(left, right, operator, kind: str, lines: list[str]):
  """Yields the change of the operator that stands between two nodes of one line."""
  old, new = _OPERATORS.get(type(operator), ('', ''))
  if old and left.end_lineno == right.lineno:
    line, start, end = right.lineno - 1, left.end_col_offset, right.col_offset
    text = lines[line].encode()[start:end].decode()
    if text.strip(' ()') == old:
      yield line, start, end, text.replace(old, new), kind
