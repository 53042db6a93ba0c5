"""The configuration: a wrong value is refused by its name, with what it may be."""

import dataclasses
import json
import math
import pathlib
import re
import sys

from absl import flags
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.host import runtime
from agent_r1_jax.rl import algorithms, optimizers
from agent_r1_jax.train import preflight
from agent_r1_jax.train.plan import sizes

_NAMES = list(fields.names(config_lib.Config))
_NUMBERS = [
  name
  for name in _NAMES
  if not name.startswith('alarms.')
  and isinstance(fields.get(config_lib.Config(), name), int | float)
  and not isinstance(fields.get(config_lib.Config(), name), bool)
]


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('optimizer.learning_rate', math.nan, 'is nan; it must be a number.'),
    ('optimizer.learning_rate', math.inf, 'is inf; it must be a number, at least 0.'),
    ('optimizer.learning_rate', '1e-3', "is '1e-3'; it must be a number."),
    ('optimizer.clip_norm', 0.0, 'is 0.0; it must be a number above 0.'),
    ('schedule.steps', True, 'is True; it must be a whole number.'),
    ('schedule.tasks', 0, 'is 0; it must be a whole number, at least 1.'),
    ('limits.step_seconds', 0.0, 'is 0.0; it must be a number above 0.'),
    ('engine.rows', -1, 'is -1; it must be a whole number, and 0 chooses it.'),
    ('max_error_rate', 1.5, 'is 1.5; it must be a number, from 0 to 1.'),
    ('optimizer.adam_b2', 1.0, 'is 1.0; it must be a number from 0 to below 1.'),
    ('optimizer.adam_eps', 0.0, 'is 0.0; it must be a number above 0.'),
    ('model.remat', 'some', "is 'some'; give one of 'none', 'dots', 'full'."),
    ('optimizer.kind', 'sgd', "is 'sgd'; give one of 'adamw'"),
    ('chat.long_prompts', 'cut', "is 'cut'; give one of 'refuse', 'skip'."),
    ('chat.tools_in_prompt', '', "is ''; give one of 'default'"),
    ('optimizer.offload', 1, 'is 1; it must be True or False.'),
    ('model.path', None, 'is None; it must be a text.'),
    ('sinks', 'tensorboard,wb', "is 'tensorboard,wb', with wb; give some of"),
    ('sinks', '.my_sink', "is '.my_sink', with .my_sink; give some of"),
    ('profile', '²', "is '²'; give numbers"),
    ('profile', '2,last', "is '2,last'; give numbers of steps, such as '2,50'."),
  ],
)
def test_a_wrong_value_is_refused(field, value, message):
  config = fields.replace(config_lib.Config(), {field: value})
  with pytest.raises(ValueError) as error:
    preflight.check_config(config, algorithms.grpo(kl_coef=0.0))
  assert str(error.value).startswith(f'{field} {message}')


def test_a_sink_that_is_not_installed_is_refused(monkeypatch):
  monkeypatch.setattr(preflight.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"wandb is not installed; pip .*_jax\[wandb\]'"):
    preflight.check_config(tiny.run_config(sinks='wandb'), algorithms.grpo(kl_coef=0.0))


def test_a_module_that_is_no_sink_is_refused():
  for name, reason in {
    'no_such.sink': "No module named 'no_such'",
    'agent_r1_jax.fields': "has no attribute 'Sink'",
  }.items():
    config = tiny.run_config(sinks=f'tensorboard,{name}')
    with pytest.raises(ValueError, match=f'^sinks: {name} is no module .*{reason}'):
      preflight.check_config(config, algorithms.grpo(kl_coef=0.0))


@pytest.mark.parametrize('name', ['alarms', 'engine'])
def test_a_part_that_is_none_is_refused(name):
  config = config_lib.Config()
  setattr(config, name, {})
  with pytest.raises(ValueError, match=f'^{name} is {{}}; it must be of'):
    config.check()


@pytest.mark.parametrize('algorithm', ['grpo', None])
def test_what_is_no_algorithm_is_refused(algorithm):
  with pytest.raises(ValueError, match=r'^algorithm is .*such as algorithms.grpo\(\)'):
    preflight.check_config(config_lib.Config(), algorithm)


def test_defaults_and_values_at_the_edge_of_their_range_pass():
  config_lib.Config().check()
  edges = {'learning_rate': 0, 'clip_norm': math.inf, 'steps': 0, 'max_error_rate': 1}
  tiny.run_config(**edges).check()


@pytest.mark.parametrize('field', _NUMBERS)
def test_no_number_may_be_below_0_or_no_number(field):
  for value in (-1, math.nan, 'x', None):
    config = fields.replace(config_lib.Config(), {field: value})
    with pytest.raises(ValueError, match=f'^{field} is {value!r}; it must be'):
      config.check()


def test_choices_are_those_of_the_code():
  for kind in optimizers.KINDS:
    config_lib.Optimizer(kind=kind).check()


def test_names_of_sizes_are_names_of_fields():
  assert set(config_lib.SIZES) <= set(_NAMES)


class TestReplace:
  def test_the_given_one_stays_as_it_is(self):
    before = config_lib.Config()
    after = fields.replace(before, {'engine.rows': 3, 'seed': 7})
    assert (after.engine.rows, after.seed) == (3, 7)
    assert before == config_lib.Config()

  def test_a_name_of_no_field_is_refused(self):
    with pytest.raises(ValueError, match="no field 'engine.row'; did you mean engine.ro"):
      fields.replace(config_lib.Config(), {'engine.row': 3})


def test_sizes_of_a_run_are_those_in_its_file(tmp_path):
  """On such devices as these; elsewhere only the length of episodes stays."""
  written = tiny.run_config(rows=3, slots=256, microbatch=2, remat='full')
  file, default = tmp_path / 'config.json', config_lib.Config()
  assert sizes.load_recorded(default, tmp_path) == [default, default]
  text = {'devices': runtime.describe_devices()} | dataclasses.asdict(written)
  file.write_text(json.dumps(text))
  least = tiny.run_config(slots=256)
  assert sizes.load_recorded(default, tmp_path) == [written, least]
  given = tiny.run_config(remat='none')
  assert [x.model.remat for x in sizes.load_recorded(given, tmp_path)] == ['none'] * 2
  file.write_text(json.dumps(text | {'devices': '9 x TPU v5, processes: 3'}))
  assert sizes.load_recorded(default, tmp_path) == [least]


def test_what_may_change_are_fields_and_the_page_lists_them():
  page = pathlib.Path(__file__).parents[1] / 'docs' / 'launching.md'
  text = page.read_text().partition('These fields may change')[2]
  said = text.partition('.\n\n')[0]
  listed = re.findall(r'`([^`]+)`', said)
  inner = lambda x: [n for n in _NAMES if f'{n}.'.startswith(f'{x}.')]
  assert sorted(n for x in listed for n in inner(x)) == sorted(config_lib.MAY_CHANGE)
  assert all(inner(x) for x in listed) and 'engine.slots' not in config_lib.MAY_CHANGE


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--config.engine.steps=1', 'no such field; did you mean schedule.steps?'),
    (
      '-config.alarms.kll=1',
      '--config.alarms.kll: there is no such field; did you mean ',
    ),
    ('--config.optim.lr=1', '--config.optim.lr: there is no such field; did you mean '),
    ('--config.optimizer.lr=1', 'did you mean optimizer.learning_rate?'),
    ('--config.batch_size=1', 'did you mean schedule.tasks?'),
    ('--config.optimizer.decay=1', 'did you mean optimizer.'),
    ('--config.engine=1', 'no such field; name one of engine.rows, engine.slots'),
    # Before each part had its own dataclass, all fields lay side by side.
    ('--config.checkpoint_every=1', 'no such field; did you mean checkpoint.every?'),
    ('--config.xyzzy', 'there is no such field; there are model, chat'),
    ('--config.schedule.steps.x=1', '--config.schedule.steps.x: there is no such field'),
  ],
)
def test_a_misspelt_flag_is_answered_in_a_line(monkeypatch, argument, message):
  monkeypatch.setattr(sys, 'argv', ['train', '--config.engine.rows=7', argument])
  with pytest.raises(SystemExit) as error:
    fields.define_flags(config_lib.Config(), flag_values=flags.FlagValues())
  assert message in str(error.value)


def test_flags_set_fields_and_refuse_values_of_another_type(monkeypatch):
  def parse(*arguments):
    argv = ['train', *arguments]
    monkeypatch.setattr(sys, 'argv', argv)  # config_flags reads it itself.
    values = flags.FlagValues()
    fields.define_flags(config_lib.Config(), flag_values=values)
    values(argv)
    return values['config'].value

  config = parse(
    '--config.engine.rows=7',
    '--config.sampling.temperature=0.5',
    '--config.model.path=m',
  )
  assert config == config_lib.Config(
    engine=config_lib.Engine(rows=7),
    sampling=config_lib.Sampling(temperature=0.5),
    model=config_lib.Model(path='m'),
  )
  with pytest.raises(flags.IllegalFlagValueError, match="invalid literal .*'many'"):
    parse('--config.engine.rows=many')


def test_a_first_try_is_small_and_other_flags_still_win(monkeypatch, tmp_path):
  def parse(*arguments):
    argv = ['train', *arguments]
    monkeypatch.setattr(sys, 'argv', argv)
    values, default = flags.FlagValues(), config_lib.Config()
    fields.define_flags(default, flag_values=values)
    values(argv)
    assert default == config_lib.Config()
    schedule = values['config'].value.schedule
    return schedule.steps, schedule.tasks, schedule.samples

  assert parse('--config.seed=1') == parse('--nofirst_try') == (100, 16, 8)
  assert parse('--first_try') == parse('--first_try=True') == (4, 4, 4)
  assert parse('--config.schedule.steps=9', '--first_try') == (9, 4, 4)
  # As absl reads flags: the last one wins, and `--` ends them.
  assert parse('--first_try', '--nofirst_try') == (100, 16, 8)
  assert parse('--first_try=1', '--first_try=0') == (100, 16, 8)
  assert parse('--', '--first_try') == (100, 16, 8)
  assert parse('a', '--first_try') == (4, 4, 4)
  (tmp_path / 'flags').write_text('--first_try\n')
  assert parse(f'--flagfile={tmp_path / "flags"}') == (4, 4, 4)
  with pytest.raises(flags.IllegalFlagValueError, match='first_try'):
    parse('--first_try=perhaps')


def test_help_has_a_line_for_each_field(monkeypatch, capsys):
  argv = ['train', '--help_config']
  monkeypatch.setattr(sys, 'argv', argv)
  values = flags.FlagValues()
  config = config_lib.Config(engine=config_lib.Engine(rows=7))
  fields.define_flags(config, flag_values=values)
  with pytest.raises(SystemExit) as ended:
    values(argv)
  assert ended.value.code == 0
  text = capsys.readouterr().out
  assert '--config.engine.rows=7: Rows of the KV cache' in text
  lines = text.splitlines()
  assert len(lines) == len([*fields.names(config_lib.Config)])
  # Each line ends with a sentence of the docstring, none of which is missing.
  assert all(re.fullmatch(r'--config\.[\w.]+=[^:]+: .+\.', line) for line in lines)
  assert 'Config(' not in values.get_help()
