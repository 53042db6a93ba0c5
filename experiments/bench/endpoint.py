"""Load on the server of serve/server.py, beside the bare engine with the same requests.

  python -m experiments.bench.endpoint --shape=s25 --streams=64

The policy has random weights and the tokenizer of miniwiki. Client processes keep so many
streams going, each of which asks for one reply after the other; the bare engine gets the
same requests from coroutines. Both are measured in turns. A line of JSON for each turn:
tokens a second and CPU-seconds of this process (the engine and the server, without the
clients), and at the end the medians of their ratios with the times of the streams.
"""

import asyncio
import concurrent.futures
import json
import multiprocessing
import pathlib
import re
import statistics
import time

from absl import app, flags
import jax
import numpy as np

from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder
from agent_r1_jax.serve import server
from agent_r1_jax.web import http
from experiments.bench import common

_DIALECT = flags.DEFINE_enum(
  'dialect', 'chat', ['chat', 'messages', 'responses'], 'What the clients speak.'
)
_PATHS = {'chat': 'chat/completions', 'messages': 'messages', 'responses': 'responses'}
_SHAPE = flags.DEFINE_string('shape', 's25', 'A key of common.SHAPES.')
_STREAMS = flags.DEFINE_integer('streams', 64, 'Replies at a time.')
_CLIENTS = flags.DEFINE_integer('clients', 2, 'Client processes.')
_REPLIES = flags.DEFINE_integer('replies', 4, 'Replies of each stream.')
_TOKENS = flags.DEFINE_integer('tokens', 128, 'Tokens of a reply.')
_STEPS = flags.DEFINE_integer('steps', 16, 'Tokens of a decode, and so of an event.')
_REPLICAS = flags.DEFINE_integer('replicas', 1, 'Replicas of the engine.')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Turns of each.')


async def _stream(port: int, path: str, body: dict) -> tuple[float, float, int]:
  """Asks for one reply; returns the seconds to its first and last event, and tokens."""
  began, first = time.perf_counter(), 0.0
  reader, writer = await asyncio.open_connection('127.0.0.1', port)
  content = json.dumps(body).encode()
  head = f'POST /v1/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n'
  writer.write(f'{head}Content-Length: {len(content)}\r\n\r\n'.encode() + content)
  usage = 0
  while line := await reader.readline():
    if line.startswith(b'data: {'):
      if b'delta' in line:
        first = first or time.perf_counter()
      # Of the last event that has one: completion_tokens, or output_tokens.
      found = re.findall(rb'"(?:completion|output)_tokens": (\d+)', line)
      usage = int(found[-1]) if found else usage
  last = time.perf_counter()
  writer.close()
  return first - began, last - began, usage


def _load(
  port: int, path: str, streams: list[list[dict]]
) -> list[tuple[float, float, int]]:
  """Keeps streams going, each a list of requests."""

  async def follow(bodies):
    return [await _stream(port, path, body) for body in bodies]

  async def follow_all():
    return await asyncio.gather(*map(follow, streams))

  return [reply for replies in asyncio.run(follow_all()) for reply in replies]


def _make_bodies() -> list[list[dict]]:
  """The requests of each stream, in every dialect; each reply has a seed of its own."""
  numbers = np.arange(_STREAMS.value * _REPLIES.value).reshape(_STREAMS.value, -1)
  return [
    [
      {
        'messages': (said := [{'role': 'user', 'content': f'{n} ' + 'who is it? ' * 8}]),
        'input': said,
        'max_tokens': _TOKENS.value,
        'max_output_tokens': _TOKENS.value,
        'seed': n,
        'stream': True,
        'stream_options': {'include_usage': True},
      }
      for n in row
    ]
    for row in numbers.tolist()
  ]


async def _ask_engine(engine, chat, bodies) -> int:
  sampled, stop = 0, chat.stop_automaton(engine.config.vocab_size)
  for body in bodies:
    generation = engine.submit(
      request.Request(
        chat.encode_prompt(body['messages']),
        max_tokens=_TOKENS.value,
        key=request.make_key('seed', body['seed'], 0),
        automata=[stop],
      )
    )
    sampled += len((await generation).tokens)
    generation.text.close()
  return sampled


def _measure(fn) -> dict[str, float]:
  cpu, wall = time.process_time(), time.perf_counter()
  tokens = fn()
  wall = time.perf_counter() - wall
  cpu = time.process_time() - cpu
  return {'tokens': tokens, 'tokens_s': tokens / wall, 'cpu_s': cpu}


def main(_):
  runtime.quiet_logging()
  runtime.enable_compilation_cache()
  shape = common.SHAPES[_SHAPE.value]
  model = pathlib.Path(__file__).parents[1] / 'miniwiki' / 'model'
  chat = chat_lib.Chat(tokenizer.load(str(model)))
  params = jax.jit(decoder.init, static_argnums=0)(shape, jax.random.key(0))
  engine = engine_lib.Engine(
    shape,
    params,
    rows=_STREAMS.value,
    slots=256,
    decode_steps=_STEPS.value,
    bucket=256,
    replicas=_REPLICAS.value,
  )
  engine.warm_up(automata=[chat.stop_automaton(shape.vocab_size)])
  running = http.make_server(server.make_app(engine, chat), 5)
  bodies, replies = _make_bodies(), []
  shares = [bodies[i :: _CLIENTS.value] for i in range(_CLIENTS.value)]
  spawn = multiprocessing.get_context('spawn')
  with (
    engine.open(),
    http.listen('127.0.0.1', 0) as listener,
    concurrent.futures.ProcessPoolExecutor(_CLIENTS.value, spawn) as pool,
  ):
    port = listener.getsockname()[1]
    future = engine.start([running.serve([listener])])
    where = [port] * _CLIENTS.value, [_PATHS[_DIALECT.value]] * _CLIENTS.value
    list(pool.map(_load, *where, [[]] * _CLIENTS.value))

    def through_http():
      found = pool.map(_load, *where, shares)
      replies.extend(reply for some in found for reply in some)
      return sum(reply[2] for reply in replies[-_STREAMS.value * _REPLIES.value :])

    def bare():
      asked = [_ask_engine(engine, chat, some) for some in bodies]
      return sum(engine.start(asked).result())

    turns: list[dict[str, dict[str, float]]] = []
    for _ in range(_REPEATS.value):
      turns.append({'bare': _measure(bare), 'endpoint': _measure(through_http)})
      print(json.dumps(turns[-1]), flush=True)
    running.should_exit = True
    future.result()
  ratio = lambda name: [turn['endpoint'][name] / turn['bare'][name] for turn in turns]
  first = [first for first, _, _ in replies]
  each = [(last - first) / max(n - 1, 1) for first, last, n in replies]
  spread = lambda x: [round(1e3 * float(np.quantile(x, q)), 2) for q in (0.5, 0.99)]
  found = {
    'tokens/s beside the bare engine': statistics.median(ratio('tokens_s')),
    'CPU-seconds beside the bare engine': statistics.median(ratio('cpu_s')),
    'ms to first token, p50 and p99': spread(first),
    'ms a further token, p50 and p99': spread(each),
  }
  print(json.dumps({'shape': _SHAPE.value, 'streams': _STREAMS.value} | found))


if __name__ == '__main__':
  app.run(main)
