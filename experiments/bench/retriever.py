"""Load on a retrieval server: queries a second, their times, and what is refused.

  python -m experiments.bench.retriever

A million random vectors are indexed, once, in WORKDIR. The server runs in a process on
two cores. Client processes send single queries, each of which is new, at random times
that do not depend on the answers (a Poisson process); a time counts from when the query
was due. Queries are passages with noise, whose vectors are made from their text without
a model. With --encoder=DIR a model encodes each query too, for the time that it takes.

A line of JSON for each rate: offered and answered queries a second, the median and the
99th percentile of milliseconds, searches that failed for the client, how often the server
answered 503, the share of queries whose own passage came first, and the machine's load.
"""

import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from absl import app, flags
import numpy as np

from agent_r1_jax.host import runtime
from agent_r1_jax.retrieval import client, dense, encoder, server
from agent_r1_jax.retrieval.documents import Document

_WORKDIR = flags.DEFINE_string('workdir', 'runs/bench_retriever', 'Where the index is.')
_PASSAGES = flags.DEFINE_integer('passages', 1_000_000, 'Vectors of the index.')
_DIM = flags.DEFINE_integer('dim', 384, 'Numbers in a vector.')
_FACTORY = flags.DEFINE_string('factory', 'IVF1024,SQ8', 'FAISS factory.')
_PARAMETERS = flags.DEFINE_string('parameters', 'nprobe=16', 'FAISS parameters.')
_RATES = flags.DEFINE_list('rates', ['200', '400'], 'Queries a second that are sent.')
_SECONDS = flags.DEFINE_float('seconds', 30.0, 'Seconds for each rate.')
_CLIENTS = flags.DEFINE_integer('clients', 4, 'Client processes.')
_WAITING = flags.DEFINE_integer('waiting', 256, 'The most queries that wait.')
_CORES = flags.DEFINE_list('cores', ['0', '1'], "The server's cores.")
_ENCODER = flags.DEFINE_string('encoder', '', 'Model that encodes the queries too.')
_SERVE = flags.DEFINE_bool('serve', False, 'Be the server.')
_K = 5


def encode(texts):
  """Vectors from 'Passage <number>', and from 'Query <number> <seed>' near them."""
  made = np.empty((len(texts), _DIM.value), np.float32)
  for i, text in enumerate(texts):
    number, *seed = map(int, re.findall(r'\d+', text.partition('\n')[0]))
    made[i] = np.random.default_rng(number).standard_normal(_DIM.value, np.float32)
    if seed:
      noise = np.random.default_rng([number, *seed])
      made[i] += 0.7 * noise.standard_normal(_DIM.value, np.float32)
  return made / np.linalg.norm(made, axis=1, keepdims=True)


def build(directory):
  filler = 'of which this is the text, as long as a short one of an encyclopedia. ' * 4
  passages = [
    Document(str(i), f'Passage {i}', f'Passage {i}, {filler}')
    for i in range(_PASSAGES.value)
  ]
  dense.Dense(
    passages, encode, factory=_FACTORY.value, parameters=_PARAMETERS.value
  ).save(directory)


def serve(directory):
  model = encoder.Encoder(_ENCODER.value, max_tokens=32) if _ENCODER.value else None

  def encode_query(texts):
    if model:
      model.encode_queries(texts)
    return encode(texts)

  index = dense.Dense.load(directory, encode_query)
  for count in (1, 2, 4, 8, 16, 32, 64):
    index.search(['Query 1 1'] * count, _K)
  limits = {'max_waiting': _WAITING.value, 'timeout': 5.0}
  server.serve(server.make_app(index, **limits), port=0)


def send(url, rate, seconds, passages, cores, seed):
  """Sends queries from a process of its own, on these cores.

  Returns:
    For each query the seconds until its answer, None for a failure, and whether its
    passage came first; and the seconds until the last answer.
  """
  os.sched_setaffinity(0, cores)
  rng = np.random.default_rng(seed)
  due = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
  numbers = rng.integers(passages, size=len(due))
  with client.Remote(url, timeout=2.0, deadline=2.0) as remote:
    start = time.monotonic() + 0.5

    def ask(i):
      try:
        (hits,) = remote.search([f'Query {numbers[i]} {seed}'], _K)
      except client.RemoteError:
        return None, False
      found = bool(hits) and hits[0].document.id == str(numbers[i])
      return time.monotonic() - start - due[i], found

    with concurrent.futures.ThreadPoolExecutor(256) as pool:
      waiting = []
      for i in range(len(due)):
        time.sleep(max(0.0, start + due[i] - time.monotonic()))
        waiting.append(pool.submit(ask, i))
      answers = [answer.result() for answer in waiting]
    return answers, time.monotonic() - start


def measure(url, rate, seconds, pool):
  """Offers one rate; returns its line."""
  before = refused(url)
  # The server's cores are its own, if there are others.
  cores = os.sched_getaffinity(0)
  cores = cores - set(map(int, _CORES.value)) or cores
  jobs = [
    pool.submit(
      send,
      url,
      rate / _CLIENTS.value,
      seconds,
      _PASSAGES.value,
      cores,
      seed=1000 * rate + i,
    )
    for i in range(_CLIENTS.value)
  ]
  parts = [job.result() for job in jobs]
  answers = [answer for part, _ in parts for answer in part]
  times = [1e3 * seconds for seconds, _ in answers if seconds is not None]
  p50, p99 = np.percentile(times, [50, 99]) if times else (np.nan, np.nan)
  line = {
    'offered': rate,
    'answered': len(times) / max(seconds for _, seconds in parts),
    'p50_ms': p50,
    'p99_ms': p99,
    'failed': len(answers) - len(times),
    'refused_503': refused(url) - before,
    'found': float(np.mean([found for _, found in answers])),
    'load': os.getloadavg()[0],
  }
  return json.dumps({name: round(float(x), 3) for name, x in line.items()})


def refused(url):
  import httpx2

  text = httpx2.get(f'{url}/metrics', timeout=10).text
  found = re.search(r'answers_total\{status="503"\} ([\d.]+)', text)
  return float(found[1]) if found else 0.0


def main(_):
  runtime.quiet_logging()
  directory = pathlib.Path(_WORKDIR.value)
  if _SERVE.value:
    serve(directory)
    return
  if not (directory / 'probe.npy').exists():
    start = time.monotonic()
    build(directory)
    print(f'{_PASSAGES.value} vectors indexed in {time.monotonic() - start:.0f} s')
  command = ['taskset', '-c', ','.join(_CORES.value), sys.executable]
  command += ['-m', 'experiments.bench.retriever', '--serve', *sys.argv[1:]]
  # One core searches, and the other one speaks HTTP.
  environ = os.environ | {'OMP_NUM_THREADS': '1'}
  with (
    subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process,
    concurrent.futures.ProcessPoolExecutor(
      _CLIENTS.value, multiprocessing.get_context('spawn')
    ) as pool,
  ):
    try:
      assert process.stdout
      url = process.stdout.readline().strip()
      measure(url, 50, 3.0, pool)  # Until all processes have started.
      for rate in _RATES.value:
        print(measure(url, int(rate), _SECONDS.value, pool), flush=True)
    finally:
      process.send_signal(signal.SIGTERM)


if __name__ == '__main__':
  app.run(main)
