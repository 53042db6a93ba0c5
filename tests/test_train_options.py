"""What a run can be asked for beyond its algorithm; what does not apply is said."""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import mounts
import numpy as np
import pytest
import runs
import tiny

from agent_r1_jax import playing, types
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import guide
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms, learner, losses
from agent_r1_jax.rollout import evaluate, rollout
from agent_r1_jax.train import metrics, run_files
from agent_r1_jax.train.plan import first_state

_PLAIN = algorithms.grpo(kl_coef=0.0)
model, learned_from = runs.model, runs.learned_from
pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')


def _run(model, workdir, algorithm=_PLAIN, **kwargs):
  options = {'make_env': 'make_env', 'questions': 'tasks', 'privileged': 'privileged'}
  options['guides'] = 'guides'
  given = {options[name]: kwargs.pop(name) for name in options.keys() & kwargs.keys()}
  config = runs.config(model, **{'steps': 2, 'eval_every': 0} | kwargs)
  params = runs.run(config, workdir, algorithm=algorithm, evals=None, **given)
  return params, metrics.read(workdir)


def _graded(reward):
  """An environment without tools that scores the first reply."""
  return functools.partial(env_lib.ToolEnv, [], reward, parse=lambda reply: [])


class TestDynamicSampling:
  def test_a_rollout_without_any_variance_ends_at_the_bound(self, model, tmp_path):
    params, lines = _run(model, tmp_path, max_refills=2, make_env=_graded(lambda *_: 0.0))
    assert [line['rollout/groups'] for line in lines] == [6, 6]
    assert 'train/grad_norm' not in lines[0]
    assert [line['alarm/dead_groups'] for line in lines] == [1, 1]
    assert [line['alarm/entropy_collapse'] for line in lines] == [0, 0]
    runs.assert_equal(params, weights.load(model)[1])

  def test_a_task_that_comes_again_is_sampled_anew(self, model, tmp_path):
    made, start = [], rollout.start

    def spy(*args, **kwargs):
      made.append(start(*args, **kwargs))
      return made[-1]

    with mock.patch.object(rollout, 'start', spy):
      given = {'make_env': _graded(lambda *_: 0.0), 'max_refills': 1, 'samples': 8}
      _run(model, tmp_path, questions=runs.tasks(1), **given)
    said = [[t.messages[-1]['content'] for t in r.result()] for r in made]
    said = [s for s in said if s]
    # Two tasks a draw, two draws a step.
    assert [len(s) for s in said] == [16] * 4
    assert len({tuple(sorted(s)) for s in said}) == 4


def test_remax_plays_a_greedy_episode_of_each_task(model, tmp_path, learned_from):
  begun, greedy, asked, play = [], [], [], evaluate.run

  class Counted(env_lib.ToolEnv):
    async def reset(self, task):
      begun.append(task.id)
      self.turns = 0
      self.tools = ()  # The prompt does not tell of the tool.
      return await super().reset(task)

    async def step(self, reply):
      self.turns += 1
      look = calls.ToolCall('look', {'seconds': 0.0})
      self._parse = lambda reply: [look] if self.turns == 1 else []
      return await super().step(reply)

  def watched(*args, **kwargs):
    played = play(*args, **kwargs)
    greedy.append([t.reward for t in played.get('', ())])
    asked.extend(t.metrics.get('tool_calls', 0) for t in played.get('', ()))
    return played

  paid = {'process_reward': lambda *_: 1.0 + len(begun)}
  make_env = functools.partial(Counted, [runs.look], lambda *_: 0.0, **paid)
  with mock.patch.object(evaluate, 'run', watched):
    # Every reply soon ends.
    given = {'make_env': make_env, 'stop_strings': '["capital"]', 'max_turn_tokens': 40}
    _run(model, tmp_path, algorithms.remax(), **given)
  # Two steps of two tasks: four episodes each, and a greedy one.
  assert len(begun) == 2 * 2 * (4 + 1)
  baselines = [given['baselines'] for _, given in learned_from]
  assert baselines == [[a] * 4 + [b] * 4 for a, b in greedy[:2]]
  assert np.all(baselines) and 1 in asked


def test_a_student_learns_its_teachers_words(model, tmp_path):
  tokenizer = tiny.chat().tokenizer
  (wanted,) = tokenizer.encode(' city', add_special_tokens=False)
  likely = runs.likely()
  teacher = tiny.save(tmp_path / 'teacher', likely | {wanted: likely[wanted] + 1.5})
  options = {'reference': str(teacher), 'steps': 12, 'learning_rate': 1e-2}
  _, lines = _run(model, tmp_path / 'run', algorithms.distillation(), **options)
  apart = [line['train/kl'] for line in lines]
  assert np.mean(apart[:2]) > 0.3 and abs(np.mean(apart[-3:])) < np.mean(apart[:2]) / 2


@pytest.mark.usefixtures('learned_from')
def test_without_sets_nothing_is_evaluated(model, tmp_path, monkeypatch):
  monkeypatch.setattr(evaluate, 'run', mock.Mock(side_effect=AssertionError))
  _, lines = _run(model, tmp_path, steps=1, eval_every=1)
  assert [line['step'] for line in lines] == [1] and 'time/eval' not in lines[0]


def test_stale_episodes_are_corrected(model, tmp_path):
  _, lines = _run(model, tmp_path, runs.STALE, sync_every=2, steps=4)
  # At even steps the engine has just been given the policy.
  for line, stale in zip(lines, (False, True, False, True), strict=True):
    apart = abs(line['train/correction_ratio_max'] - 1)
    assert apart > 1e-2 if stale else apart < 1e-3


def test_a_critic_is_warmed_up_and_told_what_the_policy_is_not(model, tmp_path):
  told = []

  def privileged(task):
    told.append(task.id)
    return f'the answer is {task.id}'

  given = {'critic_warmup': 2, 'critic_learning_rate': 1e-2, 'row_tokens': 128}
  # One task, so that the losses of both steps are of the same states.
  given |= {'questions': runs.tasks(1)}
  params, lines = _run(model, tmp_path, runs.PPO, privileged=privileged, **given)
  runs.assert_equal(params, weights.load(model)[1])
  assert len(told) == 16
  assert lines[1]['train/value_loss'] < lines[0]['train/value_loss']
  assert 'train/grad_norm' not in lines[1] and lines[1]['train/critic_grad_norm'] > 0


def test_what_is_not_finite_is_dumped_and_nothing_is_lost(model, tmp_path):
  def breaks(stats, batch):
    per_token, watched = losses.reinforce()(stats, batch)
    return per_token / (batch.advantages > 0), watched

  said = 'of the policy, .*not finite at step 0.*not_finite.npz'
  with pytest.raises(learner.NotFiniteError, match=said):
    _run(model, tmp_path, _PLAIN._replace(loss=breaks))
  with np.load(tmp_path / 'not_finite.npz') as dump:
    names = set(dump.files)
    assert {f'0/{n}' for n in ('rows/tokens', 'advantages', 'weights')} <= names
    assert dump['0/rows/tokens'].shape == (2, 96)
    assert dump['0/advantages'].shape == (2, 2 * 96)


def test_what_is_not_finite_is_told_on_a_full_disk_too(tmp_path):
  rows = tiny.rows(np.zeros((2, 96), np.int32))
  batch = types.Batch(rows, *[np.zeros((2, 96))] * 5)
  with mounts.mounted(tmp_path, 'size=256k') as workdir:
    plan = mock.Mock(config=tiny.run_config(), made_of={})
    with run_files.RunFiles(plan, workdir) as files:
      before = {path.name for path in workdir.iterdir()}
      mounts.fill(workdir)
      said = files.dump_batches([batch])
    assert said.startswith('Its batch could not be written: the disk is full (0.0 MB')
    assert {path.name for path in workdir.iterdir()} <= before | {'filler'}


@pytest.mark.usefixtures('learned_from')
def test_a_guide_of_ones_own_is_in_every_reply(model, tmp_path, capsys):
  """It ends each reply after three tokens, none of which is the likeliest."""
  surprise = guide.Guide(
    np.int32(-100),
    lambda params, state, logits, hidden: jnp.where(
      logits == logits.max(axis=1, keepdims=True), -1e9, logits
    ),
    lambda params, state, tokens: (state + 1, state == 2),
  )
  guides, played = {surprise: np.int32(0)}, []
  with pytest.raises(ValueError, match='guides: one changes the logits'):
    _run(model, tmp_path / 'refused', guides=guides)
  result = rollout.Rollout.result
  note = lambda started: played.append(result(started)) or played[-1]
  with mock.patch.object(rollout.Rollout, 'result', note):
    config = runs.config(model, steps=1)
    algorithm = algorithms.remax(correction=losses.token_truncated())
    runs.run(config, tmp_path, algorithm=algorithm, guides=guides)
  assert len(played) == 4  # An evaluation, a rollout, baselines, another evaluation.
  turns = [turn for t in itertools.chain(*played) for turn in t.turns]
  assert max(turn.stop - turn.start for turn in turns) == 3
  shape, params = weights.load(model, dtype='float32')
  before = [s for t in itertools.chain(*played[:-1]) for s in t.segments]
  for segment, logprobs in zip(
    before, tiny.learned(params, before, shape=shape), strict=True
  ):
    # What is not the likeliest has at most half of the policy's probability.
    assert (logprobs[segment.action_mask] <= np.log(0.5) + 1e-4).all()
  methods = {'alone': ({'dev': runs.tasks(2)}, runs.make_env)}
  options = {'guides': guides, 'samples': 2}
  alone = playing.play(config, tmp_path / 'model', methods, **options)['alone']['dev']
  assert 'temperature is 0: the 2 samples of a task' in capsys.readouterr().out
  assert {turn.stop - turn.start for t in alone for turn in t.turns} <= {1, 2, 3}
  assert any(t.turns for t in alone)


def test_truncated_episodes_can_be_left_out(model, tmp_path, learned_from):
  # Two tokens a reply: most do not come to their end.
  _run(model, tmp_path / 'scored', max_turn_tokens=2)
  _run(model, tmp_path / 'left_out', _PLAIN._replace(mask_truncated=True))
  shown = [{t.status for t in trajectories} for trajectories, _ in learned_from]
  assert 'truncated' in shown[0] | shown[1]
  assert not (shown[2] | shown[3]) & {*types.BUDGET_STATUSES}


@pytest.mark.parametrize(
  ('algorithm', 'options', 'message'),
  [
    (_PLAIN, {'reference': 'x'}, 'reference: the algorithm reads no reference'),
    (_PLAIN, {'reference_every': 2}, 'reference_every: the algorithm reads no'),
    (_PLAIN, {'critic_warmup': 1}, 'critic_warmup: there is no critic'),
    (_PLAIN, {'sync_every': 2}, 'sync_every is 2.*no correction'),
    (_PLAIN, {'optimizer': 'muon', 'lora_rank': 2}, "'muon'.*only adapters are learned"),
    (algorithms.reinforce(), {'epochs': 2}, 'epochs is 2: the loss .* Make it 1'),
    (_PLAIN, {'tensor': 2}, '1 x 1 x 2 x 1, yet there are 1 devices'),
    (_PLAIN, {'lora_rank': 2, 'lora_targets': ''}, 'lora_targets is'),
    (_PLAIN, {'privileged': lambda task: ''}, 'privileged: the algorithm has no critic'),
    (algorithms.distillation(), {}, 'reference: the algorithm learns from a teacher'),
    (algorithms.distillation(), {'reference': 'x', 'reference_every': 1}, 'a teacher st'),
    (
      runs.STALE,
      {'sync_every': 3, 'max_staleness': 1},
      'max_staleness is 1.*2 steps old',
    ),
    (algorithms.ppo(kl_coef=0.0, value_coef=0.5), {}, 'value_coef: .* model of its own'),
    (_PLAIN, {'samples': 1}, 'samples is 1'),
    (_PLAIN, {'ahead': 1}, 'ahead is 1.*no correction'),
    (runs.STALE, {'ahead': 2}, 'ahead is 2.*partial=True'),
    (runs.STALE, {'ahead': 3, 'partial': True, 'max_staleness': 2}, '3 steps old'),
    (runs.STALE, {'partial': True}, 'make ahead 1'),
    (runs.STALE, {'ahead': 1, 'max_refills': 1}, 'max_refills.*make ahead 0'),
    (algorithms.remax(correction=print), {'ahead': 1}, 'greedy baseline.*make ahead 0'),
    (runs.STALE, {'ahead': 1, 'tensor': 2}, 'give some of them to sampling'),
    (_PLAIN, {'samplers': 1}, 'samplers is 1.*has 1 chips'),
  ],
)
def test_an_option_that_does_not_apply_is_refused(
  model, tmp_path, algorithm, options, message
):
  with pytest.raises(ValueError, match=message):
    _run(model, tmp_path, algorithm, **options)
  assert not (tmp_path / 'config.json').exists()


def test_a_teacher_of_another_vocabulary_is_refused(model, tmp_path):
  shape, params = weights.load(model)
  wide = dataclasses.replace(shape, vocab_size=shape.vocab_size + 8)
  grown = jax.tree.map(
    lambda x: np.pad(x, [(0, 8 * (n == shape.vocab_size)) for n in x.shape]), params
  )
  weights.save(tmp_path / 'wide', wide, grown, tokenizer_from=model)
  options = {'reference': str(tmp_path / 'wide')}
  with pytest.raises(ValueError, match='they must share a tokenizer'):
    _run(model, tmp_path / 'run', algorithms.distillation(), **options)


@pytest.mark.parametrize(
  ('change', 'name'),
  [({'norm_eps': 1e-5}, 'norm_eps'), ({}, 'value_head'), ({'max_positions': 8}, None)],
)
def test_the_policy_replaces_only_a_reference_of_its_own_shape(model, change, name):
  shape, params = weights.load(model)
  other = dataclasses.replace(shape, dtype='bfloat16', remat='full', **change)
  reference = decoder.add_value_head(params) if name == 'value_head' else params
  refused = pytest.raises(ValueError, match=rf'reference_every: .* \({name}\)')
  with refused if name else contextlib.nullcontext():
    first_state._check_replaceable(other, reference, shape, params)


def test_a_reference_of_another_shape_is_refused_at_the_start(model, tmp_path):
  shape, params = weights.load(model)
  other = dataclasses.replace(shape, rope_theta=2 * shape.rope_theta)
  weights.save(tmp_path / 'other', other, params, tokenizer_from=model)
  options = {'reference': str(tmp_path / 'other'), 'reference_every': 1}
  with pytest.raises(ValueError, match=r'another model \(rope_theta\)'):
    _run(model, tmp_path / 'run', algorithms.grpo(), **options)
  assert not (tmp_path / 'run').exists()
