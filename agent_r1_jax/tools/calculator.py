"""A calculator tool without `eval`, bounded in time and memory."""

import ast
import math
import operator

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent import tool_schema

MAX_LENGTH = 1000
MAX_BITS = 10_000  # About 3,000 digits.

_BINARY = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
}


def _round(value, digits: int = 0):
  if abs(digits) > 100:  # Rounding an integer to -10**9 digits takes all memory.
    raise ValueError('round takes at most 100 digits')
  return round(value, digits) if digits else round(value)


_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS = {'pi': math.pi, 'e': math.e}
_FUNCTIONS = {
  **{name: getattr(math, name) for name in ('sqrt', 'exp', 'log', 'log2', 'log10')},
  **{name: getattr(math, name) for name in ('sin', 'cos', 'tan', 'floor', 'ceil', 'gcd')},
  **{'abs': abs, 'min': min, 'max': max, 'round': _round},
}


def evaluate(expression: str) -> int | float:
  """Evaluates + - * / // % **, parentheses, pi, e, and common functions.

  Raises:
    ValueError: The expression is invalid or too large.
    ArithmeticError: It divides by zero or overflows.
  """
  if len(expression) > MAX_LENGTH:
    raise ValueError(f'the expression has more than {MAX_LENGTH} characters')
  try:
    return _evaluate_node(ast.parse(expression.strip(), mode='eval').body)
  except SyntaxError as error:
    raise ValueError(f'not an arithmetic expression: {error.msg}') from None
  except (RecursionError, MemoryError):
    raise ValueError('the expression is nested too deeply') from None
  except TypeError as error:
    raise ValueError(str(error)) from None


def calculator_tool(timeout: float = 5.0) -> tool_lib.Tool:
  """Makes a tool `calculator(expression: str)` with a time-out in seconds."""
  schema = tool_schema.describe(calculator, 'calculator')
  return tool_lib.Tool('calculator', schema, calculator, timeout)


def calculator(expression: str) -> str:
  """Evaluates an arithmetic expression.

  Args:
    expression: For example "3 * (4 + 5) / 2". Powers are written **.
  """
  value = evaluate(expression)
  if isinstance(value, float):
    # 15 digits hide the rounding of binary fractions: 0.1 + 0.2 is 0.3.
    return f'{value:.15g}'
  return str(value)


def _evaluate_node(node: ast.expr) -> int | float:
  match node:
    case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
      return _check_number(value)
    case ast.Name(id=name) if name in _CONSTANTS:
      return _CONSTANTS[name]
    case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
      return _UNARY[type(op)](_evaluate_node(operand))
    case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
      left, right = _evaluate_node(left), _evaluate_node(right)
      if isinstance(op, ast.Pow):
        _check_power(left, right)
      return _check_number(_BINARY[type(op)](left, right))
    case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
      return _check_number(_FUNCTIONS[name](*(_evaluate_node(arg) for arg in args)))
    case ast.BinOp(op=ast.BitXor()):
      raise ValueError('^ is not a power here; write **')
    case ast.Tuple():
      raise ValueError('write numbers without commas')
  raise ValueError(f'{ast.unparse(node)} is not allowed; only numbers and arithmetic are')


def _check_number(value):
  """Returns the number, if it is finite and not too large."""
  if isinstance(value, int):
    if value.bit_length() > MAX_BITS:
      raise ValueError('the number is too large')
  elif not isinstance(value, float) or not math.isfinite(value):
    raise ValueError(f'{value} is not a finite real number')
  return value


def _check_power(base, exponent) -> None:
  """Rejects a power before it is computed: 9**9**9 would take all memory."""
  if isinstance(base, int) and isinstance(exponent, int):
    if abs(base) > 1 and base.bit_length() * max(exponent, 0) > 2 * MAX_BITS:
      raise ValueError('the number is too large')
