"""Servers of others as samplers: this project's own server plays vLLM's part."""

import shutil
from typing import Any

import far_side
import jax
import numpy as np
import pytest
import rollouts
import tiny

from agent_r1_jax import train
from agent_r1_jax.contrib.external import dialects, http_engine, server
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.train import metrics

CORRECTED = algorithms.grpo()._replace(correction=losses.token_truncated())
DEAD = 'http://127.0.0.1:9'


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  likely = {tiny.chat().stop_ids[0]: 2.0}
  return tiny.save(tmp_path_factory.mktemp('base'), likely=likely)


@pytest.fixture
def far(base, tmp_path):
  """Where the policy is written, and the server that has loaded it."""
  directory = shutil.copytree(base, tmp_path / 'policy')
  with far_side.serve(directory) as (url, loaded):
    yield directory, url, loaded


def _config(base, **fields):
  sizes = {'slots': 128, 'rows': 4, 'bucket': 128, 'narrow': False, 'replicas': 1}
  sizes |= {'steps': 2, 'tasks': 2, 'samples': 4, 'max_turn_tokens': 16, 'max_turns': 3}
  changes: Any = sizes | {'learning_rate': 0.02} | fields
  return tiny.run_config(model=base, **changes)


def _make(base, directory, urls, **options):
  """An engine outside of a run, whose policy is the base."""
  config, (shape, params) = _config(base), http_engine.weights.load(base)
  engine = http_engine.connect(urls, directory, **options)(config, shape, params)
  engine.sync_weights(params, 0)
  return engine


def _run(base, workdir, algorithm=CORRECTED, **options):
  return tiny.within(
    train.run,
    _config(base),
    str(workdir),
    tasks=rollouts.make_tasks(4),
    make_env=rollouts.Env,
    algorithm=algorithm,
    **options,
  )


def test_a_run_samples_each_step_from_the_newest_policy(base, far, tmp_path):
  directory, url, loaded = far
  connected = http_engine.connect([url], directory, rows=4)
  _run(base, tmp_path / 'run', make_engine=connected)
  lines = metrics.read(tmp_path / 'run')
  # The last of these was written before the second rollout.
  assert len(loaded) == len(lines) == 2
  for line in lines:
    # Log-probs of the server's engine and of the learner, for the same weights. With
    # those of the step before, the learning rate makes it a hundred times as much.
    assert abs(line['train/correction_kl']) < 1e-5, line
  first, second = (jax.tree.leaves(tree) for tree in loaded)
  assert max(np.abs(a - b).max() for a, b in zip(first, second, strict=True)) > 1e-3


def test_log_probs_are_those_of_the_learner_over_several_turns(base, far):
  directory, url, _ = far
  played = rollouts.collect(rollouts.Env, engine=_make(base, directory, [url]))
  assert any(len(t.turns) > 1 for t in played)
  shape, params = http_engine.weights.load(base)
  tiny.assert_on_policy(params, [s for t in played for s in t.segments], shape=shape)
  for trajectory in played:
    rollouts.assert_exact(trajectory)


def test_without_a_correction_it_is_refused(base, tmp_path):
  connected = http_engine.connect([DEAD], tmp_path / 'policy')
  with pytest.raises(ValueError, match='make_engine'):
    _run(base, tmp_path / 'run', algorithms.grpo(), make_engine=connected)


@pytest.mark.parametrize(
  'fields', [{'ahead': 1}, {'batch_invariant': True}, {'tool_grammar': True}]
)
def test_what_it_cannot_do_is_refused(base, tmp_path, fields):
  make = http_engine.connect([DEAD], tmp_path / 'policy')
  shape, params = http_engine.weights.load(base)
  with pytest.raises(ValueError, match=next(iter(fields))):
    make(_config(base, **fields), shape, params)
  with pytest.raises(ValueError, match='overwrite'):
    http_engine.connect([DEAD], base)(_config(base), shape, params)


def _vllm(ids, logprobs=None):
  logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
  names = [f'token_id:{i}' for i in ids]
  return {'choices': [{'logprobs': {'tokens': names, 'token_logprobs': logprobs}}]}


def _ask(engine, **fields):
  """The reply to a request; waits for at most a minute."""

  async def ask():
    return await engine.submit(
      request_lib.Request(np.array([5, 6]), automata=[tiny.stop()], **fields)
    )

  return tiny.within(engine.run, [ask()], seconds=60)[0]


def _answered(base, tmp_path, *answers, urls=(), **options):
  """The reply where a server says such things, after it took the weights."""
  loads = [(200, {})] * 2
  with far_side.answer(*loads, *answers) as (url, bodies):
    engine = _make(base, tmp_path / 'policy', [url, *urls], patience=2, **options)
    return _ask(engine, max_tokens=6), bodies[2:]


def test_a_reply_goes_on_where_the_server_ended_it_by_itself(base, tmp_path):
  stop = tiny.chat().stop_ids[0]
  # Three tokens of six, and no stop; then more than the rest has after the stop.
  said = (200, _vllm([7, 8, 9])), (503, {}), (200, _vllm([10, stop, 11], [-1, -2, -3]))
  reply, bodies = _answered(base, tmp_path, *said)
  assert reply.tokens.tolist() == [7, 8, 9, 10, stop] and reply.stopped
  assert reply.logprobs.tolist() == [-0.5, -0.5, -0.5, -1, -2]
  assert [b['prompt'] for b in bodies] == [[5, 6], *[[5, 6, 7, 8, 9]] * 2]
  assert [b['max_tokens'] for b in bodies] == [6, 3, 3]
  assert bodies[0]['stop_token_ids'] == [*tiny.chat().stop_ids]
  # Tried again it is the same reply; further on it has other random numbers.
  assert bodies[0]['seed'] != bodies[1]['seed'] == bodies[2]['seed']


@pytest.mark.parametrize(
  'status, answer, error',
  [
    (200, {'choices': []}, 'no log-probs'),
    (200, _vllm([7], [None]), '1 log-probs'),
    (200, _vllm([7, 8], [-1.0]), '2 tokens with 1'),
    (200, _vllm([]), '0 tokens'),
    (200, _vllm([tiny.VOCAB]), f'the highest {tiny.VOCAB}'),
    (200, _vllm([7] * 7), '7 tokens of 6'),
    (400, {'error': 'no such model'}, 'no such model'),
    (500, {'error': 'out of memory'}, 'within 2 seconds.*out of memory'),
  ],
)
def test_a_server_that_does_not_answer_well_ends_the_run(
  base, tmp_path, status, answer, error
):
  with pytest.raises((dialects.BadAnswerError, server.LostServerError), match=error):
    _answered(base, tmp_path, (status, answer))


def test_a_lost_server_leaves_its_replies_to_another(base, tmp_path, caplog):
  stop = tiny.chat().stop_ids[0]
  reply, _ = _answered(base, tmp_path, (200, _vllm([stop])), urls=[DEAD])
  assert reply.stopped and f'{DEAD}/collective_rpc' in caplog.text
  with pytest.raises(server.LostServerError, match='no server has loaded'):
    _make(base, tmp_path / 'other', [DEAD], patience=0.5)


def test_sglang_is_asked_and_read_as_it_documents_it(base, tmp_path):
  stop = tiny.chat().stop_ids[0]
  pairs = [[-0.25, 7, None], [-1.5, stop, None]]
  said = {'text': 'x', 'meta_info': {'output_token_logprobs': pairs}}
  loads = (200, {'success': False, 'message': 'no such path'}), (200, {'success': True})
  directory = tmp_path / 'policy'
  with far_side.answer(*loads, (200, said)) as (url, bodies):
    options = {'dialect': dialects.SGLANG, 'patience': 2}
    with pytest.raises(server.LostServerError, match='no such path'):
      _make(base, directory, [url], **options)
    reply = _ask(_make(base, directory, [url], **options), max_tokens=6)
  assert reply.tokens.tolist() == [7, stop] and reply.logprobs.tolist() == [-0.25, -1.5]
  assert bodies[1] == {'model_path': str(directory), 'flush_cache': True}
  assert bodies[2]['input_ids'] == [5, 6] and bodies[2]['return_logprob']
  options = bodies[2]['sampling_params']
  assert options['max_new_tokens'] == 6 and options['sampling_seed'] < 2**31
