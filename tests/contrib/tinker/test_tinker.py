"""The server of the Tinker API, asked by HTTP; test_with_tinker.py has its client."""

import collections
from concurrent import futures
import itertools
import json
import resource

import numpy as np
import pytest
import tinker_service as service
import tiny

from agent_r1_jax import types
from agent_r1_jax.contrib.tinker import states
from agent_r1_jax.rl import learner
from agent_r1_jax.web import http


def test_a_run_is_trained_and_samples_what_forward_computes(asked):
  run, weights = service.Run(asked), np.array([0, 0, 0, 1, 1, 1, 1], np.float32)
  datum = service.shifted(weights=weights)
  logprobs, metrics = run.passed([datum], forward_only=True)
  segment = types.Segment(service.TEXT, service.TEXT >= 0, np.zeros(len(service.TEXT)))
  want = tiny.learned(service.params(), [segment], shape=service.TINY)[0][1:]
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
  ((tokens, scores),), prompt = service.sample(asked, sampler, prompt_logprobs=True)
  text = np.append(service.TEXT, tokens).astype(np.int32)
  again, _ = run.passed([service.shifted(text)], forward_only=True)
  np.testing.assert_allclose(again[len(service.TEXT) - 1 :], scores, atol=2e-5)
  np.testing.assert_allclose(again[: len(service.TEXT) - 1], prompt[1:], atol=2e-5)
  assert np.isnan(prompt[0])


def test_each_client_has_an_adapter_of_its_own_and_more_than_the_engine_holds(asked):
  base, runs = (
    service.base_sampler(asked),
    [service.Run(asked, seed=seed) for seed in (5, 5, 6)],
  )
  samplers = []
  for run, rate in zip(runs, (0.01, 0.3, 0.3)):
    run.passed([service.shifted()])
    run.step(learning_rate=rate)
    samplers.append(run.sampler())
  greedy = {'temperature': 0.0, 'stop': []}
  told = lambda name, seq: [
    np.append(*reply) for reply in service.sample(asked, name, seq, params=greedy)[0]
  ]
  first = [told(name, 0) for name in (base, *samplers)]
  for other in first[1:]:  # The engine has room for two adapters.
    assert not np.array_equal(first[0], other)
  second = [told(name, 1) for name in (base, *samplers)]
  np.testing.assert_array_equal(first, second)
  asked.post(f'sessions/{runs[0].session}/finish', json={})
  assert (
    'there is no training run'
    in service.post(asked, 'get_info', 404, model_id=runs[0].id)['error']
  )
  service.post(asked, 'session_heartbeat', 410, session_id=runs[0].session)


def test_more_samplers_than_the_engine_holds_answer_in_turn(workdir):
  """Of each several requests at once, so that none is ever without one."""
  with service.serve(workdir, clients=32, seconds=60.0) as asked:
    base, samplers = service.base_sampler(asked), []
    for seed in range(3):
      run = service.Run(asked, seed=seed)
      run.passed([service.shifted()])
      run.step(learning_rate=0.3)
      samplers.append(run.sampler())

    def play(name, first):
      return [service.sample(asked, name, first + i)[0][0][0] for i in range(4)]

    with futures.ThreadPoolExecutor(9) as pool:
      played = [
        (name, pool.submit(play, name, 10 * n)) for n in range(3) for name in samplers
      ]
      replies = collections.defaultdict(set)
      for name, future in played:
        for tokens in future.result(120):
          replies[name].add(tuple(tokens))
    assert [len(replies[name]) for name in samplers] == [1, 1, 1]
    assert service.sample(asked, base)


def test_samples(asked):
  base = service.base_sampler(asked)
  three, _ = service.sample(asked, base, 0, num_samples=3)
  assert [t for t, _ in three] == [
    t for t, _ in service.sample(asked, base, 1, num_samples=3)[0]
  ]
  assert len({tuple(tokens) for tokens, _ in three}) == 3
  cut = three[0][0][2]
  ((tokens, _),), _ = service.sample(asked, base, 2, params={'stop': [cut]})
  assert tokens == three[0][0][: three[0][0].index(cut) + 1]
  # A string that is complete in the middle of a reply, across two tokens.
  pieces = [tiny.chat().get_bytes(token) for token in three[0][0]]
  pairs = [a + b for a, b in itertools.pairwise(pieces[:-1]) if (a + b).isascii()]
  ((tokens, _),), _ = service.sample(asked, base, 3, params={'stop': pairs[0].decode()})
  assert tokens == three[0][0][: len(tokens)] and len(tokens) < 6
  assert b''.join(pieces[: len(tokens)]).endswith(pairs[0])
  # The same request is not sampled again.
  again = service.sample(asked, base, 3, params={'stop': pairs[0].decode()})[0]
  assert again[0][0] == tokens
  assert 'another request' in service.sample(asked, base, 3, status=409)['error']
  _, part = service.sample(asked, base, 4, prompt_logprobs=True, prompt_logprobs_last_n=2)
  assert np.isnan(part).tolist() == [True] * 6 + [False] * 2


def test_a_state_ends_at_its_time_and_what_is_replaced_leaves_the_disk(asked, workdir):
  run = service.Run(asked)
  saved = states.States(workdir, 'tiny', service.TINY)
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
  run = service.Run(asked)
  for name in 'ab':
    assert 'path' in run.post('save_weights', path=name)
  assert 'the run has 2 states' in run.post('save_weights', path='c')['error']


def test_a_state_goes_on_bit_for_bit(asked, workdir):
  run = service.Run(asked, train_mlp=False)
  for _ in range(2):
    run.passed([service.shifted()])
    run.step()
  path = run.post('save_weights', path='two')['path']
  assert path == f'tinker://{run.id}/weights/two'
  assert 'exists already' in run.post('save_weights', path='two')['error']
  assert run.post('save_weights', path='two', overwrite=True)['path'] == path

  def go_on(run):
    run.passed([service.shifted()])
    run.step()
    return run.passed([service.shifted()], forward_only=True)[0]

  want = go_on(run)
  np.testing.assert_array_equal(go_on(service.Run(asked, path, optimizer=True)), want)
  assert not np.array_equal(go_on(service.Run(asked, path, optimizer=False)), want)
  assert run.post('load_weights', path=path, optimizer=True)['path'] == path
  np.testing.assert_array_equal(go_on(run), want)
  # Another server on the same workdir, after this one was killed while it saved.
  saved = states.States(workdir, 'tiny', service.TINY)
  half = workdir / 'states' / run.id / '.data' / 'half'
  half.mkdir()
  half.with_name('half.link').symlink_to('../.data/half')
  saved = states.States(workdir, 'tiny', service.TINY)
  assert not half.exists() and len([*half.parent.iterdir()]) == 1
  shape, adapter, moments = saved.load(path, optimizer=True)
  assert shape == service.SHAPE and moments['count'] == 2
  assert {*adapter['layers']} == {'attn'}
  info = service.post(asked, 'weights_info', tinker_path=path)
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


def test_an_adapter_that_is_not_finite_is_neither_saved_nor_sampled_nor_loaded(
  refused, asked
):
  run = service.Run(asked)
  run.passed([service.shifted()])
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
  adapter, moments = service.learn().no_adapter, {'count': 1}
  moments |= {name: service.learn().trim(adapter, service.SHAPE) for name in ('mu', 'nu')}
  moments['nu']['layers']['attn']['q']['lora_a'][:] = np.nan
  with refused('lora_a', FloatingPointError):
    service.learn().resume(service.SHAPE, {'layers': {}}, moments)


def test_a_full_disk_is_said(workdir):
  saved = states.States(workdir, 'tiny', service.TINY)
  run = service.learn().start(service.SHAPE)
  adapter = service.learn().trim(service.learn().get_adapter(run), service.SHAPE)
  path = 'tinker://full/weights/a'
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    with pytest.raises(OSError, match='the disk is full.*Make room'):
      saved.save(path, service.SHAPE, adapter, service.learn().get_moments(run), {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_sampling_session_that_begins_again_has_the_new_weights(asked):
  run = service.Run(asked)
  greedy = {'temperature': 0.0, 'stop': []}

  def told(name, seq):
    return np.append(*service.sample(asked, name, seq, params=greedy)[0][0])

  first = told(run.sampler(), 0)
  run.passed([service.shifted()])
  run.step(learning_rate=0.3)
  second = told(run.sampler(), 1)
  np.testing.assert_array_equal(second, told(run.sampler(2), 0))
  assert not np.array_equal(first, second)


def test_an_error_says_what_is_wrong(asked, refused):
  run, base = service.Run(asked), service.base_sampler(asked)
  step = {'model_id': run.id, 'seq_id': 90}
  adam = lambda **fields: step | {'adam_params': fields}
  model = {'session_id': run.session, 'model_seq_id': 1, 'base_model': 'tiny'}
  model['lora_config'] = {'rank': 2}
  neither = {'rank': 1, 'train_mlp': False, 'train_attn': False}
  load = lambda path: step | {'path': path, 'optimizer': False}
  deep = json.loads('[' * 60 + ']' * 60)
  nan, inf = float('nan'), 1e999
  for path, fields, named in [
    ('optim_step', adam(learning_rate=-1), 'learning_rate'),
    ('optim_step', adam(beta1=nan), 'beta1'),
    ('optim_step', adam(eps=inf), 'eps'),
    ('optim_step', adam(weight_decay=1e300), 'weight_decay'),
    ('optim_step', adam() | {'more': deep}, 'more'),
    ('optim_step', adam() | {'adam_params': []}, 'adam_params'),
    ('optim_step', adam() | {'seq_id': 1 << 70}, 'seq_id'),
    ('optim_step', {'seq_id': 1, 'adam_params': {}}, 'model_id'),
    ('get_info', {'model_id': 'other'}, 'create_training_client_from_state'),
    ('create_model', model | {'base_model': 'other'}, 'tiny'),
    ('create_model', model | {'lora_config': {'rank': 99}}, '--adapter_rank'),
    ('create_model', model | {'lora_config': {'rank': 0}}, 'rank'),
    ('create_model', model | {'lora_config': neither}, 'train_unembed'),
    ('create_model', model | {'session_id': 'gone'}, 'session'),
    ('create_model', model | {'optimizer_config': {'type': 'dimuon'}}, 'adamw'),
    ('save_weights', step | {'path': '../x'}, '../x'),
    ('save_weights_for_sampler', step, 'path'),
    ('load_weights', load('x'), 'x'),
    ('load_weights', load('tinker://a/weights/..'), 'tinker://a/weights/..'),
    ('load_weights', load('tinker://a/weights/b'), 'tinker://a/weights/b'),
    ('retrieve_future', {'request_id': 'other'}, 'other'),
    ('create_custom_loss', {}, 'create_custom_loss'),
  ]:
    # httpx2 refuses NaN, which other clients send.
    answer = asked.post(path, content=json.dumps(fields))
    error = answer.json()
    assert named in error['error'] and error['category'] == 'user'
    refused.check(f'{path} {answer.status_code}: {error["error"]}')
  wide = {'data': [1], 'dtype': 'int64', 'shape': [1, 1]}
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
    ({'target_prompt_logprobs': wide | {'data': [1 << 70]}}, 'data[0]'),
    ({'target_prompt_logprobs': wide | {'shape': [1 << 70, 1]}}, 'shape[0]'),
    ({'prompt': [1] * 130, 'prompt_logprobs': True}, 'there is room for 1 to 128'),
  ]:
    assert text in service.sample(asked, base, 99, status=400, **more)['error']
  datum = service.shifted()
  for data, options, text in [
    ([], {}, 'data is empty'),
    ([([7], {})] * 1025, {}, '1,025 data; send at most 1,024'),
    ([datum], {'loss': 'other'}, 'there are cross_entropy'),
    ([datum], {'beta': 1.0}, 'no option'),
    ([datum], {'loss': 'ppo'}, 'no advantages'),
    ([datum], {'loss': 'ppo', 'clip_low_threshold': nan}, 'not finite'),
    ([datum], {'loss': 'ppo', 'clip_high_threshold': 0.5}, 'clip_high_threshold'),
    ([service.shifted(weights=np.full(7, nan))], {}, 'data[0]: weights'),
    ([service.shifted(weights=np.ones(3))], {}, 'weights has the shape [3]'),
    ([service.shifted(mask=np.ones(7))], {}, "has 'mask'"),
    ([(service.TEXT, {})], {}, 'target_tokens is missing'),
    ([(service.TEXT, {'target_tokens': np.ones(8)})], {}, 'must be token ids'),
    ([(service.TEXT, {'target_tokens': np.arange(3)})], {}, 'each position has a target'),
    ([([], {'target_tokens': np.arange(0)})], {}, 'no tokens'),
    ([service.shifted(np.full(300, 4, np.int32))], {}, 'there is room for 63'),
    ([service.shifted(np.array([4, 300]))], {}, 'outside the vocabulary'),
  ]:
    body = service.write(run.id, 90, data, **options)
    answer = asked.post('forward_backward', content=body)
    assert answer.status_code == 400 and text in answer.json()['error'], answer.text
  for body in (b'\xff' * 99, b'', b'{}'):
    assert asked.post('forward_backward', content=body).status_code in (400, 404)
  assert asked.post('forward_backward', content=b'x' * (1 << 24)).status_code == 413
