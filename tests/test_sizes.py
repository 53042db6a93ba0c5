"""Sizes that nobody gave, and the memory that a run is expected to take."""

import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import pytest
import runs
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.engine import device as device_lib
from agent_r1_jax.host import memory as memory_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, learner
from agent_r1_jax.train.plan import footprint, sizes
from experiments import published

_GRPO = algorithms.grpo(kl_coef=0.0)
_WITH_REFERENCE = algorithms.grpo(kl_coef=0.001)
_PPO = algorithms.ppo(kl_coef=0.0)
_GB = sizes.GB
model = runs.model


def _shape(name: str = 'tiny', **changes) -> decoder.DecoderConfig:
  return dataclasses.replace(published.read_shape(name), **changes)


def _cpu(gb: float = 24.0, **machine) -> footprint.Machine:
  return footprint.Machine('cpu', gb * _GB, **machine)


def _gpu(gb: float = 80.0, **machine) -> footprint.Machine:
  return footprint.Machine('gpu', gb * _GB, **machine)


def _choose(config, shape, machine, algorithm: Any = _GRPO, seconds=1e9):
  """The sizes, and what chose them."""
  models = footprint.ModelShapes(shape, algorithm)
  holds = footprint.Footprint(config, models, machine, seconds)
  return sizes.choose(config, holds), holds


@pytest.fixture
def compiled(monkeypatch) -> list[tuple]:
  """A compiler that knows one rule; gets what it was asked for."""
  calls = []

  def lower(self, program, sizes):
    calls.append(footprint._key(program, sizes))
    if program != 'the gradient':
      return [0.1 * _GB]
    layer = 0.8 if sizes.remat == 'none' else 0.05
    tokens = sizes.batch.microbatch * sizes.batch.row_tokens / 1024
    return [(0.2 + tokens * layer * self.models.policy.num_layers / 12) * _GB]

  monkeypatch.setattr(footprint.Footprint, 'lower', lower)
  monkeypatch.setattr(footprint, '_count_temporaries', float)
  return calls


@pytest.mark.usefixtures('compiled')
class TestChoose:
  @pytest.mark.parametrize('fields_given', [config_lib.SIZES, ['engine.slots']])
  def test_what_is_given_stays_and_the_rest_is_chosen(self, fields_given):
    given = {name: 192 * (i + 1) for i, name in enumerate(fields_given)}
    config = fields.replace(config_lib.Config(), given)
    chosen, _ = _choose(config, _shape(), _cpu(0.001, cores=4))
    assert {name: fields.get(chosen, name) for name in given} == given
    assert all(fields.get(chosen, name) > 0 for name in config_lib.SIZES)

  @pytest.mark.parametrize('gb', [1, 8, 24, 96])
  @pytest.mark.parametrize('name', ['tiny', 'qwen2.5-0.5b'])
  def test_what_is_chosen_fits_or_is_the_least_and_is_refused(self, name, gb):
    chosen, holds = _choose(config_lib.Config(), _shape(name), _cpu(gb, cores=4))
    assert chosen.engine.slots % 128 == 0 == chosen.engine.rows % chosen.engine.replicas
    assert chosen.batch.row_tokens == chosen.engine.slots
    if holds.measure(footprint.RunSizes.of(chosen), gb * _GB).bytes <= gb * _GB:
      assert f'of {gb}.0 GB' in sizes.check(chosen, holds)
      return
    engine = chosen.engine
    assert (engine.rows, engine.slots, chosen.batch.microbatch) == (1, 1024, 1)
    with pytest.raises(ValueError, match=rf'this process has {gb}.0 GB'):
      sizes.check(chosen, holds)

  def test_an_episode_and_the_models_positions_bound_the_slots(self):
    config = tiny.run_config(max_turns=2, max_turn_tokens=100, max_tool_tokens=60)
    short = _shape(max_positions=512)
    choose = lambda config, shape: _choose(config, shape, _cpu(64))[0].engine.slots
    assert 1024 + 2 * 160 <= choose(config, _shape()) < 1024 + 2 * 160 + 128
    assert choose(tiny.run_config(max_turns=50), _shape()) == 8192
    assert choose(config, short) == 512

  @pytest.mark.parametrize(
    'axes, chips, groups',
    [({'data': 2}, 8, 8), ({'context': 8}, 8, 1), ({'data': 3, 'tensor': 2}, 12, 6)],
  )
  def test_the_microbatch_follows_the_chips(self, axes, chips, groups):
    config, shape = tiny.run_config(**axes), _shape('qwen2.5-0.5b')
    chosen, _ = _choose(config, shape, _gpu(16, chips=chips, engines=chips))
    assert chosen.batch.microbatch % groups == 0
    assert chosen.batch.row_tokens % config.mesh.context == 0

  @pytest.mark.parametrize('gb, remat', [(96, 'none'), (28, 'full')])
  def test_activations_are_recomputed_before_rows_become_fewer(self, gb, remat):
    shape, config = _shape('qwen2.5-0.5b'), tiny.run_config(slots=8192)
    chosen, _ = _choose(config, shape, _cpu(gb))
    assert chosen.model.remat == remat
    config.model.remat = 'none'
    without = _choose(config, shape, _cpu(gb))[0].engine.rows
    assert (without < chosen.engine.rows) == (remat == 'full')

  def test_activations_are_not_recomputed_where_layers_are_unrolled(self, compiled):
    shape = _shape('qwen2.5-0.5b', num_layers=4)
    assert _choose(config_lib.Config(), shape, _cpu(9))[0].model.remat == 'none'
    assert {remat for name, remat, *_ in compiled if 'gradient' in name} == {'none'}

  def test_rows_follow_the_engines_and_replicas_the_cores(self):
    engine = lambda machine, **given: (
      _choose(tiny.run_config(**given), _shape(), machine)[0].engine
    )
    rows = [engine(_gpu(chips=n, engines=n)).rows for n in (1, 4, 8)]
    assert rows == [128, 32, 16]
    replicas = [engine(_cpu(64, cores=4), rows=n).replicas for n in (0, 6, 26)]
    assert replicas == [4, 1, 2] and engine(_gpu(cores=16)).replicas == 1


class TestCompiler:
  def test_it_is_asked_neither_about_what_fits_anyway_nor_what_cannot(self, compiled):
    chosen, holds = _choose(tiny.run_config(slots=1024), _shape(), _cpu())
    assert 'estimated peak below' in sizes.check(chosen, holds)
    chosen, holds = _choose(config_lib.Config(), _shape('qwen2.5-32b'), _gpu())
    with pytest.raises(ValueError, match='or more chips'):
      sizes.check(chosen, holds)
    assert not compiled

  def test_it_is_asked_once_about_each_program(self, compiled):
    config = tiny.run_config(slots=8192, rows=8)
    chosen, holds = _choose(config, _shape('qwen2.5-0.5b'), _gpu(26))
    assert (chosen.batch.microbatch, chosen.model.remat) == (2, 'full')
    sizes.check(chosen, holds)
    assert len(set(compiled)) == len(compiled) == 5

  def test_what_it_refuses_to_compile_does_not_fit(self, monkeypatch):
    """So a TPU's compiler does; any other error of it is ours."""

    def lower(self, program, sizes):
      if program == 'the gradient' and sizes.batch.microbatch > 1:
        raise jax.errors.JaxRuntimeError(f'{code}: Ran out of memory in hbm.')
      return [_GB]

    monkeypatch.setattr(footprint.Footprint, 'lower', lower)
    monkeypatch.setattr(footprint, '_count_temporaries', float)
    config, shape = tiny.run_config(slots=4096), _shape('qwen2.5-0.5b')
    code = 'RESOURCE_EXHAUSTED'
    assert _choose(config, shape, _gpu())[0].batch.microbatch == 1
    code = 'INTERNAL'
    with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
      _choose(config, shape, _gpu())

  def test_without_time_it_is_asked_once_and_the_line_says_so(
    self, compiled, monkeypatch
  ):
    clock = itertools.count(step=10)
    monkeypatch.setattr(footprint.time, 'monotonic', lambda: next(clock))
    shape, config = _shape('qwen2.5-0.5b'), config_lib.Config()
    chosen, holds = _choose(config, shape, _cpu(), seconds=5.0)
    assert len(compiled) == 1
    line = sizes.check(chosen, holds)
    assert line.endswith('lack of time: sampling, the gradient, the update')

  @pytest.mark.parametrize('kind', ['adamw', 'muon'])
  def test_no_program_takes_more_than_the_bound(self, kind):
    sizes = {'rows': 32, 'slots': 1024, 'microbatch': 2, 'remat': 'none'}
    config = tiny.run_config(**sizes, optimizer=kind)
    config, holds = _choose(config, _shape(num_layers=3, dtype='bfloat16'), _cpu())
    chosen = footprint.RunSizes.of(config)
    for program in footprint._PROGRAMS:
      assert 0 < holds._compile(program, chosen) < holds.bound(chosen), program

  def test_its_programs_are_those_of_the_run(self, model, tmp_path, monkeypatch):
    """Else the run would compile them again."""
    texts: dict[str, list[str]] = {'asked': [], 'run': []}
    count = footprint._count_temporaries

    def keep(lowered):
      texts['asked'].append(lowered.as_text())
      return count(lowered)

    monkeypatch.setattr(footprint, '_count_temporaries', keep)
    monkeypatch.setattr(footprint, '_OBVIOUS', 0.0)
    config = sizes.resolve(runs.config(model, **_SHORT), _WITH_REFERENCE)
    monkeypatch.setattr(footprint, '_OBVIOUS', 1.0)
    for module, name in ((learner, '_gradient'), (learner, '_apply')):
      monkeypatch.setattr(module, name, _Spy(getattr(module, name), texts['run']))
    for name in ('decode', 'prefill'):
      program = getattr(device_lib.programs_lib, name)
      monkeypatch.setattr(device_lib.programs_lib, name, _Spy(program, texts['run']))
    runs.run(config, tmp_path, algorithm=_WITH_REFERENCE)
    assert len(texts['asked']) == 4 and set(texts['asked']) <= set(texts['run'])


class _Spy:
  """Calls a jitted function, and keeps the text of what it compiles."""

  def __init__(self, function, texts):
    self._function, self._texts, self.lower = function, texts, function.lower

  def __call__(self, *args, **kwargs):
    self._texts.append(self._function.lower(*args, **kwargs).as_text())
    return self._function(*args, **kwargs)


class TestCount:
  def test_what_more_is_loaded_takes_more(self):
    def peak(algorithm: Any = _GRPO, chips=1, **given):
      config = tiny.run_config(rows=16, slots=1024, **given)
      models, machine = footprint.ModelShapes(shape, algorithm), _gpu(chips=chips)
      phases = footprint.Footprint(config, models, machine).list_phases(
        footprint.RunSizes.of(config), {}
      )
      return max(sum(parts.values()) for parts in phases.values())

    shape, parameters = _shape('qwen2.5-3b', dtype='bfloat16'), 4 * 3.086e9
    assert peak(_WITH_REFERENCE) - peak() == pytest.approx(parameters, rel=0.01)
    assert peak(_PPO) - peak() == pytest.approx(3 * parameters, rel=0.01)
    assert peak(sync_every=2) - peak() == pytest.approx(parameters, rel=0.01)
    assert peak(chips=8) < peak() - 3 * parameters

  @pytest.mark.parametrize('eval_every', [0, 5])
  @pytest.mark.parametrize('ahead, samplers', [(0, 0), (1, 0), (1, 1)])
  def test_rollouts_that_are_played_ahead_need_memory(self, ahead, samplers, eval_every):
    """Of their sampling beside an update, and of a policy beside an evaluation's."""
    given = {'ahead': ahead, 'samplers': samplers, 'eval_every': eval_every}
    config = tiny.run_config(rows=16, slots=1024, **given)
    models = footprint.ModelShapes(_shape(), _GRPO)
    counted = footprint.Footprint(config, models, _gpu(chips=2))
    phases = counted.list_phases(footprint.RunSizes.of(config), {'sampling': 7.0})
    beside = 7.0 if ahead and not samplers else None
    for name in ('gradient', 'update'):
      assert phases[name].get('temporaries of sampling') == beside
    # Chips that only sample have nothing of the training, and the others no engine.
    assert ('cache' in phases['gradient']) == ('state of adamw' in phases['rollout'])
    assert ('cache' in phases['gradient']) == (not samplers)
    copy = counted.parts['copy'] if ahead and eval_every else None
    assert phases['rollout'].get("evaluation's copy of the policy") == copy

  def test_the_tables_of_the_document_are_what_is_counted(self):
    """Qwen2.5-3B on one GPU of 80 GB, in docs/memory.md."""
    text = pathlib.Path(__file__).parents[1].joinpath('docs', 'memory.md').read_text()
    parts, choices = text.partition('## Qwen2.5-3B')[2].split('\n\n| ')[1:3]
    read = lambda table: {
      cells[1].strip(' *`'): [float(cell.strip(' *') or 0) for cell in cells[2:-1]]
      for line in table.split('\n\n')[0].split('\n')[2:]
      for cells in [line.split('|')]
    }
    models = footprint.ModelShapes(
      _shape('qwen2.5-3b', dtype='bfloat16'), _WITH_REFERENCE
    )

    def count(name, value):
      given = {'engine.rows': 32, 'engine.slots': 4096, name: value}
      config = fields.replace(config_lib.Config(), given)
      phases = footprint.Footprint(config, models, _gpu()).list_phases(
        footprint.RunSizes.of(config), {}
      )
      return list(phases.values())

    for change, numbers in read(choices).items():
      name, _, value = change.partition('=')
      found = count(name, {'True': True, '16': 16}.get(value, value))
      assert [round(sum(phase.values()) / _GB, 1) for phase in found] == numbers, change
    found, table = count('optimizer.kind', 'adamw8'), read(parts)
    table.pop('together')
    assert len(table) == 7
    for part, numbers in table.items():
      assert [round(phase.get(part, 0) / _GB, 1) for phase in found] == numbers, part

  def test_a_refusal_names_the_parts_and_the_fields(self, compiled):
    given = {'rows': 256, 'slots': 2048, 'microbatch': 4, 'remat': 'full'}
    shape = _shape('qwen2.5-3b', dtype='bfloat16')
    config = tiny.run_config(**given, dtype='bfloat16')
    config, holds = _choose(config, shape, _gpu(), _WITH_REFERENCE)
    with pytest.raises(ValueError, match='each chip has 80.0 GB') as caught:
      sizes.check(config, holds)
    lines = [x.split() for x in str(caught.value).splitlines() if x.startswith('  ')]
    numbers = [float(words[0]) for words in lines]
    assert numbers == sorted(numbers, reverse=True)
    total = float(str(caught.value).partition('take ')[2].split()[0])
    assert total == pytest.approx(sum(numbers), abs=0.1)  # Each is rounded.
    assert '24.69 GB  state of adamw: optimizer.kind=adamw8' in str(caught.value)
    assert 'cache: fewer engine.rows' in str(caught.value) and not compiled


class TestMachine:
  def test_a_variable_says_otherwise(self, monkeypatch):
    monkeypatch.setenv(sizes.MEMORY_VARIABLE, '3.5')
    assert sizes.find_machine(config_lib.Mesh()).memory == 3.5e9
    for text in ('much', '0', '-1', 'nan'):
      monkeypatch.setenv(sizes.MEMORY_VARIABLE, text)
      with pytest.raises(ValueError, match=f'{sizes.MEMORY_VARIABLE} is .{text}'):
        sizes.find_machine(config_lib.Mesh())

  def test_programs_are_compiled_for_chips_that_are_not_here(self):
    """The mesh of such chips is made even of one, and the programs lie on them."""
    absent = tuple(jax.devices())
    machine = _cpu(absent=absent, absent_engine=absent)
    given = {'rows': 4, 'slots': 128, 'microbatch': 1, 'row_tokens': 128, 'remat': 'full'}
    given |= {'prefill_rows': 2, 'prefill_tokens': 32, 'bucket': 128, 'replicas': 1}
    config = tiny.run_config(**given)
    shape = _shape(num_layers=1)
    models = footprint.ModelShapes(shape, _GRPO)
    for chips, on_mesh in ((_cpu(), False), (machine, True)):
      holds = footprint.Footprint(config, models, chips, 1e9)
      chosen = footprint.RunSizes.of(config)
      for program in footprint._PROGRAMS:
        texts = [lowered.as_text() for lowered in holds.lower(program, chosen)]
        assert texts and all(('sdy.mesh' in x) == on_mesh for x in texts), program

  def test_control_groups_are_obeyed(self, tmp_path, monkeypatch):
    """Version 2, in a group whose parent has the lower limit."""
    root = tmp_path / 'cgroup'
    (root / 'a' / 'b').mkdir(parents=True)
    for folder, limit in (('a', '5000000'), ('a/b', 'max')):
      (root / folder / 'memory.max').write_text(limit + '\n')
      (root / folder / 'memory.current').write_text('3000000\n')
      (root / folder / 'memory.stat').write_text('file 9\ninactive_file 1000000\n')
    (tmp_path / 'self').write_text('0::/a/b\n')
    monkeypatch.setattr(memory_lib, '_GROUPS', root)
    monkeypatch.setattr(memory_lib, '_GROUP', tmp_path / 'self')
    own = memory_lib._own_memory()
    assert abs(memory_lib.available_memory() - 3_000_000 - own) < 1e8


# One step of a second or two.
_SHORT: dict[str, Any] = {'steps': 1, 'eval_every': 0, 'max_turns': 1}
