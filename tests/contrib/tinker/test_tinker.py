"""The server of the Tinker API, asked by HTTP; test_with_tinker.py has its client."""

import asyncio
import collections
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
import json
import resource
import threading
import time

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
import tiny

from agent_r1_jax import types
from agent_r1_jax.contrib.tinker import data as data_lib
from agent_r1_jax.contrib.tinker import (
  learning,
  messages,
  sampling,
  server,
  states,
  training,
  wire,
  work,
)
from agent_r1_jax.contrib.tinker import losses as losses_lib
from agent_r1_jax.models import lora
from agent_r1_jax.rl import learner, losses, packing, table
from agent_r1_jax.web import http

RANK, ROW = 4, 64
SHAPE = learning.Shape(2, 5, ('q', 'k', 'v', 'o'))
TEXT = np.array([7, 8, 9, 7, 8, 10, 11, 7], np.int32)
TINY = tiny.config(layers=1)


@functools.cache
def params():
  return tiny.params(TINY)


@functools.cache
def learn():
  return learning.Learning(TINY, params(), packing.MicrobatchShape(2, ROW), RANK)


def finish(steps):
  """Runs all steps of a pass; returns its result."""
  while (end := work._advance(steps)) is None:
    pass
  return end[0]


@functools.cache
def engine():
  return tiny.engine(
    params(), shape=TINY, adapters=2, adapter_rank=RANK, bucket=128, narrow=False
  )


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return tmp_path_factory.mktemp('tinker')


@contextlib.contextmanager
def serve(workdir, keys=(), clients=8, max_waiting=256, seconds=600.0):
  saved = states.States(workdir, 'tiny', TINY)
  trainings = training.Trainings(learn(), saved, most=clients)
  samplers = sampling.Samplers(
    engine(), tiny.chat(), trainings, max_waiting=max_waiting, seconds=seconds
  )
  app = server.make_app(trainings, samplers, keys)
  with serving.run(engine(), app) as url:
    with httpx2.Client(base_url=f'{url}/api/v1/', timeout=120) as asked:
      yield asked


@pytest.fixture(scope='module')
def asked(workdir):
  with serve(workdir, clients=32) as asked:
    yield asked


def post(asked, path, status=200, /, **fields):
  answer = asked.post(path, json=fields)
  assert answer.status_code == status, answer.text
  return answer.json()


def wait(asked, future):
  """The result of a request: JSON, or the bytes of a message."""
  answer = asked.post('retrieve_future', json={'request_id': future['request_id']})
  assert answer.status_code == 200, answer.text
  if answer.headers['content-type'] == messages.MEDIA_TYPE:
    return answer.content
  return answer.json()


class Run:
  """A training run of a session of its own."""

  def __init__(self, asked, path=None, optimizer=True, **lora_config):
    self.asked, self.seq = asked, itertools.count(1)
    self.session = post(asked, 'create_session')['session_id']
    self.id = f'{self.session}:train:0'
    where = {'session_id': self.session, 'model_seq_id': 0}
    if path:
      made = post(asked, 'load_weights', **where, path=path, optimizer=optimizer)
    else:
      config = {'rank': 2, 'seed': 5} | lora_config
      made = post(asked, 'create_model', **where, base_model='tiny', lora_config=config)
    assert 'error' not in wait(asked, made)

  def post(self, path, /, **fields):
    fields = {'model_id': self.id, 'seq_id': next(self.seq)} | fields
    return wait(self.asked, post(self.asked, path, **fields))

  def passed(self, data, forward_only=False, loss='cross_entropy'):
    body = write(self.id, next(self.seq), data, forward_only, loss)
    answer = self.asked.post('forward_backward', content=body)
    assert answer.status_code == 200, answer.text
    result = wait(self.asked, answer.json())
    assert isinstance(result, bytes), result
    read = messages.make('ForwardBackwardOutput')
    read.ParseFromString(result)
    fields = {f.key: f.value for f in read.loss_fn_outputs[0].fields}
    numbers = np.frombuffer(fields['logprobs'].data, '<f4')
    return numbers, {entry.key: entry.value for entry in read.metrics}

  def step(self, **adam):
    return self.post('optim_step', adam_params={'learning_rate': 0.01} | adam)

  def sampler(self, seq=1):
    fields = {'sampling_session_seq_id': seq}
    return self.post('save_weights_for_sampler', **fields)['sampling_session_id']


def tensor(x):
  x = np.asarray(x)
  kind, dtype = (2, '<i8') if x.dtype.kind == 'i' else (1, '<f4')
  return messages.make(
    'Tensor', dense=x.astype(dtype).tobytes(), dtype=kind, shape=x.shape
  )


def write(model_id, seq_id, data, forward_only=False, loss='cross_entropy', **options):
  request = messages.make(
    'ForwardBackwardRequest',
    model_id=model_id,
    seq_id=seq_id,
    forward_only=forward_only,
    loss_fn=loss,
  )
  for tokens, inputs in data:
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, '<i4').tobytes()
    for key, value in inputs.items():
      datum.loss_fn_inputs.add(key=key, value=tensor(value))
  for key, value in options.items():
    request.loss_fn_config.add(key=key, value=value)
  return request.SerializeToString()


def shifted(text=TEXT, **inputs):
  return text[:-1], {'target_tokens': text[1:].astype(np.int64), **inputs}


def test_a_record_has_data_of_one_shape():
  data = [np.arange(n, dtype=np.float32) for n in (3, 2)]
  data += [np.ones((2, 3), np.float32), np.arange(4, dtype=np.float32)]
  read = messages.make('ForwardBackwardOutput')
  read.ParseFromString(messages.write_forward_backward({'logprobs': data}, {}))
  found = []
  for record in read.loss_fn_outputs:
    (field,) = record.fields
    assert len(np.frombuffer(field.value.offsets, '<i8')) == record.num_datums + 1
    shape = [-1, *field.value.trailing_shape]
    numbers = np.frombuffer(field.value.data, '<f4').reshape(shape)
    found.append((record.num_datums, numbers.shape))
  assert found == [(2, (5,)), (1, (2, 3)), (1, (4,))]


def sample(asked, sampler, seq=0, prompt=TEXT, status=200, **more):
  params = {'max_tokens': 6, 'seed': 3} | more.pop('params', {})
  fields = {'chunks': [{'tokens': [int(token) for token in prompt]}]}
  future = post(
    asked,
    'asample',
    status,
    sampling_session_id=sampler,
    seq_id=seq,
    prompt=fields,
    sampling_params=params,
    **more,
  )
  if status != 200:
    return future
  result = wait(asked, future)
  assert isinstance(result, bytes), result
  read = messages.make('SampleResponse')
  read.ParseFromString(result)
  replies = [
    (np.frombuffer(s.tokens, '<i4').tolist(), np.frombuffer(s.logprobs, '<f4'))
    for s in read.sequences
  ]
  return replies, np.frombuffer(read.prompt_logprobs, '<f4')


def base_sampler(asked):
  session = post(asked, 'create_session')['session_id']
  made = post(
    asked,
    'create_sampling_session',
    session_id=session,
    sampling_session_seq_id=0,
    base_model='tiny',
  )
  return made['sampling_session_id']


def test_a_run_is_trained_and_samples_what_forward_computes(asked):
  run, weights = Run(asked), np.array([0, 0, 0, 1, 1, 1, 1], np.float32)
  datum = shifted(weights=weights)
  logprobs, metrics = run.passed([datum], forward_only=True)
  segment = types.Segment(TEXT, TEXT >= 0, np.zeros(len(TEXT)))
  want = tiny.learned(params(), [segment], shape=TINY)[0][1:]
  np.testing.assert_allclose(logprobs, want, atol=2e-5)
  assert metrics['loss:sum'] == pytest.approx(-(want * weights).sum(), rel=1e-5)
  assert run.post('optim_step', adam_params={})['category'] == 'user'  # No gradient.
  first, _ = run.passed([datum])
  np.testing.assert_array_equal(first, logprobs)
  compiled = learner._gradient._cache_size()
  for rate in (0.01, 0.02):
    found = run.step(learning_rate=rate, grad_clip_norm=rate)
    assert found['metrics']['grad_norm:mean'] > 0
    run.passed([datum])
  assert learner._gradient._cache_size() == compiled
  after, metrics = run.passed([datum], forward_only=True)
  assert metrics['loss:sum'] < -(want * weights).sum() - 0.01

  sampler = run.sampler()
  ((tokens, scores),), prompt = sample(asked, sampler, prompt_logprobs=True)
  text = np.append(TEXT, tokens).astype(np.int32)
  again, _ = run.passed([shifted(text)], forward_only=True)
  np.testing.assert_allclose(again[len(TEXT) - 1 :], scores, atol=2e-5)
  np.testing.assert_allclose(again[: len(TEXT) - 1], prompt[1:], atol=2e-5)
  assert np.isnan(prompt[0])


def test_each_client_has_an_adapter_of_its_own_and_more_than_the_engine_holds(asked):
  base, runs = base_sampler(asked), [Run(asked, seed=seed) for seed in (5, 5, 6)]
  samplers = []
  for run, rate in zip(runs, (0.01, 0.3, 0.3)):
    run.passed([shifted()])
    run.step(learning_rate=rate)
    samplers.append(run.sampler())
  greedy = {'temperature': 0.0, 'stop': []}
  told = lambda name, seq: [
    np.append(*reply) for reply in sample(asked, name, seq, params=greedy)[0]
  ]
  first = [told(name, 0) for name in (base, *samplers)]
  for other in first[1:]:  # The engine has room for two adapters.
    assert not np.array_equal(first[0], other)
  second = [told(name, 1) for name in (base, *samplers)]
  np.testing.assert_array_equal(first, second)
  asked.post(f'sessions/{runs[0].session}/finish', json={})
  assert (
    'there is no training run'
    in post(asked, 'get_info', 404, model_id=runs[0].id)['error']
  )
  post(asked, 'session_heartbeat', 410, session_id=runs[0].session)


def test_more_samplers_than_the_engine_holds_answer_in_turn(workdir):
  """Of each several requests at once, so that none is ever without one."""
  with serve(workdir, clients=32, seconds=60.0) as asked:
    base, samplers = base_sampler(asked), []
    for seed in range(3):
      run = Run(asked, seed=seed)
      run.passed([shifted()])
      run.step(learning_rate=0.3)
      samplers.append(run.sampler())

    def play(name, first):
      return [sample(asked, name, first + i)[0][0][0] for i in range(4)]

    with futures.ThreadPoolExecutor(9) as pool:
      played = [
        (name, pool.submit(play, name, 10 * n)) for n in range(3) for name in samplers
      ]
      replies = collections.defaultdict(set)
      for name, future in played:
        for tokens in future.result(120):
          replies[name].add(tuple(tokens))
    assert [len(replies[name]) for name in samplers] == [1, 1, 1]
    assert sample(asked, base)


def test_a_run_that_is_being_made_takes_what_comes_after_it(asked, monkeypatch):
  start, go_on = learn().start, threading.Event()
  monkeypatch.setattr(learn(), 'start', lambda shape: go_on.wait(60) and start(shape))
  for _ in range(8):
    go_on.clear()
    session = post(asked, 'create_session')['session_id']
    where = {'session_id': session, 'model_seq_id': 0, 'base_model': 'tiny'}
    made = post(asked, 'create_model', **where, lora_config={'rank': 2})
    body = write(made['model_id'], 1, [shifted()], forward_only=True)
    passed = asked.post('forward_backward', content=body).json()
    go_on.set()
    assert isinstance(wait(asked, passed), bytes)
    asked.post(f'sessions/{session}/finish', json={})


def test_samples(asked):
  base = base_sampler(asked)
  three, _ = sample(asked, base, 0, num_samples=3)
  assert [t for t, _ in three] == [t for t, _ in sample(asked, base, 1, num_samples=3)[0]]
  assert len({tuple(tokens) for tokens, _ in three}) == 3
  cut = three[0][0][2]
  ((tokens, _),), _ = sample(asked, base, 2, params={'stop': [cut]})
  assert tokens == three[0][0][: three[0][0].index(cut) + 1]
  # A string that is complete in the middle of a reply, across two tokens.
  pieces = [tiny.chat().get_bytes(token) for token in three[0][0]]
  pairs = [a + b for a, b in itertools.pairwise(pieces[:-1]) if (a + b).isascii()]
  ((tokens, _),), _ = sample(asked, base, 3, params={'stop': pairs[0].decode()})
  assert tokens == three[0][0][: len(tokens)] and len(tokens) < 6
  assert b''.join(pieces[: len(tokens)]).endswith(pairs[0])
  # The same request is not sampled again.
  again = sample(asked, base, 3, params={'stop': pairs[0].decode()})[0]
  assert again[0][0] == tokens
  assert 'another request' in sample(asked, base, 3, status=409)['error']
  _, part = sample(asked, base, 4, prompt_logprobs=True, prompt_logprobs_last_n=2)
  assert np.isnan(part).tolist() == [True] * 6 + [False] * 2


def test_a_state_ends_at_its_time_and_what_is_replaced_leaves_the_disk(asked, workdir):
  run = Run(asked)
  saved = states.States(workdir, 'tiny', TINY)
  data = saved.directory / run.id / '.data'
  paths = [run.post('save_weights', path=n, ttl_seconds=9999)['path'] for n in 'ab']
  first = {folder.name for folder in data.iterdir()}
  again = run.post('save_weights', path='a', ttl_seconds=9999, overwrite=True)
  assert again['path'] == paths[0]
  folders = {folder.name for folder in data.iterdir()}
  assert len(first) == len(folders) == 2 and len(first & folders) == 1
  # Time passes for one of them.
  file = saved.directory / run.id / 'weights' / 'a' / 'state.json'
  record = json.loads(file.read_text())
  file.write_text(json.dumps(record | {'expires_at': '2020-01-01T00:00:00+00:00'}))
  with pytest.raises(http.RefusedError, match='no state'):
    saved.describe(paths[0])
  assert [x['tinker_path'] for x in saved.describe_all(run.id)] == paths[1:]
  assert {folder.name for folder in data.iterdir()} == first & folders
  assert saved.describe(paths[1])['expires_at'] > '2026'


def test_a_run_has_a_bounded_number_of_states(asked, monkeypatch):
  monkeypatch.setattr(states, '_MOST_STATES', 2)
  run = Run(asked)
  for name in 'ab':
    assert 'path' in run.post('save_weights', path=name)
  assert 'the run has 2 states' in run.post('save_weights', path='c')['error']


def test_the_longest_datum_fills_a_row_with_its_target():
  make = lambda n: data_lib.make_datum(
    *(np.zeros(n, np.int32), {'target_tokens': np.ma.zeros(n, np.int32)})
  )
  data_lib.check([make(ROW - 1)], TINY.vocab_size, ROW)
  with pytest.raises(ValueError, match=f'{ROW} tokens, and there is room for {ROW - 1}'):
    data_lib.check([make(ROW)], TINY.vocab_size, ROW)


def test_gspo_counts_a_token_that_was_certain():
  """Its log-prob is 0, as that of a prompt's token, which has no advantage."""
  old = np.array([[0.0, 0.0, -1.0]])
  lp, a = np.array([[-3.0, -0.4, -0.8]]), np.array([[0.0, 1.0, 1.0]])
  batch = dict.fromkeys(types.Batch._fields) | {'old_logprobs': old, 'advantages': a}
  batch |= {'weights': np.ones((1, 3)), 'segment_ids': np.ones((1, 3), int)}
  stats = jax.tree.map(jnp.asarray, (losses.TokenStats(lp, lp), types.Batch(**batch)))
  wide = {'clip_low_threshold': 0.1, 'clip_high_threshold': 9.0}
  found, _ = losses_lib.Losses().find('gspo', wide).surrogate(*stats)
  np.testing.assert_allclose(found[0, 1:], -np.exp((-0.4 + 0.2) / 2), rtol=1e-5)


def test_a_state_goes_on_bit_for_bit(asked, workdir):
  run = Run(asked, train_mlp=False)
  for _ in range(2):
    run.passed([shifted()])
    run.step()
  path = run.post('save_weights', path='two')['path']
  assert path == f'tinker://{run.id}/weights/two'
  assert 'exists already' in run.post('save_weights', path='two')['error']
  assert run.post('save_weights', path='two', overwrite=True)['path'] == path

  def go_on(run):
    run.passed([shifted()])
    run.step()
    return run.passed([shifted()], forward_only=True)[0]

  want = go_on(run)
  np.testing.assert_array_equal(go_on(Run(asked, path, optimizer=True)), want)
  assert not np.array_equal(go_on(Run(asked, path, optimizer=False)), want)
  assert run.post('load_weights', path=path, optimizer=True)['path'] == path
  np.testing.assert_array_equal(go_on(run), want)
  # Another server on the same workdir, after this one was killed while it saved.
  saved = states.States(workdir, 'tiny', TINY)
  half = workdir / 'states' / run.id / '.data' / 'half'
  half.mkdir()
  half.with_name('half.link').symlink_to('../.data/half')
  saved = states.States(workdir, 'tiny', TINY)
  assert not half.exists() and len([*half.parent.iterdir()]) == 1
  shape, adapter, moments = saved.load(path, optimizer=True)
  assert shape == SHAPE and moments['count'] == 2
  assert {*adapter['layers']} == {'attn'}
  info = post(asked, 'weights_info', tinker_path=path)
  assert (info['lora_rank'], info['train_mlp'], info['train_attn']) == (2, False, True)
  listed = asked.get('checkpoints', params={'limit': 1}).json()
  assert listed['checkpoints'][0]['tinker_path'] == path
  runs = asked.get('training_runs').json()['training_runs']
  assert run.id in [r['training_run_id'] for r in runs]
  file = workdir / 'states' / run.id / 'weights' / 'two' / 'optimizer.safetensors'
  file.write_bytes(file.read_bytes()[:-1] + b'x')
  with pytest.raises(http.RefusedError, match='checksum differs'):
    saved.load(path, optimizer=True)
  assert (
    asked.delete(f'training_runs/{run.id}/checkpoints/weights/two').status_code == 200
  )
  assert asked.get(f'training_runs/{run.id}/checkpoints').json()['checkpoints'] == []


def test_an_adapter_that_is_not_finite_is_neither_saved_nor_sampled_nor_loaded(asked):
  run = Run(asked)
  run.passed([shifted()])
  good = run.post('save_weights', path='good')['path']
  run.step(learning_rate=3e38, weight_decay=3e38)
  for path, fields in (
    ('save_weights', {'path': 'bad'}),
    ('save_weights_for_sampler', {'path': 'bad'}),
    ('save_weights_for_sampler', {'sampling_session_seq_id': 3}),
  ):
    found = run.post(path, **fields)
    assert 'not finite' in found['error'] and found['category'] == 'user'
  assert run.post('load_weights', path=good, optimizer=True)['path'] == good
  adapter, moments = learn().no_adapter, {'count': 1}
  moments |= {name: learn().trim(adapter, SHAPE) for name in ('mu', 'nu')}
  moments['nu']['layers']['attn']['q']['lora_a'][:] = np.nan
  with pytest.raises(FloatingPointError, match='nu.*lora_a'):
    learn().resume(SHAPE, {'layers': {}}, moments)


def test_a_full_disk_is_said(workdir):
  saved = states.States(workdir, 'tiny', TINY)
  run = learn().start(SHAPE)
  adapter = learn().trim(learn().get_adapter(run), SHAPE)
  path = 'tinker://full/weights/a'
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    with pytest.raises(OSError, match='the disk is full.*Make room'):
      saved.save(path, SHAPE, adapter, learn().get_moments(run), {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_sampling_session_that_begins_again_has_the_new_weights(asked):
  run = Run(asked)
  greedy = {'temperature': 0.0, 'stop': []}

  def told(name, seq):
    return np.append(*sample(asked, name, seq, params=greedy)[0][0])

  first = told(run.sampler(), 0)
  run.passed([shifted()])
  run.step(learning_rate=0.3)
  second = told(run.sampler(), 1)
  np.testing.assert_array_equal(second, told(run.sampler(2), 0))
  assert not np.array_equal(first, second)


def test_an_operation_that_arrives_twice_is_done_once(asked):
  run = Run(asked)
  run.passed([shifted()])
  fields = {'model_id': run.id, 'seq_id': 2, 'adam_params': {}}
  first, second = (post(asked, 'optim_step', **fields) for _ in range(2))
  assert first == second and 'metrics' in wait(asked, second)
  # It was refused, so that its number may come again; an older one may not.
  post(asked, 'optim_step', 400, **fields | {'seq_id': 9, 'adam_params': {'eps': 0}})
  text = post(asked, 'optim_step', 400, **fields | {'seq_id': 0})['error']
  assert 'answered already' in text
  other = {'adam_params': {'learning_rate': 0.5}}
  assert 'another request' in post(asked, 'optim_step', 409, **fields | other)['error']
  named = {'model_id': run.id, 'seq_id': 2, 'path': 'a'}
  assert 'another request' in post(asked, 'save_weights', 409, **named)['error']
  where = {'session_id': run.session, 'model_seq_id': 0, 'base_model': 'tiny'}
  post(asked, 'create_model', 409, **where, lora_config={'rank': 1})


def test_operations_are_done_in_the_order_of_their_numbers(asked, monkeypatch):
  want, run = Run(asked), Run(asked)
  data = [shifted(TEXT[:n]) for n in (8, 7, 6)]
  for datum in data:
    want.passed([datum])
  want.step()
  want, _ = want.passed(data, forward_only=True)
  fields = {'model_id': run.id, 'adam_params': {'learning_rate': 0.01}}
  futures = [post(asked, 'optim_step', seq_id=4, **fields)]
  for seq in (2, 3, 1):
    body = write(run.id, seq, [data[seq - 1]])
    futures.append(asked.post('forward_backward', content=body).json())
  for future in futures:
    result = wait(asked, future)
    assert isinstance(result, bytes) or 'metrics' in result, result
  run.seq = itertools.count(5)
  np.testing.assert_array_equal(run.passed(data, forward_only=True)[0], want)
  # What is refused keeps nobody waiting, and its number may come again.
  for _ in range(2):
    for path, content in (
      ('optim_step', json.dumps(fields | {'seq_id': 6, 'adam_params': {'eps': 0}})),
      ('forward_backward', write(run.id, 7, [shifted()], loss='other')),
      ('forward_backward', write(run.id, 8, [shifted(np.array([4, 300]))])),
    ):
      assert asked.post(path, content=content).status_code == 400
  future = post(asked, 'optim_step', seq_id=9, **fields)
  assert 'no gradient' in wait(asked, future)['error']
  body = write(run.id, 8, [shifted()])
  assert isinstance(
    wait(asked, asked.post('forward_backward', content=body).json()), bytes
  )
  # What never comes is waited for once.
  monkeypatch.setattr(work, '_GAP_SECONDS', 0.05)
  future = post(asked, 'optim_step', seq_id=12, **fields)
  assert 'seq_id 10 did not come' in wait(asked, future)['error']
  assert 'metrics' in wait(asked, post(asked, 'optim_step', seq_id=13, **fields))


def test_an_error_says_what_is_wrong(asked):
  run, base = Run(asked), base_sampler(asked)
  step = {'model_id': run.id, 'seq_id': 90}
  model = {'session_id': run.session, 'model_seq_id': 1, 'base_model': 'tiny'}
  model['lora_config'] = {'rank': 2}
  deep = json.loads('[' * 60 + ']' * 60)
  nan, inf = float('nan'), 1e999
  for path, fields, status, text in [
    ('optim_step', step | {'adam_params': {'learning_rate': -1}}, 400, 'learning_rate'),
    ('optim_step', step | {'adam_params': {'beta1': nan}}, 400, 'finite'),
    ('optim_step', step | {'adam_params': {'eps': inf}}, 400, 'finite'),
    ('optim_step', step | {'adam_params': {'weight_decay': 1e300}}, 400, 'weight_decay'),
    ('optim_step', step | {'adam_params': {}, 'more': deep}, 400, 'more'),
    ('optim_step', step | {'adam_params': []}, 400, 'adam_params'),
    ('optim_step', step | {'adam_params': {}, 'seq_id': 1 << 70}, 400, 'seq_id'),
    ('optim_step', {'seq_id': 1, 'adam_params': {}}, 400, 'model_id is missing'),
    ('get_info', {'model_id': 'other'}, 404, 'create_training_client_from_state'),
    ('create_model', model | {'base_model': 'other'}, 400, 'there is tiny'),
    ('create_model', model | {'lora_config': {'rank': 99}}, 400, '--adapter_rank'),
    ('create_model', model | {'lora_config': {'rank': 0}}, 400, 'adapter is 0'),
    (
      'create_model',
      model | {'lora_config': {'rank': 1, 'train_mlp': False, 'train_attn': False}},
      400,
      'train_unembed does nothing',
    ),
    ('create_model', model | {'session_id': 'gone'}, 410, 'no session'),
    ('create_model', model | {'optimizer_config': {'type': 'dimuon'}}, 400, 'adamw'),
    ('save_weights', step | {'path': '../x'}, 400, 'letter or digit'),
    ('save_weights_for_sampler', step, 400, 'give path or'),
    ('load_weights', step | {'path': 'x', 'optimizer': False}, 400, 'no path of a state'),
    (
      'load_weights',
      step | {'path': 'tinker://a/weights/..', 'optimizer': False},
      400,
      'no path of a state',
    ),
    (
      'load_weights',
      step | {'path': 'tinker://a/weights/b', 'optimizer': False},
      404,
      'no state',
    ),
    ('retrieve_future', {'request_id': 'other'}, 404, 'no result'),
    ('create_custom_loss', {}, 404, 'not supported'),
  ]:
    # httpx2 refuses NaN, which other clients send.
    answer = asked.post(path, content=json.dumps(fields))
    assert answer.status_code == status, (path, answer.text)
    assert text in answer.json()['error'] and answer.json()['category'] == 'user'
  for more, text in [
    ({'params': {'max_tokens': 500}}, 'room for 1 to 128'),
    ({'prompt': []}, 'the prompt has 0 tokens'),
    ({'prompt': [1, 300]}, 'outside the vocabulary'),
    ({'prompt': [-1]}, 'outside the vocabulary'),
    ({'num_samples': 0}, 'num_samples'),
    ({'topk_prompt_logprobs': 2}, 'topk_prompt_logprobs'),
    ({'topk_sample_logprobs': 21}, 'top_logprobs'),
    ({'prompt': [1], 'prompt_logprobs': True}, 'no log-probs'),
    ({'params': {'stop': [300]}}, 'outside the vocabulary'),
    ({'params': {'stop': ''}}, 'empty'),
    ({'params': {'stop': 'x' * 2000}}, 'bytes'),
    ({'params': {'top_p': 0}}, 'top_p'),
    ({'params': {'top_p': 1e-60}}, 'top_p'),
    ({'params': {'top_k': 1 << 60}}, 'top_k'),
    ({'params': {'temperature': 1e39}}, 'temperature'),
    ({'topk_sample_logprobs': 1 << 60}, 'top_logprobs'),
    ({'num_samples': 1 << 60}, 'num_samples'),
    ({'prompt': [1 << 60]}, 'outside the vocabulary'),
    (
      {'target_prompt_logprobs': {'data': [1 << 70], 'dtype': 'int64', 'shape': [1, 1]}},
      'data[0]',
    ),
    (
      {'target_prompt_logprobs': {'data': [1], 'dtype': 'int64', 'shape': [1 << 70, 1]}},
      'shape[0]',
    ),
    ({'prompt': [1] * 130, 'prompt_logprobs': True}, 'there is room for 1 to 128'),
  ]:
    assert text in sample(asked, base, 99, status=400, **more)['error']
  for data, options, text in [
    ([], {}, 'data is empty'),
    ([([7], {})] * 1025, {}, '1,025 data; send at most 1,024'),
    ([shifted()], {'loss': 'other'}, 'there are cross_entropy'),
    ([shifted()], {'beta': 1.0}, 'no option'),
    ([shifted()], {'loss': 'ppo'}, 'no advantages'),
    ([shifted()], {'loss': 'ppo', 'clip_low_threshold': nan}, 'not finite'),
    ([shifted()], {'loss': 'ppo', 'clip_high_threshold': 0.5}, 'clip_high_threshold'),
    ([shifted(weights=np.full(7, nan))], {}, 'data[0]: weights'),
    ([shifted(weights=np.ones(3))], {}, 'weights has the shape [3]'),
    ([shifted(mask=np.ones(7))], {}, "has 'mask'"),
    ([(TEXT, {})], {}, 'target_tokens is missing'),
    ([(TEXT, {'target_tokens': np.ones(8)})], {}, 'must be token ids'),
    ([(TEXT, {'target_tokens': np.arange(3)})], {}, 'each position has a target'),
    ([([], {'target_tokens': np.arange(0)})], {}, 'no tokens'),
    ([shifted(np.full(300, 4, np.int32))], {}, 'there is room for 63'),
    ([shifted(np.array([4, 300]))], {}, 'outside the vocabulary'),
  ]:
    body = write(run.id, 90, data, **options)
    answer = asked.post('forward_backward', content=body)
    assert answer.status_code == 400 and text in answer.json()['error'], answer.text
  for body in (b'\xff' * 99, b'', b'{}'):
    assert asked.post('forward_backward', content=body).status_code in (400, 404)
  assert asked.post('forward_backward', content=b'x' * (1 << 24)).status_code == 413


def test_keys_and_room(workdir):
  with serve(workdir, clients=1, keys=['tml-a'], max_waiting=0) as asked:
    assert asked.post('create_session', json={}).status_code == 401
    asked.headers['X-API-Key'] = 'tml-a'
    run = Run(asked)
    again = {'session_id': run.session, 'model_seq_id': 7, 'base_model': 'tiny'}
    again['lora_config'] = {'rank': 2}
    assert '--clients' in post(asked, 'create_model', 429, **again)['error']
    base = base_sampler(asked)
    assert 'at most 6' in sample(asked, base, num_samples=7, status=400)['error']
    fields = {'chunks': [{'tokens': TEXT.tolist()}]}
    held = {'sampling_session_id': base, 'seq_id': 1, 'prompt': fields}
    sampling = {'max_tokens': 110, 'stop': []}
    post(asked, 'asample', **held, num_samples=6, sampling_params=sampling)
    assert 'ask again' in sample(asked, base, 2, status=429)['error']
    assert asked.get('healthz').json() == {'status': 'ok'}
    assert asked.post('telemetry', content=b'{}').json() == {'status': 'accepted'}


def test_targets_that_are_not_the_next_token():
  rng = np.random.default_rng(0)
  y = np.ma.masked_array(rng.integers(0, tiny.VOCAB, (len(TEXT), 3)), mask=False)
  y[:-1, 1] = TEXT[1:]
  y[2, 2], y[3, 0] = y[2, 1], np.ma.masked
  data = [
    data_lib.Datum(TEXT, y, {}),
    data_lib.make_datum(TEXT, {'target_tokens': y[:, 1]}),
  ]
  data_lib.check(data, tiny.VOCAB, ROW)
  loss = losses_lib.Losses().find('cross_entropy', {})
  found, plain = finish(learn().score(learn().no_adapter, data, loss)).logprobs
  np.testing.assert_array_equal(plain, found[:, 1])
  for i, k in [(0, 0), (2, 2), (2, 1), (5, 2), (7, 0), (7, 2)]:
    text = np.append(TEXT[: i + 1], y[i, k]).astype(np.int32)
    segment = types.Segment(text, text >= 0, np.zeros(len(text)))
    want = tiny.learned(params(), [segment], shape=TINY)[0][-1]
    np.testing.assert_allclose(found[i, k], want, atol=2e-5)
  assert found[3, 0] == 0
  csr = lambda *indices: data_lib.make_column(
    np.array([5, 6]), (3, 2), 'x', [*map(np.array, indices)]
  )
  sparse = csr([0, 1, 1, 2], [1, 0])
  assert sparse.tolist() == [[None, 5], [None, None], [6, None]]
  for rows, columns in ([0, 1], [1, 0]), ([0, 2, 1, 2], [1, 0]), ([0, 1, 1, 2], [1, 2]):
    with pytest.raises(ValueError, match='no sparse matrix'):
      csr(rows, columns)


def test_targets_that_would_hold_the_device_for_minutes_are_refused():
  y = np.ma.masked_array(np.zeros((7, 100_000), np.int64), mask=False)
  datum = data_lib.Datum(TEXT[:7], y, {})
  with pytest.raises(
    ValueError, match='16,384 are allowed at once: send them in several'
  ):
    data_lib.check([datum], tiny.VOCAB, ROW)
  data_lib.check([datum._replace(targets=y[:, :2340])], tiny.VOCAB, ROW)


def test_others_are_served_between_the_micro_batches_of_a_long_request():
  data = [data_lib.make_datum(TEXT[:7], {'target_tokens': np.ma.array(TEXT[1:])})]
  data *= 160  # Of one text, but cut where the entries of a row are full.
  run, loss = learn().start(SHAPE), losses_lib.Losses().find('cross_entropy', {})
  want = finish(learn().differentiate(run, data, loss))
  gradients = run.gradients
  assert gradients is not None

  async def play():
    worker = work.Worker(600.0)
    compute = lambda: learn().differentiate(run, data, loss)
    long = asyncio.create_task(worker.run('a', compute))
    await asyncio.sleep(0)  # It has begun.
    seen = []
    for _ in range(3):
      await worker.run('b', lambda: seen.append(long.done()))
    assert seen == [False] * 3 and run.gradients is gradients
    result = await long
    np.testing.assert_array_equal(result.logprobs, want.logprobs)
    assert run.gradients is not gradients

    def fails():
      yield
      raise ValueError('in the second step')

    with pytest.raises(ValueError, match='second step'):
      await worker.run('a', fails)

  asyncio.run(play())


def test_sparse_data_that_would_fill_the_memory_are_refused():
  request = messages.make('ForwardBackwardRequest')
  for _ in range(5):
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.zeros(1, '<i4').tobytes()
    sparse = datum.loss_fn_inputs.add(key='target_tokens').value
    sparse.dtype = 2
    sparse.shape.extend([1, 1 << 20])
    sparse.sparse_csr.values = sparse.sparse_csr.col_indices = np.zeros(
      1, '<i8'
    ).tobytes()
    sparse.sparse_csr.crow_indices = np.arange(2).astype('<i8').tobytes()
  with pytest.raises(http.RefusedError, match='4,194,304 targets'):
    messages.read_forward_backward(messages.parse(request.SerializeToString()))
  sparse.shape[1] += 1
  with pytest.raises(http.RefusedError, match='no sparse matrix'):
    messages.read_forward_backward(messages.parse(request.SerializeToString()))


def test_a_gradient_is_the_learners():
  """Of rows without trees, in a table made by hand, and of an adapter of lower rank."""
  run, weights = learn().start(SHAPE), np.array([0, 0, 1, 2, 1, 1, 0.5])
  longer = np.append(TEXT, [4, 5]).astype(np.int32)
  data = [
    data_lib.make_datum(text[:-1], {'target_tokens': np.ma.array(text[1:]), 'weights': w})
    for text, w in ((TEXT, np.ma.array(weights)), (longer, np.ma.ones(len(longer) - 1)))
  ]
  run.state = run.state._replace(params=_disturb(run.state.params))
  loss = losses_lib.Losses().find('cross_entropy', {})
  finish(learn().differentiate(run, data, loss))
  segments = [types.Segment(t, t >= 0, np.zeros(len(t))) for t in (TEXT, longer)]
  tokens = table.from_segments(segments)
  advantages = np.concatenate([[0], weights, [0], np.ones(len(longer) - 1)])
  tokens = dataclasses.replace(
    tokens, advantages=advantages, weights=(advantages > 0).astype(float)
  )
  rows = packing.MicrobatchShape(2, ROW, trees=False)
  batches, _ = packing.pack_microbatches(tokens, rows)

  def plain(stats, batch):
    return losses.weighted(-batch.advantages * stats.logprobs, batch.weights), {}

  want = learner.forward_backward(run.state.params, batches, config=TINY, loss=plain)
  assert run.gradients is not None
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max() + 1e-7),
    run.gradients.learned,
    want.learned,
  )
  sums = run.gradients.sums['loss'], want.sums['loss']
  np.testing.assert_allclose(*sums, rtol=1e-5)
  # What the adapter has not stays zero.
  for leaf in run.gradients.learned['layers']['mlp']['up'].values():
    assert not np.asarray(leaf).any()
  once = np.array(run.gradients.learned['layers']['attn']['q']['lora_b'])
  assert not once[:, 2:].any() and once.any()
  # Two passes add up, and a step uses them up.
  finish(learn().differentiate(run, data, loss))
  again = run.gradients.learned['layers']['attn']['q']['lora_b']
  np.testing.assert_allclose(again, 2 * once, rtol=1e-5)
  learn().optim_step(run, wire.AdamParams().model_dump(exclude={'type'}))
  assert run.gradients is None


def _disturb(tree):
  """Makes B of the first two ranks of the attention unequal 0."""
  adapter = lora.take(tree)
  for leaves in adapter['layers']['attn'].values():
    leaves['lora_b'] = leaves['lora_b'].at[:, :2].set(0.1)
  return lora.join(adapter, params())


def _p(logprobs, old):
  return np.exp(logprobs) - np.exp(old)


@pytest.mark.parametrize(
  ('name', 'options', 'want'),
  [
    ('cross_entropy', {}, lambda r, a, lp, old: -a * lp),
    ('importance_sampling', {}, lambda r, a, lp, old: -r * a),
    (
      'ppo',
      {'clip_low_threshold': 0.9},
      lambda r, a, lp, old: -np.minimum(r * a, np.clip(r, 0.9, 1.2) * a),
    ),
    (
      'cispo',
      {'clip_high_threshold': 1.1},
      lambda r, a, lp, old: -np.clip(r, 0.0, 1.1) * a * lp,
    ),
    ('cispo', {}, lambda r, a, lp, old: -np.clip(r, 0.0, 4.0) * a * lp),
    ('dro', {'beta': 0.5}, lambda r, a, lp, old: -(a * lp - 0.25 * (lp - old) ** 2)),
    (
      'dppo',
      {'delta_low': 0.01},
      lambda r, a, lp, old: (
        -r * a * lp * np.where(a > 0, _p(lp, old) <= 0.2, _p(lp, old) >= -0.01)
      ),
    ),
    ('gspo', {'clip_low_threshold': 0.5, 'clip_high_threshold': 2.0}, None),
  ],
)
def test_each_loss_is_its_formula(name, options, want):
  rng = np.random.default_rng(1)
  lp, old, a = (
    -rng.random((1, 6)) - 0.1,
    -rng.random((1, 6)) - 0.1,
    rng.normal(size=(1, 6)),
  )
  a[0, 0] = old[0, 0] = 0  # A token that was not sampled.
  batch = dict.fromkeys(types.Batch._fields) | {'old_logprobs': old, 'advantages': a}
  batch |= {'weights': np.ones((1, 6)), 'segment_ids': np.ones((1, 6), int)}
  loss = losses_lib.Losses().find(name, options)
  stats = jax.tree.map(jnp.asarray, (losses.TokenStats(lp, lp), types.Batch(**batch)))
  found, _ = loss.surrogate(*stats)
  if want is None:
    ratio = np.exp((lp - old)[:, 1:].mean())
    expected = -np.minimum(ratio * a, np.clip(ratio, 0.5, 2) * a)
  else:
    expected = want(np.exp(lp - old), a, lp, old)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gspo_takes_the_ratio_over_the_masks_tokens():
  """As the cookbook's recipe sends it; a token of log-prob 0 may be one of them."""
  old = np.array([0, 0, 0, -1, 0, -1, -1], np.float32)
  mask = (np.arange(7) >= 3).astype(np.float32)
  columns = {'target_tokens': TEXT[1:], 'logprobs': old, 'advantages': 0.5 * mask}
  columns['advantages'][4] = 0  # Nothing but the mask tells that it was sampled.
  loss = losses_lib.Losses().find('gspo', {'clip_high_threshold': 9.0})

  def compute(**more):
    arrays = {k: np.ma.array(v) for k, v in (columns | more).items()}
    datum = data_lib.make_datum(TEXT[:7], arrays)
    return finish(learn().score(learn().no_adapter, [datum], loss))

  found = compute(sequence_ratio_mask=mask)
  ratio = np.exp((found.logprobs[0] - old)[3:].mean())
  clipped = np.maximum(ratio, 1 - 3e-4)
  want = -np.minimum(ratio, clipped) * columns['advantages']
  np.testing.assert_allclose(found.losses[0], want, rtol=1e-4)
  assert abs(compute().loss - found.loss) > 0.001


def test_who_tries_many_options_takes_none_from_others():
  found = losses_lib.Losses()
  with pytest.raises(http.RefusedError, match='sets of loss options'):
    for n in range(40):
      found.find('dro', {'beta': n / 100})
  assert found.find('cross_entropy', {}) and found.find('ppo', {})


def test_owners_take_turns_and_a_function_that_hangs_ends_the_rest():
  async def play():
    worker = work.Worker(0.2)
    order, hang = [], threading.Event()
    tasks = [
      asyncio.create_task(worker.run(name[0], functools.partial(order.append, name)))
      for name in ('a0', 'a1', 'a2', 'b0')
    ]
    await asyncio.gather(*tasks)
    assert order == ['a0', 'b0', 'a1', 'a2']
    results = work.Results()
    results.begin('fails', b'', lambda: worker.run('a', lambda: 1 / 0))
    assert (await results.wait('fails'))['category'] == 'server'

    def unreachable():
      raise TimeoutError('the disk does not answer')

    results.begin('late', b'', lambda: worker.run('a', unreachable))
    assert 'disk' in (await results.wait('late'))['error'] and not worker.stuck
    assert not worker._owners  # Nothing is left of them.
    results.begin('hangs', b'', lambda: worker.run('a', hang.wait))
    results.begin('waits', b'', lambda: worker.run('b', print))
    for name in ('hangs', 'waits'):
      assert 'taken as lost' in (await results.wait(name))['error']
    with pytest.raises(http.RefusedError, match='taken as lost'):
      worker.check()
    hang.set()

  asyncio.run(play())


def test_too_many_operations_are_refused_but_the_one_that_they_wait_for(monkeypatch):
  monkeypatch.setattr(work, '_MOST_WAITING', 3)

  async def play():
    order, done = work.Order(), []

    async def compute(number):
      done.append(number)

    def begin(number):
      order.check(number)
      return asyncio.create_task(order.run(number, functools.partial(compute, number)))

    tasks = [begin(number) for number in (4, 3, 2)]
    await asyncio.sleep(0)
    with pytest.raises(http.RefusedError, match='3 requests of this model wait already'):
      order.check(5)
    await asyncio.gather(begin(1), *tasks)
    assert done == [1, 2, 3, 4]

  asyncio.run(play())


def test_bytes_that_wait_are_bounded(asked, monkeypatch):
  run = Run(asked)
  first, second = (write(run.id, seq, [shifted()]) for seq in (2, 1))
  monkeypatch.setattr(training, '_MOST_BYTES', len(first))
  future = asked.post('forward_backward', content=first).json()
  answer = asked.post('forward_backward', content=second)
  assert answer.status_code == 429 and 'bytes wait already' in answer.json()['error']
  monkeypatch.undo()
  run.passed([shifted()])
  assert isinstance(wait(asked, future), bytes)


def test_a_refused_number_far_ahead_closes_none_before_it(asked, monkeypatch):
  monkeypatch.setattr(work, '_GAP_SECONDS', 0.05)
  run = Run(asked)
  refused = {'model_id': run.id, 'seq_id': 90, 'adam_params': {'eps': 0}}
  post(asked, 'optim_step', 400, **refused)
  time.sleep(0.2)
  run.passed([shifted()])
  assert 'metrics' in run.step()
