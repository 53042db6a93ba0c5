"""Clients of a server wait for their own work, and for one turn of others'."""

import asyncio
from concurrent import futures
import threading
from typing import Any
from unittest import mock

import httpx2
import numpy as np
import pytest
from starlette import applications, routing
import tiny

from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.grammars import compiler
from agent_r1_jax.serve import request_grammars, requests, sources
from agent_r1_jax.web import fairness, http

_SMALL = {'type': 'integer'}


def _slow(i):
  return {'type': 'string', 'pattern': f'^(a|b)*a(a|b){{18}}c{{{i}}}$'}


async def test_clients_take_turns_and_slow_work_leaves_a_place():
  turns, order, ends = fairness.Turns(2), [], asyncio.Event()

  async def work(client, name, slow=False):
    http.client.set(client)
    async with turns.take(slow=slow):
      order.append(name)
      await ends.wait()

  start = lambda *args: asyncio.create_task(work(*args))
  begun = [start('a', 'slow 1', True), start('a', 'slow 2', True), start('a', 'a1')]
  begun += [start('a', 'a2'), start('a', 'a3'), start('b', 'b1')]
  await asyncio.sleep(0)
  await asyncio.sleep(0)
  assert order == ['slow 1', 'a1']
  begun[3].cancel()  # Who leaves keeps no place.
  ends.set()
  await asyncio.wait(begun)
  assert order == ['slow 1', 'a1', 'b1', 'a3', 'slow 2'] and turns._taken == [0, 0]


def test_who_has_less_than_an_equal_share_gets_more_where_all_is_taken():
  shares = fairness.Shares()
  shares.take('a', 9, 9)
  for owner, count in (('a', 1), ('b', 5)):
    with pytest.raises(http.RefusedError, match='9 replies are under way'):
      shares.take(owner, count, 9)
  shares.take('b', 4, 9)
  assert shares.total == 13
  shares.give('a', 9)
  shares.take('b', 5, 9)


def test_those_who_wait_for_a_row_take_turns():
  engine, ended = tiny.engine(tiny.params(tiny.config()), rows=2), []

  async def ask(client, i):
    tokens = np.array([7, 8, i], np.int32)
    key = request_lib.make_key(client, i)
    request = request_lib.Request(tokens, max_tokens=4, key=key, client=client)
    await engine.submit(request)
    ended.append(client)

  engine.run([*(ask('a', i) for i in range(12)), ask('b', 1), ask('c', 1)])
  assert {'b', 'c'} <= {*ended[:5]}, ended


async def test_a_small_grammar_does_not_wait_for_large_ones_of_another(monkeypatch):
  monkeypatch.setattr(request_grammars, '_MOST_UNDER_WAY', 24)
  grammars = request_grammars.Grammars(tiny.chat(), tiny.VOCAB)

  async def make(client, schema):
    http.client.set(client)
    form = {'type': 'json_schema', 'json_schema': {'schema': schema}}
    body = {'messages': [{'role': 'user', 'content': 'a'}], 'response_format': form}
    return await grammars.make(http.check_fields(requests.ChatRequest, body), True)

  large = [asyncio.create_task(make('a', _slow(i))) for i in range(24)]
  await asyncio.sleep(0)
  await make('b', _SMALL)
  # Each process has refused a large one at most.
  assert sum(task.done() for task in large) <= compiler.PROCESSES
  with pytest.raises(http.RefusedError, match='grammars are being made'):
    await make('a', _slow(24))
  for task in (*large, *grammars._made.values()):
    task.cancel()
  await asyncio.gather(*large, return_exceptions=True)


async def test_a_client_is_its_key_or_else_its_connection():
  async def handle(request):
    http.check_key(request.headers['key'], keys, 'give one')
    return http.answer_json(http.client.get())

  refuse = lambda error: http.answer_json(str(error), error.status)
  app = applications.Starlette(routes=[routing.Route('/', http.guard(handle, refuse))])
  keys, found = [], []
  for known in (['one', 'two'], []):
    keys[:] = known
    for key, port in (('one', 1), ('one', 2), ('two', 2), ('other', 2)):
      transport = httpx2.ASGITransport(app, client=('10.0.0.1', port))
      async with httpx2.AsyncClient(transport=transport, base_url='http://a') as asked:
        found.append((await asked.get('/', headers={'key': key})).json())
  assert found[:3] == ['one', 'one', 'two'] and 'give one' in found[3]
  assert found[5] == found[6] == found[7] != found[4]


def test_event_loops_do_not_wait_for_each_other(monkeypatch):
  """A loop is not woken by another loop's thread."""
  monkeypatch.setattr(http, 'run_in_thread', asyncio.to_thread)
  barrier = threading.Barrier(3)
  source: Any = mock.Mock(slots=8)

  def encode_apart(_):
    work = sources.encode(source, lambda _, max_tokens: barrier.wait(20), 'x' * 20_000)
    return asyncio.run(asyncio.wait_for(work, 20))

  with futures.ThreadPoolExecutor(3) as threads:
    assert sorted(threads.map(encode_apart, range(3))) == [0, 1, 2]
