"""The configuration: a wrong value is refused by its name, with what it may be."""

import dataclasses
import math
import sys

from absl import flags
import pytest

from agent_r1_jax import config as config_lib
from agent_r1_jax.rl import algorithms

_FIELDS = dataclasses.fields(config_lib.Config)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('learning_rate', -1e-3, 'learning_rate is -0.001; it must be a number, at least 0.'),
    ('learning_rate', math.nan, 'learning_rate is nan; it must be a number.'),
    ('learning_rate', math.inf, 'learning_rate is inf; it must be a number, at least 0.'),
    ('learning_rate', '1e-3', "learning_rate is '1e-3'; it must be a number."),
    ('clip_norm', 0, 'clip_norm is 0; it must be a number above 0.'),
    ('clip_norm', 0.0, 'clip_norm is 0.0; it must be a number above 0.'),
    ('steps', -3, 'steps is -3; it must be a whole number, at least 0.'),
    ('steps', 2.5, 'steps is 2.5; it must be a whole number.'),
    ('steps', True, 'steps is True; it must be a whole number.'),
    ('tasks', 0, 'tasks is 0; it must be a whole number, at least 1.'),
    ('max_error_rate', 1.5, 'max_error_rate is 1.5; it must be a number, from 0 to 1.'),
    ('adam_b2', 1.0, 'adam_b2 is 1.0; it must be a number from 0 to below 1.'),
    ('dtype', 'fp16', "dtype is 'fp16'; give one of 'float32', 'bfloat16'."),
    ('remat', 'some', "remat is 'some'; give one of 'none', 'dots', 'full'."),
    ('optimizer', 'sgd', "optimizer is 'sgd'; give one of 'adamw'"),
    ('long_prompts', 'cut', "long_prompts is 'cut'; give one of 'refuse', 'skip'."),
    ('tools_in_prompt', '', "tools_in_prompt is ''; give one of 'default'"),
    ('offload', 1, 'offload is 1; it must be True or False.'),
    ('model', None, 'model is None; it must be a text.'),
    ('alarms', {}, 'alarms is {}; it must be of'),
  ],
)
def test_a_wrong_value_is_refused(field, value, message):
  config = dataclasses.replace(config_lib.Config(), **{field: value})
  with pytest.raises(ValueError) as error:
    config_lib.check(config, algorithms.grpo(kl_coef=0.0))
  assert str(error.value).startswith(message)


@pytest.mark.parametrize('algorithm', ['grpo', algorithms.grpo, None])
def test_what_is_no_algorithm_is_refused(algorithm):
  with pytest.raises(ValueError, match=r'^algorithm is .*such as algorithms.grpo\(\)'):
    config_lib.check(config_lib.Config(), algorithm)


def test_the_defaults_and_the_edges_pass():
  config_lib.check_values(config_lib.Config())
  edges = {'learning_rate': 0, 'clip_norm': math.inf, 'steps': 0, 'max_error_rate': 1}
  config_lib.check_values(dataclasses.replace(config_lib.Config(), **edges))


@pytest.mark.parametrize('field', [f for f in _FIELDS if f.type in (int, float)])
def test_no_number_may_be_below_0_or_no_number(field):
  for value in (-1, math.nan, 'x', None):
    config = dataclasses.replace(config_lib.Config(), **{field.name: value})
    with pytest.raises(ValueError, match=f'^{field.name} is {value!r}; it must be'):
      config_lib.check_values(config)


def test_the_tables_name_fields():
  names = {field.name for field in _FIELDS}
  tables = ('_AT_LEAST_1', '_ABOVE_0', '_BELOW_1', '_AT_MOST', '_CHOICES')
  for table in tables:
    assert set(getattr(config_lib, table)) <= names


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    (
      '--config.learningrate=1',
      "--config.learningrate: there is no field 'learningrate'; did you mean "
      'learning_rate?',
    ),
    ('-config.alarms.kll=1', "--config.alarms.kll: there is no field 'kll'; did you m"),
    (
      '--config.optim.lr=1',
      "--config.optim.lr: there is no field 'optim'; did you mean ",
    ),
    ('--config.xyzzy', "there is no field 'xyzzy'; there are model, reference"),
    ('--config.steps.x=1', "--config.steps.x: there is no field 'x'; there are"),
  ],
)
def test_a_misspelt_flag_is_answered_in_a_line(monkeypatch, argument, message):
  monkeypatch.setattr(sys, 'argv', ['train', '--config.rows=7', argument])
  with pytest.raises(SystemExit) as error:
    config_lib.define_flags(config_lib.Config(), flag_values=flags.FlagValues())
  assert message in str(error.value)
