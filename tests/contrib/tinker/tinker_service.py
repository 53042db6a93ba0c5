"""A server of the Tinker API on a tiny model, and what a client asks of it."""

import contextlib
import functools
import itertools

import httpx2
import numpy as np
import serving
import tiny

from agent_r1_jax.contrib.tinker import (
  learning,
  messages,
  sampling,
  server,
  states,
  training,
  work,
)
from agent_r1_jax.rl import packing

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
