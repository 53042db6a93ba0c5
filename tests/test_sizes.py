"""Sizes that nobody gave, and the memory that a run is expected to take."""

import dataclasses
import json
import os
import pathlib
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import script
import test_train
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields as fields_lib
from agent_r1_jax import types
from agent_r1_jax.checks import memory, sizes
from agent_r1_jax.engine import active_request, automaton_guide
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, sampling_params
from agent_r1_jax.rl import algorithms, learner, optimizers
from agent_r1_jax.train import metrics, setup

_GRPO = algorithms.grpo(kl_coef=0.0)
_WITH_REFERENCE = algorithms.grpo(kl_coef=0.001)
_PPO = algorithms.ppo(kl_coef=0.0)
model = test_train.model


def _qwen(size: str = '3b', dtype='bfloat16', remat='full') -> decoder.DecoderConfig:
  V, D, L, N, K, H, F, tied = {
    # Of the vocabulary and width of 0.5B.
    'small': (151_936, 896, 2, 14, 2, 64, 4864, True),
    '0.5b': (151_936, 896, 24, 14, 2, 64, 4864, True),
    '3b': (151_936, 2048, 36, 16, 2, 128, 11_008, True),
    '7b': (152_064, 3584, 28, 28, 4, 128, 18_944, False),
    '14b': (152_064, 5120, 48, 40, 8, 128, 13_824, False),
    '32b': (152_064, 5120, 64, 40, 8, 128, 27_648, False),
  }[size]
  return decoder.DecoderConfig(
    'qwen2',
    V,
    D,
    L,
    N,
    K,
    H,
    F,
    tie_embeddings=tied,
    dtype=dtype,
    remat=remat,
  )


def _tiny(**shape) -> decoder.DecoderConfig:
  small: dict[str, Any] = {
    'vocab_size': 1024,
    'embed_dim': 128,
    'num_layers': 2,
    'num_heads': 4,
  }
  small |= {'num_kv_heads': 2, 'head_dim': 32, 'mlp_dim': 384, 'tie_embeddings': True}
  return decoder.DecoderConfig('llama', **small | shape)


def _gpu(gb=80.0, **fields) -> memory.Machine:
  return memory.Machine('gpu', gb * 1e9, **fields)


class TestChoose:
  def test_what_is_given_stays(self):
    given: dict[str, Any] = {name: 7 * (i + 1) for i, name in enumerate(sizes.FIELDS)}
    config = tiny.run_config(**given, remat='full')
    machine = memory.Machine('cpu', 1e6)
    assert sizes.choose(config, memory.Models(_tiny(), _GRPO), machine) == config

  @pytest.mark.parametrize('field', ['rows', 'slots', 'microbatch', 'bucket', 'replicas'])
  def test_one_that_is_given_stays_beside_the_others(self, field):
    value = 2 if field == 'replicas' else 192
    config = tiny.run_config(**{field: value})
    machine = memory.Machine('cpu', 24e9, cores=4)
    chosen = sizes.choose(config, memory.Models(_tiny(), _GRPO), machine)
    assert fields_lib.get(chosen, tiny.full_name(field)) == value
    assert all(fields_lib.get(chosen, name) > 0 for name in sizes.FIELDS)

  @pytest.mark.parametrize('gb', [2, 4, 8, 16, 64])
  @pytest.mark.parametrize('shape', [_tiny(), _qwen('small', 'float32', 'none')])
  def test_what_is_chosen_fits_or_is_refused(self, shape, gb):
    models = memory.Models(shape, _WITH_REFERENCE)
    machine = memory.Machine('cpu', gb * 1e9, cores=4)
    config = sizes.choose(config_lib.Config(), models, machine)
    assert config == sizes.choose(config_lib.Config(), models, machine)
    assert (
      config.engine.slots % 128 == 0 and config.batch.row_tokens == config.engine.slots
    )
    assert config.engine.rows % config.engine.replicas == 0
    if memory.estimate(config, models, machine).peak <= machine.memory:
      sizes.check(config, models, machine)
    else:
      # Not for sizes that could be smaller: what is left are parameters.
      assert (config.engine.rows, config.engine.slots, config.batch.microbatch) == (
        1,
        1024,
        1,
      )

  def test_more_memory_gives_no_smaller_sizes(self):
    models = memory.Models(_qwen('small', 'float32', 'none'), _WITH_REFERENCE)
    chosen = [
      sizes.choose(config_lib.Config(), models, memory.Machine('cpu', gb * 1e9, cores=4))
      for gb in (7, 8, 12, 24, 48, 96)
    ]
    slots = [config.engine.slots for config in chosen]
    assert slots == sorted(slots) and slots[0] < slots[-1] == 8192
    assert chosen[-1].engine.rows == 128

  def test_an_episode_bounds_the_slots(self):
    config = config_lib.Config(
      limits=config_lib.Limits(max_turns=2, max_turn_tokens=100),
      chat=config_lib.Chat(max_tool_tokens=60),
    )
    models = memory.Models(_tiny(), _GRPO)
    chosen = sizes.choose(config, models, memory.Machine('cpu', 64e9))
    assert 1024 + 2 * 160 <= chosen.engine.slots < 1024 + 2 * 160 + 128
    long = sizes.choose(
      config_lib.Config(limits=config_lib.Limits(max_turns=50)),
      models,
      memory.Machine('cpu', 64e9),
    )
    assert long.engine.slots == 8192
    short = memory.Models(dataclasses.replace(_tiny(), max_positions=512), _GRPO)
    assert sizes.choose(config, short, memory.Machine('cpu', 64e9)).engine.slots == 512

  @pytest.mark.parametrize(
    'axes, chips, groups',
    [
      ({}, 8, 8),
      ({'data': 2}, 8, 8),
      ({'tensor': 2}, 8, 4),
      ({'context': 8}, 8, 1),
      ({'data': 2, 'fsdp': 3, 'tensor': 2}, 12, 6),
    ],
  )
  def test_the_microbatch_follows_the_chips(self, axes, chips, groups):
    config = tiny.run_config(dtype='bfloat16', remat='full', **axes)
    models = memory.Models(_qwen('0.5b'), _GRPO)
    for gb in (16, 80):
      chosen = sizes.choose(config, models, _gpu(gb, chips=chips, engines=chips))
      assert chosen.batch.microbatch % groups == 0
      assert chosen.batch.row_tokens % config.mesh.context == 0

  @pytest.mark.parametrize('gb, remat', [(96, 'none'), (20, 'full')])
  def test_activations_are_recomputed_before_rows_become_fewer(self, gb, remat):
    models = memory.Models(_qwen('0.5b', 'float32', 'none'), _GRPO)
    machine = memory.Machine('cpu', gb * 1e9, cores=4)
    config = tiny.run_config(slots=2048, lora_rank=16)
    chosen = sizes.choose(config, models, machine)
    assert chosen.model.remat == remat
    assert f'model.remat={remat}; estimated' in sizes.describe(chosen, models, machine)
    config.model.remat = 'none'
    without = sizes.choose(config, models, machine).engine.rows
    assert (without < chosen.engine.rows) == (remat == 'full')
    config.model.remat = ''
    plays = memory.Models(models.policy)
    assert sizes.choose(config, plays, machine).model.remat == 'none'

  def test_activations_are_not_recomputed_where_that_saves_nothing(self):
    models = memory.Models(_qwen('small', 'float32', 'none'), _GRPO)
    machine = memory.Machine('cpu', 8e9, cores=4)
    chosen = sizes.choose(config_lib.Config(), models, machine)
    assert chosen.model.remat == 'none' and chosen.engine.slots < 8192

  def test_rows_follow_the_engines(self):
    models = memory.Models(_qwen('0.5b'), _GRPO)
    config = config_lib.Config(model=config_lib.Model(dtype='bfloat16', remat='full'))
    rows = [
      sizes.choose(config, models, _gpu(chips=n, engines=n)).engine.rows
      for n in (1, 4, 8)
    ]
    assert rows == [128, 32, 16]

  def test_replicas_are_for_cores(self):
    models = memory.Models(_tiny(), _GRPO)
    machine = memory.Machine('cpu', 64e9, cores=4)
    assert sizes.choose(config_lib.Config(), models, machine).engine.replicas == 4
    assert (
      sizes.choose(
        config_lib.Config(engine=config_lib.Engine(rows=6)), models, machine
      ).engine.replicas
      == 1
    )
    assert (
      sizes.choose(
        config_lib.Config(engine=config_lib.Engine(rows=26)), models, machine
      ).engine.replicas
      == 2
    )
    models = memory.Models(_qwen('0.5b'), _GRPO)
    assert sizes.choose(config_lib.Config(), models, _gpu(cores=16)).engine.replicas == 1


@pytest.fixture(scope='module')
def instruct() -> config_lib.Config:
  """What the script sets; in a process of its own."""
  code = (
    'import dataclasses, json; from experiments.wikipedia import settings as h; '
    'print(json.dumps([h.INSTRUCT.kl, dataclasses.asdict(h.INSTRUCT.config)]))'
  )
  said = script.run('-c', code)
  kl, rooms = json.loads(said.stdout)
  assert kl == _WITH_REFERENCE.kl.coef
  flat = {
    f'{room}.{name}': value
    for room, values in rooms.items()
    if isinstance(values, dict)
    for name, value in values.items()
  }
  return fields_lib.replace(config_lib.Config(), flat)


class TestDocumentedCommand:
  """Qwen2.5-3B on one GPU of 80 GB: the command and the tables of docs/memory.md."""

  _SECTION = (
    (pathlib.Path(__file__).parents[1] / 'docs' / 'memory.md')
    .read_text()
    .partition('## Qwen2.5-3B on one GPU of 80 GB')[2]
    .partition('\n## ')[0]
  )
  _COMMAND = shlex.split(_SECTION.split('```')[1].replace('\\\n', ' '))
  _SCRIPT = pathlib.Path(__file__).parents[1] / 'experiments' / 'wikipedia' / 'search.py'
  _MODELS = memory.Models(_qwen(), _WITH_REFERENCE)

  @pytest.fixture
  def settled(self, instruct) -> tuple[config_lib.Config, memory.Machine]:
    """The sizes that the command gets, and the memory that it lets JAX use."""
    fraction, *words = self._COMMAND
    name, _, value = fraction.partition('=')
    assert name == 'XLA_PYTHON_CLIENT_MEM_FRACTION'
    given = dict(w.removeprefix('--config.').split('=') for w in words if '=' in w)
    assert given.pop('model.path') == 'Qwen2.5-3B-Instruct'
    assert sum(name in config_lib.SIZES for name in given) <= 3
    given = {n: int(v) if v.isdecimal() else v for n, v in given.items()}
    config = fields_lib.replace(instruct, given)
    machine = _gpu(80 * float(value))
    return sizes.choose(config, self._MODELS, machine), machine

  def _read(self, table: int) -> dict[str, list[str]]:
    """Cells of a table of the section by the name of their row."""
    lines = self._SECTION.split('\n\n| ')[table].split('\n\n')[0].split('\n')
    rows = [[cell.strip(' *`') for cell in line.split('|')[1:-1]] for line in lines]
    return {name: cells for name, *cells in rows[2:]}

  def test_it_is_the_scripts(self):
    said = self._SCRIPT.read_text().replace('\\\n', ' ').split()
    assert ' '.join(self._COMMAND) in ' '.join(said)

  def test_it_fits_and_plays_whole_episodes_many_at_a_time(self, settled):
    config, machine = settled
    sizes.check(config, self._MODELS, machine)
    assert config.engine.rows >= 32 and config.engine.slots >= 4096

  def test_its_terms_are_those_of_the_document(self, settled):
    config, machine = settled
    found = memory.estimate(config, self._MODELS, machine)
    gb = lambda n: f'{n / memory.GB:.1f}'
    names = {name for terms in found.phases.values() for name in terms}
    table = {
      name: [gb(terms[name]) if name in terms else '' for terms in found.phases.values()]
      for name in names
    }
    table['together'] = [gb(sum(terms.values())) for terms in found.phases.values()]
    table = {name: row for name, row in table.items() if {*row} != {'', '0.0'}}
    assert self._read(1) == table

  def test_the_other_choices_take_what_the_document_says(self, settled):
    config, machine = settled
    config.optimizer.kind = 'adamw'
    rows = self._read(2)
    assert len(rows) == 5
    for change, cells in rows.items():
      name, _, value = change.partition('=')
      typed: Any = {'True': True, '16': 16}.get(value, value)
      other = fields_lib.replace(config, {name: typed})
      phases = memory.estimate(other, self._MODELS, machine).phases.values()
      assert cells == [f'{sum(terms.values()) / memory.GB:.1f}' for terms in phases]

  def test_without_its_optimizer_it_is_refused(self, settled):
    config, machine = settled
    config.optimizer.kind = 'adamw'
    with pytest.raises(ValueError, match='GB  state of adamw\n'):
      sizes.check(config, self._MODELS, machine)


class TestCheck:
  def _check(self, algorithm=_GRPO, size='3b', **fields):
    given: dict[str, Any] = {'rows': 256, 'slots': 1024, 'microbatch': 4}
    given |= {'dtype': 'bfloat16', 'remat': 'full'}
    models = memory.Models(_qwen(size), algorithm)
    config = sizes.choose(tiny.run_config(**given | fields), models, _gpu())
    sizes.check(config, models, _gpu())

  @pytest.mark.parametrize('fields', [{'optimizer': 'adamw8'}, {'offload': True}])
  def test_a_smaller_state_on_the_chip_fits(self, fields):
    self._check(**fields)
    with pytest.raises(ValueError, match='state of adamw\n'):
      self._check()

  def test_what_does_not_fit_is_refused_with_its_terms(self):
    with pytest.raises(ValueError) as caught:
      self._check(_WITH_REFERENCE, slots=2048, row_tokens=2048)
    message = str(caught.value)
    assert '109.9 GB (gradient), and each chip has 80.0 GB' in message
    lines = [line.split() for line in message.splitlines() if line.startswith('  ')]
    numbers = [float(words[0]) for words in lines]
    assert numbers == sorted(numbers, reverse=True)
    assert sum(numbers) == pytest.approx(109.9, abs=0.1)
    assert '24.69 GB  state of adamw' in message
    assert 'optimizer.kind=adamw8' in message

  def test_the_mend_is_enough_and_no_more_than_that(self):
    config = config_lib.Config(
      engine=config_lib.Engine(rows=256, slots=1024, prefill_rows=16, prefill_tokens=128),
      batch=config_lib.Batch(row_tokens=1024, microbatch=8),
    )
    config = tiny.run_config(config, bucket=1024, replicas=1, dtype='bfloat16')
    config.model.remat = 'none'
    models = memory.Models(_qwen(), _WITH_REFERENCE)
    fields, enough = sizes.suggest_changes(config, models, _gpu())
    assert enough and fields
    for dropped in [None, *fields]:
      given = {k: v for k, v in fields.items() if k != dropped}
      other = fields_lib.replace(config, given)
      peak = memory.estimate(other, models, _gpu()).peak
      assert (peak <= 80e9) == (dropped is None)

  @pytest.mark.parametrize('rank', [0, 8])
  @pytest.mark.parametrize(
    'schedule',
    [
      {},
      {'reference_every': 2},
      {'sync_every': 2},
      {'sync_every': 2, 'reference_every': 2},
      {'ahead': 1},
      {'ahead': 1, 'partial': True},
    ],
  )
  def test_the_copy_of_a_checkpoint_is_all_that_is_written(self, rank, schedule):
    config = tiny.run_config(lora_rank=rank, replicas=1, **schedule)
    estimate = memory.estimate(
      config,
      memory.Models(tiny.config(), _WITH_REFERENCE),
      memory.Machine('cpu', 8e9, chips=1, engines=1),
    )

    def checkpoint():
      params = decoder.init(tiny.config(), jax.random.key(0))
      plan, state = setup.make_plan(config, tiny.config(), params, _WITH_REFERENCE)
      return state.checkpoint_arrays(plan)

    arrays = jax.tree.leaves(jax.eval_shape(checkpoint))
    written = sum(x.size * x.dtype.itemsize for x in arrays)
    said = estimate.phases['checkpoint']['copy for the checkpoint']
    assert said == pytest.approx(written, rel=0.01)

  def test_what_no_setting_mends_says_so(self):
    models = memory.Models(_qwen('32b'), _GRPO)
    config = sizes.choose(
      config_lib.Config(model=config_lib.Model(dtype='bfloat16')), models, _gpu(24)
    )
    with pytest.raises(ValueError, match='No setting makes it fit.*more chips'):
      sizes.check(config, models, _gpu(24))

  def test_a_policy_that_only_plays_has_its_parameters_beside_the_engines_copy(self):
    config = tiny.run_config(rows=1, slots=128, replicas=1)
    estimate = memory.estimate(config, memory.Models(_qwen()), memory.Machine('cpu', 1e9))
    assert estimate.peak > (4 + 2) * 3.086e9

  def test_a_large_process_keeps_nothing_that_it_freed(self):
    config = tiny.run_config(rows=64, slots=4096, microbatch=1, replicas=1)
    kept = []
    for shape in (_tiny(), _qwen('small')):
      models, machine = memory.Models(shape, _GRPO), memory.Machine('cpu', 1e9)
      phases = memory.estimate(config, models, machine).phases
      kept.append(phases['gradient']['freed by rollouts, in pieces'])
    assert kept[0] > 0 == kept[1]

  def test_more_that_is_loaded_takes_more(self):
    def peak(algorithm=_GRPO, **fields):
      config = tiny.run_config(base, **fields)
      return memory.estimate(config, memory.Models(_qwen(), algorithm), _gpu()).peak

    base = config_lib.Config(
      engine=config_lib.Engine(rows=16, slots=1024, prefill_rows=16),
      batch=config_lib.Batch(row_tokens=1024, microbatch=2),
    )
    base = tiny.run_config(base, prefill_tokens=128, bucket=256, replicas=1)
    parameters = 4 * 3.086e9
    assert peak(_WITH_REFERENCE) - peak() == pytest.approx(parameters, rel=0.01)
    assert peak(_PPO) - peak() == pytest.approx(3 * parameters, rel=0.01)
    assert peak(sync_every=2) - peak() == pytest.approx(parameters, rel=0.01)
    assert peak(lora_rank=16) < peak() - 3 * parameters
    rollouts = [
      memory.estimate(
        tiny.run_config(base, eval_every=n, ahead=1),
        memory.Models(_qwen(), _GRPO),
        _gpu(),
      ).phases['rollout']
      for n in (0, 5)
    ]
    name = "evaluation's copy of the policy"
    assert rollouts[1].pop(name) == rollouts[1]["engine's copy, bfloat16"]
    assert rollouts[0] == rollouts[1]
    spread = memory.Machine('gpu', 80e9, chips=8, engines=8)
    models = memory.Models(_qwen(), _GRPO)
    assert memory.estimate(base, models, spread).peak < peak() - 3 * parameters


# GiB of temporaries of the gradient of a row of 4,096 tokens, compiled for 64 chips of
# v5e: docs/scaling.md.
_COMPILED = {'0.5b': 2.23, '3b': 3.46, '7b': 6.81, '14b': 9.51, '32b': 11.94}


class TestEstimate:
  @pytest.mark.parametrize('size, gib', _COMPILED.items())
  def test_of_a_gradient_on_a_tpu(self, size, gib):
    terms = memory.activations(
      _qwen(size), rows=1, tokens=4096, platform='tpu', sharded=True
    )
    assert 0.9 < sum(terms.values()) / 2**30 / gib < 1.31

  @pytest.mark.parametrize(
    'shape, rows, tokens',
    [
      ({}, 2, 1024),
      ({'vocab_size': 32_768, 'tie_embeddings': False}, 1, 256),
      ({'num_layers': 10, 'remat': 'none'}, 2, 512),
      ({'num_layers': 10, 'remat': 'dots'}, 2, 512),
      ({'num_layers': 10, 'dtype': 'bfloat16'}, 2, 512),
    ],
  )
  def test_of_a_gradient_on_this_cpu(self, shape, rows, tokens):
    config = _tiny(**shape)
    compiled: Any = learner._gradient.lower(
      _parameters(config),
      _batch(rows, tokens),
      config=config,
      loss=learner.objective(_GRPO),
      temperature=1.0,
    ).compile()
    terms = memory.activations(config, rows=rows, tokens=tokens, platform='cpu')
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert 0.9 < sum(terms.values()) / taken < _most(config.dtype)

  @pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
  def test_of_a_decode_and_a_prefill(self, dtype):
    shape, R, S = _tiny(dtype=dtype), 32, 1024
    config = config_lib.Config(
      engine=config_lib.Engine(
        rows=R, slots=S, prefill_rows=16, prefill_tokens=64, replicas=1
      )
    )
    params = jax.eval_shape(
      lambda p: sampling_params.unstack(p, shape), _parameters(shape)
    )
    cache: Any = jax.eval_shape(lambda: decoder.empty_cache(shape, R, S))
    guides = (automaton_guide.AUTOMATA, guide_lib.TRUNCATION)
    tables = automaton_guide.make_tables(
      automaton_guide.AutomatonPool(shape.vocab_size).entries
    )
    ints: Any = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
    options = {'config': shape, 'bucket': S}
    programs: Any = (
      programs_lib.decode.lower(
        params,
        cache,
        active_request.make_decode_batch({}, R, guides, unused_row=R),
        (tables, None),
        guides=guides,
        steps=8,
        **options,
      ),
      programs_lib.prefill.lower(
        params, cache, ints(16), ints(16), ints(16, 64), ints(16), **options
      ),
    )
    taken = [p.compile().memory_analysis().temp_size_in_bytes for p in programs]
    terms = memory._sampling_terms(config, shape, memory.Machine('cpu', 1e9))
    assert 0.9 < sum(terms.values()) / max(taken) < _most(dtype)

  @pytest.mark.parametrize(
    'platform, width, copied', [('tpu', 0, False), ('tpu', 32, True), ('gpu', 0, True)]
  )
  def test_a_decode_on_a_tpu_copies_no_cache_unless_it_is_of_some_rows(
    self, platform, width, copied
  ):
    given = {
      'rows': 64,
      'slots': 4096,
      'prefill_rows': 1,
      'prefill_tokens': 8,
      'replicas': 1,
    }
    config = tiny.run_config(**given, width=width, dtype='bfloat16')
    terms = memory._sampling_terms(config, _qwen(), memory.Machine(platform, 80e9))
    assert ('decode: copy of the cache' in terms) == copied

  @pytest.mark.parametrize('kind', optimizers.KINDS)
  def test_of_the_optimizers_step(self, kind):
    shape = _tiny(mlp_dim=1024, num_layers=4)
    made = optimizers.make(config_lib.Optimizer(kind=kind), 1e-3)
    params = _parameters(shape)
    state: Any = jax.eval_shape(lambda p: learner.init(p, made), params)
    compiled: Any = learner._apply.lower(state, params, optimizer=made).compile()
    taken = compiled.memory_analysis()
    config = config_lib.Config(
      optimizer=config_lib.Optimizer(kind=kind),
      engine=config_lib.Engine(slots=128),
      batch=config_lib.Batch(microbatch=1),
    )
    models = memory.Models(shape, _GRPO)
    machine = memory.Machine('cpu', 1e9)
    terms = memory._update_terms(config, models, machine)
    assert 0.8 < terms["optimizer's temporaries"] / taken.temp_size_in_bytes < 1.3
    held = memory._training_terms(config, models, machine)[f'state of {kind}']
    sizes_of = [x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state)]
    assert held == pytest.approx(sum(sizes_of))


def _most(dtype) -> float:
  """By how much memory may be overestimated.

  A CPU computes bfloat16 in float32. JAX 0.11 holds less of that at a time than JAX 0.10,
  after which the estimate is made.
  """
  return 1.3 if dtype == 'float32' else 2.3


def _parameters(config) -> Any:
  return jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))


def _batch(rows, tokens) -> Any:
  kinds: dict[str, Any] = {
    'tokens': jnp.int32,
    'positions': jnp.int32,
    'segment_ids': jnp.int32,
  }
  kinds |= {'action_mask': jnp.bool}
  fields = types.Batch._fields[:7]
  shape = (rows, tokens)
  leaves: Any = {
    n: jax.ShapeDtypeStruct(shape, kinds.get(n, jnp.float32)) for n in fields
  }
  return types.Batch(**leaves)


class TestMachine:
  def test_the_process_has_less_than_the_machine_and_more_than_it_uses(self):
    all_of_it = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    assert runtime._own_memory() < runtime.available_memory() <= all_of_it

  def test_a_variable_says_otherwise(self, monkeypatch):
    monkeypatch.setenv(sizes.MEMORY_VARIABLE, '3.5')
    assert sizes.find_machine(config_lib.Mesh()).memory == 3.5e9
    for text in ('much', '0', '-1', 'nan'):
      monkeypatch.setenv(sizes.MEMORY_VARIABLE, text)
      with pytest.raises(ValueError, match=f'{sizes.MEMORY_VARIABLE} is .{text}'):
        sizes.find_machine(config_lib.Mesh())

  def test_control_groups_are_obeyed(self, tmp_path, monkeypatch):
    """Version 2, in a group whose parent has the lower limit."""
    root = tmp_path / 'cgroup'
    (root / 'a' / 'b').mkdir(parents=True)
    for folder, limit in (('a', '5000000'), ('a/b', 'max')):
      (root / folder / 'memory.max').write_text(limit + '\n')
      (root / folder / 'memory.current').write_text('3000000\n')
      (root / folder / 'memory.stat').write_text('file 9\ninactive_file 1000000\n')
    (tmp_path / 'self').write_text('0::/a/b\n')
    monkeypatch.setattr(runtime, '_GROUPS', root)
    monkeypatch.setattr(runtime, '_GROUP', tmp_path / 'self')
    own = runtime._own_memory()
    assert abs(runtime.available_memory() - 3_000_000 - own) < 1e8


# One step of a second or two; these sizes are left to be chosen.
_SHORT: dict[str, Any] = {'steps': 1, 'eval_every': 0, 'max_turns': 1}
_CHOSEN = {'rows': 0, 'microbatch': 0}


class TestRun:
  def test_sizes_are_those_that_a_run_began_with(
    self, model, tmp_path, monkeypatch, capfd
  ):
    monkeypatch.setenv(sizes.MEMORY_VARIABLE, '1.2')
    test_train._run(test_train._config(model, **_SHORT), tmp_path)
    said = [line for line in capfd.readouterr().err.splitlines() if 'sizes:' in line]
    assert len(said) == 1 and 'estimated peak' in said[0] and 'of 1.2 GB' in said[0]
    first = json.loads((tmp_path / 'config.json').read_text())
    assert (first['engine']['rows'], first['batch']['microbatch']) == (4, 2)
    # Now they are to be chosen, and a new run would get others.
    config = test_train._config(model, **_SHORT | _CHOSEN | {'steps': 2})
    assert sizes.resolve(config, test_train._GRPO).engine.rows == 8
    test_train._run(config, tmp_path)
    first['schedule']['steps'] = 2
    assert json.loads((tmp_path / 'config.json').read_text()) == first
    assert [line['step'] for line in metrics.read(tmp_path)][-1] == 2

  def test_sizes_that_no_longer_fit_are_refused(self, model, tmp_path, monkeypatch):
    config = test_train._config(model, **_SHORT | _CHOSEN | {'slots': 0})
    large = tiny.run_config(config, rows=4096, slots=8192)
    fields = dataclasses.asdict(large)
    (tmp_path / 'config.json').write_text(json.dumps(fields))
    monkeypatch.setenv(sizes.MEMORY_VARIABLE, '1.2')
    message = r'(?s)has 1.2 GB.*engine.rows, engine.slots are those that this run'
    with pytest.raises(ValueError, match=message):
      test_train._run(config, tmp_path)

  def test_nothing_is_loaded_or_compiled_before_a_refusal(
    self, model, tmp_path, monkeypatch
  ):
    monkeypatch.setattr(setup, 'load', None)
    monkeypatch.setenv(sizes.MEMORY_VARIABLE, '0.5')
    with pytest.raises(ValueError, match='memory: .*this process has 0.5 GB'):
      test_train._run(test_train._config(model), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_an_empty_model_is_named():
  with pytest.raises(ValueError, match='model.path is empty; give the directory of'):
    sizes.resolve(config_lib.Config())


def test_eight_devices_are_not_refused(model):
  """In a process of its own: this one has one device."""
  code = (
    'import sys; from agent_r1_jax import config, train; '
    'from agent_r1_jax.checks import sizes; '
    'from agent_r1_jax.rl import algorithms; '
    'run = config.Config(model=config.Model(sys.argv[1])); '
    'run = sizes.resolve(run, algorithms.grpo()); '
    'print(run.batch.microbatch, train.make_mesh(run.mesh).size)'
  )
  done = script.run('-c', code, model, JAX_NUM_CPU_DEVICES='8')
  assert done.returncode == 0, done.stderr
  microbatch, devices = map(int, done.stdout.split())
  assert devices == 8 and microbatch % 8 == 0
