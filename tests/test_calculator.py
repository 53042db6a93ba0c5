import math
import time

import pytest

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.tools import calculator as calculator_lib


@pytest.mark.parametrize(
  'expression, text',
  [
    ('2 * 3', '6'),
    (' 1 + 2 * (3 - 4) ', '-1'),
    ('7 / 2', '3.5'),
    ('6 / 2', '3'),
    ('7 // 2 + 7 % 2', '4'),
    ('2 ** 10 - -1', '1025'),
    ('0.1 + 0.2', '0.3'),
    ('2 / 3', '0.666666666666667'),
    ('1e20 * 1.0', '1e+20'),
    ('2 ** -1', '0.5'),
    ('sqrt(16) + abs(-2) + max(1,2,3)', '9'),
    ('round(2.345, 1) + round(7.6)', '10.3'),
    ('round(1234, -2)', '1200'),
    ('round(pi * e, 3)', '8.54'),
    ('3 * (\n4 + 5\n)', '27'),
    ('1 ** 10 ** 9 + (-1) ** 30001 + 0 ** 30000', '0'),
    ('10 ** 2000', '1' + '0' * 2000),
  ],
)
async def test_results(expression, text):
  result = await tool_lib.call(
    calculator_lib.calculator_tool(), {'expression': expression}
  )
  assert (result.text, result.ok) == (text, True)


def test_numbers_keep_their_kind():
  assert calculator_lib.evaluate('2 + 2') == 4
  assert isinstance(calculator_lib.evaluate('2 + 2'), int)
  assert calculator_lib.evaluate('log(e)') == pytest.approx(1.0)
  assert calculator_lib.evaluate('pi') == math.pi


@pytest.mark.parametrize(
  'expression, message',
  [
    ('', 'not an arithmetic expression'),
    ('1 +', 'not an arithmetic expression'),
    ('x = 1', 'not an arithmetic expression'),
    ('import os', 'not an arithmetic expression'),
    ('1\x00', 'null bytes'),
    ('x', 'x is not allowed'),
    ('True + 1', 'True is not allowed'),
    ('"a" * 3', "'a' is not allowed"),
    ('1j', '1j is not allowed'),
    ('[1][0]', 'is not allowed'),
    ('1 if 1 else 2', 'is not allowed'),
    ('1 < 2', 'is not allowed'),
    ('(1).real', 'is not allowed'),
    ('__import__("os").system("true")', 'is not allowed'),
    ('().__class__.__bases__', 'is not allowed'),
    ('open("x")', 'is not allowed'),
    ('max(*[1])', 'is not allowed'),
    ('round(1, ndigits=2)', 'is not allowed'),
    ('(lambda: 1)()', 'is not allowed'),
    ('2 ^ 3', r'write \*\*'),
    ('1,000 + 2', 'without commas'),
    ('max()', 'max'),
    ('sqrt(-1)', 'math domain error|nonnegative'),
    ('(-8) ** 0.5', 'not a finite real number'),
    ('sqrt((-8) ** 0.5)', 'not a finite real number'),
    ('1e308 * 10', 'not a finite real number'),
    ('1e308 * 10 - 1e308 * 10', 'not a finite real number'),
  ],
)
def test_other_expressions_are_refused(expression, message):
  with pytest.raises(ValueError, match=message):
    calculator_lib.evaluate(expression)


@pytest.mark.parametrize(
  'expression', ['1 / 0', '1 % 0', 'exp(1000)', '2.0 ** 10000', '0 ** -1']
)
def test_arithmetic_errors(expression):
  with pytest.raises(ArithmeticError):
    calculator_lib.evaluate(expression)


@pytest.mark.parametrize(
  'expression',
  [
    '9 ** 9 ** 9',
    '9 ** 9 ** 9 ** 9',
    '*'.join(['9 ** 3000'] * 50),
    '(10 ** 3000) ** 1000',
    'round(1, -10 ** 9)',
    'round(1, 10 ** 9)',
    '(' * 499 + '1' + ')' * 499,
    '-' * 999 + '1',
    '1' * 1001,
    '+'.join(['1'] * 600),
  ],
)
def test_no_expression_takes_long(expression):
  start = time.process_time()  # Other load on the machine does not count.
  with pytest.raises(ValueError, match='too large|too deeply|at most|more than|too many'):
    calculator_lib.evaluate(expression)
  assert time.process_time() - start < 5


def test_the_schema_says_what_it_is_for():
  function = calculator_lib.calculator_tool().schema['function']
  assert function['name'] == 'calculator'
  assert function['parameters']['required'] == ['expression']
  assert '**' in function['parameters']['properties']['expression']['description']
