"""Requests of the Tinker API: their order, their room, and who waits for whom."""

import asyncio
import functools
import itertools
import json
import threading
import time

import numpy as np
import tinker_service as service

from agent_r1_jax.contrib.tinker import data as data_lib
from agent_r1_jax.contrib.tinker import losses as losses_lib
from agent_r1_jax.contrib.tinker import training, work
from agent_r1_jax.web import http


def test_a_run_that_is_being_made_takes_what_comes_after_it(asked, monkeypatch):
  start, go_on = service.learn().start, threading.Event()
  monkeypatch.setattr(
    service.learn(), 'start', lambda shape: go_on.wait(60) and start(shape)
  )
  for _ in range(8):
    go_on.clear()
    session = service.post(asked, 'create_session')['session_id']
    where = {'session_id': session, 'model_seq_id': 0, 'base_model': 'tiny'}
    made = service.post(asked, 'create_model', **where, lora_config={'rank': 2})
    body = service.write(made['model_id'], 1, [service.shifted()], forward_only=True)
    passed = asked.post('forward_backward', content=body).json()
    go_on.set()
    assert isinstance(service.wait(asked, passed), bytes)
    asked.post(f'sessions/{session}/finish', json={})


def test_an_operation_that_arrives_twice_is_done_once(asked):
  run = service.Run(asked)
  run.passed([service.shifted()])
  fields = {'model_id': run.id, 'seq_id': 2, 'adam_params': {}}
  first, second = (service.post(asked, 'optim_step', **fields) for _ in range(2))
  assert first == second and 'metrics' in service.wait(asked, second)
  # It was refused, so that its number may come again; an older one may not.
  service.post(
    asked, 'optim_step', 400, **fields | {'seq_id': 9, 'adam_params': {'eps': 0}}
  )
  text = service.post(asked, 'optim_step', 400, **fields | {'seq_id': 0})['error']
  assert 'answered already' in text
  other = {'adam_params': {'learning_rate': 0.5}}
  assert (
    'another request' in service.post(asked, 'optim_step', 409, **fields | other)['error']
  )
  named = {'model_id': run.id, 'seq_id': 2, 'path': 'a'}
  assert 'another request' in service.post(asked, 'save_weights', 409, **named)['error']
  where = {'session_id': run.session, 'model_seq_id': 0, 'base_model': 'tiny'}
  service.post(asked, 'create_model', 409, **where, lora_config={'rank': 1})


def test_operations_are_done_in_the_order_of_their_numbers(asked, monkeypatch):
  want, run = service.Run(asked), service.Run(asked)
  data = [service.shifted(service.TEXT[:n]) for n in (8, 7, 6)]
  for datum in data:
    want.passed([datum])
  want.step()
  want, _ = want.passed(data, forward_only=True)
  fields = {'model_id': run.id, 'adam_params': {'learning_rate': 0.01}}
  futures = [service.post(asked, 'optim_step', seq_id=4, **fields)]
  for seq in (2, 3, 1):
    body = service.write(run.id, seq, [data[seq - 1]])
    futures.append(asked.post('forward_backward', content=body).json())
  for future in futures:
    result = service.wait(asked, future)
    assert isinstance(result, bytes) or 'metrics' in result, result
  run.seq = itertools.count(5)
  np.testing.assert_array_equal(run.passed(data, forward_only=True)[0], want)
  # What is refused keeps nobody waiting, and its number may come again.
  for _ in range(2):
    for path, content in (
      ('optim_step', json.dumps(fields | {'seq_id': 6, 'adam_params': {'eps': 0}})),
      ('forward_backward', service.write(run.id, 7, [service.shifted()], loss='other')),
      (
        'forward_backward',
        service.write(run.id, 8, [service.shifted(np.array([4, 300]))]),
      ),
    ):
      assert asked.post(path, content=content).status_code == 400
  future = service.post(asked, 'optim_step', seq_id=9, **fields)
  assert 'no gradient' in service.wait(asked, future)['error']
  body = service.write(run.id, 8, [service.shifted()])
  assert isinstance(
    service.wait(asked, asked.post('forward_backward', content=body).json()), bytes
  )
  # What never comes is waited for once.
  monkeypatch.setattr(work, '_GAP_SECONDS', 0.05)
  future = service.post(asked, 'optim_step', seq_id=12, **fields)
  assert 'seq_id 10 did not come' in service.wait(asked, future)['error']
  assert 'metrics' in service.wait(
    asked, service.post(asked, 'optim_step', seq_id=13, **fields)
  )


def test_keys_and_room(workdir):
  with service.serve(workdir, clients=1, keys=['tml-a'], max_waiting=0) as asked:
    assert asked.post('create_session', json={}).status_code == 401
    asked.headers['X-API-Key'] = 'tml-a'
    run = service.Run(asked)
    again = {'session_id': run.session, 'model_seq_id': 7, 'base_model': 'tiny'}
    again['lora_config'] = {'rank': 2}
    assert '--clients' in service.post(asked, 'create_model', 429, **again)['error']
    base = service.base_sampler(asked)
    assert 'at most 6' in service.sample(asked, base, num_samples=7, status=400)['error']
    fields = {'chunks': [{'tokens': service.TEXT.tolist()}]}
    held = {'sampling_session_id': base, 'seq_id': 1, 'prompt': fields}
    sampling = {'max_tokens': 110, 'stop': []}
    service.post(asked, 'asample', **held, num_samples=6, sampling_params=sampling)
    assert 'ask again' in service.sample(asked, base, 2, status=429)['error']
    assert asked.get('healthz').json() == {'status': 'ok'}
    assert asked.post('telemetry', content=b'{}').json() == {'status': 'accepted'}


def test_others_are_served_between_the_micro_batches_of_a_long_request(refused):
  data = [
    data_lib.make_datum(
      service.TEXT[:7], {'target_tokens': np.ma.array(service.TEXT[1:])}
    )
  ]
  data *= 160  # Of one text, but cut where the entries of a row are full.
  run, loss = (
    service.learn().start(service.SHAPE),
    losses_lib.Losses().find('cross_entropy', {}),
  )
  want = service.finish(service.learn().differentiate(run, data, loss))
  gradients = run.gradients
  assert gradients is not None

  async def play():
    worker = work.Worker(600.0)
    compute = lambda: service.learn().differentiate(run, data, loss)
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

    with refused('second step'):
      await worker.run('a', fails)

  asyncio.run(play())


def test_owners_take_turns_and_a_function_that_hangs_ends_the_rest(refused):
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
    with refused('taken as lost', http.RefusedError):
      worker.check()
    hang.set()

  asyncio.run(play())


def test_too_many_operations_are_refused_but_the_one_that_they_wait_for(
  refused, monkeypatch
):
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
    with refused('3 requests of this', http.RefusedError):
      order.check(5)
    await asyncio.gather(begin(1), *tasks)
    assert done == [1, 2, 3, 4]

  asyncio.run(play())


def test_bytes_that_wait_are_bounded(asked, monkeypatch):
  run = service.Run(asked)
  first, second = (service.write(run.id, seq, [service.shifted()]) for seq in (2, 1))
  monkeypatch.setattr(training, '_MOST_BYTES', len(first))
  future = asked.post('forward_backward', content=first).json()
  answer = asked.post('forward_backward', content=second)
  assert answer.status_code == 429 and 'bytes wait already' in answer.json()['error']
  monkeypatch.undo()
  run.passed([service.shifted()])
  assert isinstance(service.wait(asked, future), bytes)


def test_a_refused_number_far_ahead_closes_none_before_it(asked, monkeypatch):
  monkeypatch.setattr(work, '_GAP_SECONDS', 0.05)
  run = service.Run(asked)
  refused = {'model_id': run.id, 'seq_id': 90, 'adam_params': {'eps': 0}}
  service.post(asked, 'optim_step', 400, **refused)
  time.sleep(0.2)
  run.passed([service.shifted()])
  assert 'metrics' in run.step()
