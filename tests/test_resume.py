"""A run that is killed, preempted and resumed equals one that nothing interrupts.

A row of FEATURES is a configuration; its parameters and its metrics are compared bit for
bit. What a kill leaves is a copy of the workdir that is made in the midst of the
uninterrupted run; test_killed_runs.py ends processes.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import signal
from typing import Any, NamedTuple
from unittest import mock

import gallery
import httpx2
import jax
import numpy as np
import pytest
import runs
import tiny
import waiting

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import preemption
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms, kl, losses
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.serve import program
from agent_r1_jax.train import loop, metrics

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model = runs.model


class Moment(NamedTuple):
  """When something happens to a run.

  Attributes:
    kind: 'update', or 'episode', which may be one of an evaluation.
    number: How many of them have been before it.
    step: The step of the newest checkpoint then, 0 for none.
    line: The step of the last line of metrics then.
  """

  kind: str
  number: int
  step: int
  line: int


class Feature(NamedTuple):
  """A row of the table.

  Attributes:
    options: Fields of the configuration.
    algorithm: The algorithm.
    given: Other arguments of train.run.
    policy: The name of the policy's maker.
    moment: When the run is killed.
    check: What must hold of a run that nothing interrupts, besides.
  """

  options: dict[str, Any] = {}
  algorithm: algorithms.Algorithm = runs.GRPO
  given: dict[str, Any] = {}
  policy: str = 'plain'
  moment: Moment = Moment('update', 1, 1, 1)
  check: Callable[['Whole'], None] = lambda whole: None


class Whole(NamedTuple):
  """A run that nothing interrupts, and its copy that was made in its midst."""

  params: decoder.Params
  workdir: pathlib.Path
  killed: pathlib.Path
  base: decoder.Params
  tables: list[table_lib.TokenTable]

  @property
  def lines(self):
    return runs.read_numbers(self.workdir)


def graded(reward):
  """An environment without tools that scores the first reply."""
  return functools.partial(env_lib.ToolEnv, [], reward, parse=lambda reply: [])


def says_city(task, messages):
  return float(' city' in messages[-1]['content'])


async def ask_the_endpoint(task, url):
  async with httpx2.AsyncClient(timeout=60) as http:
    asked = {'messages': task.messages}
    (await http.post(f'{url}/chat/completions', json=asked)).raise_for_status()


def save_plain(folder):
  return tiny.save(folder / 'plain', runs.likely())


def save_experts(folder):
  likely = {i: 2.5 for i in range(30, 34)} | {tiny.chat().stop_ids[0]: 2.7}
  shape = dataclasses.replace(tiny.config('qwen3_moe'), num_layers=1)
  params = tiny.params(shape, likely)
  weights.save(folder, shape, params, tokenizer_from=tiny.tokenizer_dir())
  return folder


POLICIES = {'plain': save_plain, 'experts': save_experts, 'pictures': gallery.save}


def check_program(whole):
  last = whole.lines[-1]
  assert last['eval/dev/turns'] == last['rollout/turns'] == 1
  assert last['rollout/forks'] == 0
  assert 'ask_the_endpoint' in (whole.workdir / 'made_of.json').read_text()


def check_control(whole):
  assert len({line['train/kl_coef'] for line in whole.lines}) > 3


def check_muon(whole):
  kernels = (x['layers']['attn']['q']['kernel'] for x in (whole.base, whole.params))
  assert not np.array_equal(*kernels)


def check_adapters(whole):
  runs.assert_equal(weights.load(whole.workdir / 'model')[1], whole.params)
  assert jax.tree.structure(whole.base) == jax.tree.structure(whole.params)
  named = jax.tree_util.tree_leaves_with_path(whole.base)
  changed = {
    jax.tree_util.keystr(path, simple=True, separator='/')
    for (path, old), new in zip(named, jax.tree.leaves(whole.params))
    if not np.array_equal(old, new)
  }
  assert changed == {f'layers/{x}/kernel' for x in ('attn/q', 'attn/o', 'mlp/up')}
  assert abs(whole.lines[0]['train/kl']) < 1e-6 < abs(whole.lines[-1]['train/kl'])


def check_pictures(whole):
  for line in whole.lines:
    # The learner's log-probs are those of the sampler.
    assert abs(line['train/behaviour_kl']) < 1e-6 and line['train/grad_norm'] > 0
    assert line['rollout/status/error'] == 0
  for tree in ('vision', 'layers'):
    pairs = zip(*(jax.tree.leaves(x[tree]) for x in (whole.base, whole.params)))
    assert min(np.abs(np.subtract(x, y)).max() for x, y in pairs) > 0
  (log,) = (whole.workdir / 'trajectories').glob('step-00001-*.jsonl')
  episode = json.loads(log.read_text().splitlines()[0])
  shown = [m['pictures'] for m in episode['messages'] if 'pictures' in m]
  assert len(shown) == episode['metrics'].get('turns', len(episode['turn_tokens']))
  assert all(url.startswith('data:image/png;base64,') for (url,) in shown)


def check_experts(whole):
  """The prompt and what the environment said are replayed too, but the last tokens."""
  assert all(abs(line['train/behaviour_kl']) < 1e-6 for line in whole.lines)
  assert whole.tables
  for table in whole.tables:
    unknown = (table.routes == types.NO_EXPERT).all((1, 2))
    ends = np.append(np.diff(table.segment) != 0, True)
    np.testing.assert_array_equal(unknown, ends)


def check_curriculum(whole):
  read = lambda x: json.loads(next(x.rglob('checkpoints/1/host/*')).read_text())
  assert read(whole.killed)['position']['draws']['variances']


_CONTROLLED = algorithms.grpo(clip_high=0.3)._replace(
  kl=kl.InLoss(0.02, control=kl.adaptive(target=0.001, horizon=50)),
  correction=losses.token_truncated(),
)
_BY_KIND = [dataclasses.replace(t, info={'kind': t.id}) for t in runs.tasks(4)]
# Where a run has evaluations, they are of step 0 and after each second step.
_EVALS = {'evals': {'dev': runs.tasks(2)}}

FEATURES = {
  'plain': Feature({'steps': 3, 'eval_every': 2}, given=_EVALS),
  'before a checkpoint': Feature(
    {'eval_every': 2}, given=_EVALS, moment=Moment('episode', 6, 0, 0)
  ),
  'in an evaluation': Feature(
    {'eval_every': 1}, given=_EVALS, moment=Moment('episode', 21, 1, 1)
  ),
  'critic': Feature(
    {'steps': 3, 'critic_warmup': 1, 'minibatches': 2, 'critic_learning_rate': 1e-2}
    | {'tasks': 1},
    runs.PPO,
    {'privileged': lambda task: f' {task.id}', 'make_env': graded(says_city)},
  ),
  # KL control, a reference that moves, a stale engine, tasks drawn again: all go on.
  'control': Feature(
    {'sync_every': 2, 'reference_every': 3, 'max_refills': 1}
    | {'checkpoint_every': 3, 'steps': 5},
    _CONTROLLED,
    # Without a tool nothing waits: which rows decode together is always the same.
    {'make_env': graded(says_city)},
    moment=Moment('update', 3, 3, 3),
    check=check_control,
  ),
  # One rollout is under way in the update, and is played again by an earlier policy.
  'ahead': Feature(
    {'ahead': 1, 'steps': 4}, runs.STALE, moment=Moment('update', 2, 2, 2)
  ),
  'curriculum': Feature(
    {'weight': 'variance', 'by': 'kind', 'uniform_share': 0.5, 'tasks': 3},
    given={'tasks': _BY_KIND, 'make_env': graded(says_city)},
    check=check_curriculum,
  ),
  # Its state is a tree without the leaves of the other optimizer.
  'muon': Feature({'optimizer': 'muon', 'learning_rate': 3e-2}, check=check_muon),
  # With moments of 8 bits in the host's memory, and a KL to the base.
  'adapters': Feature(
    {'lora_rank': 2, 'lora_targets': 'q, o,up', 'learning_rate': 3e-2}
    | {'optimizer': 'adamw8', 'offload': True},
    check=check_adapters,
  ),
  'experts': Feature(
    {'max_turns': 2, 'decode_steps': 6},
    given={'make_env': runs.Talks},
    policy='experts',
    check=check_experts,
  ),
  'pictures': Feature(
    {'samples': 3, 'slots': 128, 'bucket': 128, 'prefill_tokens': 16}
    | {'learning_rate': 1e-3},
    given={'tasks': gallery.tasks(), 'make_env': gallery.Gallery},
    policy='pictures',
    check=check_pictures,
  ),
  'program': Feature(
    {'eval_every': 2},
    given={'make_env': lambda: program.Program(ask_the_endpoint, runs.reward)} | _EVALS,
    check=check_program,
  ),
}


@pytest.fixture(scope='session')
def policies(tmp_path_factory):
  """Returns the directory of a policy, made once."""
  return functools.cache(lambda name: POLICIES[name](tmp_path_factory.mktemp(name)))


@contextlib.contextmanager
def happens(moment: Moment, act: Callable[[], None]) -> Iterator[list]:
  """Calls `act` at a moment of the run; gives the tables that are learned from."""
  reset, learn, begun = env_lib.ToolEnv.reset, loop.updates.learn, []
  tables = []

  async def reset_and_act(self, task):
    begun.append(task)
    if (moment.kind, moment.number) == ('episode', len(begun) - 1):
      act()
    return await reset(self, task)

  def learn_and_act(train_state, *args, **kwargs):
    if (moment.kind, moment.number) == ('update', train_state.step):
      act()
    learned = learn(train_state, *args, **kwargs)
    tables.append(learned[2])
    return learned

  with (
    mock.patch.object(env_lib.ToolEnv, 'reset', reset_and_act),
    mock.patch.object(loop.updates, 'learn', learn_and_act),
  ):
    yield tables


def play(feature: Feature, path, workdir, **options) -> decoder.Params:
  small = {'steps': 2, 'eval_every': 0, 'checkpoint_every': 1}
  config = runs.config(path, **small | feature.options | options)
  given = {'evals': None} | feature.given
  return runs.run(config, workdir, algorithm=feature.algorithm, **given)


def copy(workdir: pathlib.Path, target: pathlib.Path, moment: Moment):
  """Copies what a kill would leave on the disk."""
  if moment.step:
    # It is written while the run goes on.
    there = lambda: (workdir / 'checkpoints' / f'{moment.step}').exists()
    waiting.until(there, 'the checkpoint')
  shutil.copytree(
    workdir, target, ignore=shutil.ignore_patterns('*orbax-checkpoint-tmp*')
  )


@pytest.fixture(scope='session')
def wholes(policies, tmp_path_factory):
  """Returns a feature's run that nothing interrupts, made once."""

  @functools.cache
  def run(name):
    feature, root = FEATURES[name], tmp_path_factory.mktemp('resume')
    path, whole, killed = policies(feature.policy), root / 'whole', root / 'killed'
    with happens(feature.moment, lambda: copy(whole, killed, feature.moment)) as tables:
      params = play(feature, path, whole)
    return Whole(params, whole, killed, weights.load(path)[1], tables)

  return run


def last_line(workdir):
  lines = metrics.read(workdir) if (workdir / 'metrics.jsonl').exists() else []
  return max((line['step'] for line in lines), default=0)


def assert_resumes(feature: Feature, path, workdir, whole: Whole):
  """The same command ends with the parameters and the numbers of an unbroken run."""
  assert not (workdir / 'model').exists()
  with tiny.compilations() as compiled:
    params = play(feature, path, workdir)
  # A new process finds in the cache what the one before it has compiled.
  assert not [x for x in compiled if 'decode' in x or '_gradient' in x]
  runs.assert_equal(params, whole.params)
  assert runs.read_numbers(workdir) == whole.lines
  for name in ('model', 'critic'):
    files = ((x / name / 'model.safetensors') for x in (workdir, whole.workdir))
    ours, theirs = (x.read_bytes() if x.exists() else b'' for x in files)
    assert ours == theirs, name


@pytest.mark.parametrize('name', FEATURES)
def test_a_killed_run_resumes_bit_for_bit(name, wholes, policies):
  feature, whole = FEATURES[name], wholes(name)
  feature.check(whole)
  assert last_line(whole.killed) == feature.moment.line
  steps = [int(p.name) for p in (whole.killed / 'checkpoints').glob('[0-9]*')]
  assert max(steps, default=0) == feature.moment.step
  assert_resumes(feature, policies(feature.policy), whole.killed, whole)


@pytest.mark.parametrize(
  ('name', 'number', 'moment'),
  [
    ('plain', signal.SIGTERM, Moment('episode', 6, 0, 0)),
    # The line of a step waits for its evaluation, which is made anew: 1 and not 2.
    ('plain', signal.SIGINT, Moment('episode', 19, 2, 1)),
    ('plain', signal.SIGTERM, Moment('update', 1, 2, 1)),
    ('ahead', signal.SIGTERM, Moment('episode', 19, 2, 2)),
    ('ahead', signal.SIGTERM, Moment('update', 2, 3, 3)),
  ],
)
def test_a_preempted_run_resumes_bit_for_bit(
  name, number, moment, wholes, policies, tmp_path, monkeypatch, capfd
):
  feature, whole = FEATURES[name], wholes(name)
  path = policies(feature.policy)
  watch = preemption.Watch()
  with (
    monkeypatch.context() as patch,
    contextlib.closing(watch),
    happens(moment, lambda: watch.handle_signal(number)),
    pytest.raises(preemption.Preempted) as ended,
  ):
    patch.setenv('AGENT_R1_GRACE_SECONDS', '900')  # However slow the machine is.
    patch.setattr(preemption, 'watch', lambda: contextlib.nullcontext(watch))
    play(feature, path, tmp_path)
  assert ended.value.code == preemption.EXIT_STATUS
  assert f'saved step {moment.step}; the same command' in capfd.readouterr().err
  assert last_line(tmp_path) == moment.line
  assert_resumes(feature, path, tmp_path, whole)
