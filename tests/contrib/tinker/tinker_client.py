"""What test_with_tinker.py runs where the client of the Tinker API is installed.

It prints a line of JSON. The process ends with the status 99 if it connects, or looks up
a name, anywhere but on this machine.
"""

import asyncio
import json
import os
import sys
import warnings


def guard(event, args):
  if event == 'socket.connect':
    address = args[1]
  elif event == 'socket.getaddrinfo':
    address = args
  else:
    return
  if isinstance(address, tuple) and address[0] not in ('127.0.0.1', 'localhost'):
    print('it connects to', address, file=sys.stderr, flush=True)
    os._exit(99)


sys.addaudithook(guard)
warnings.simplefilter('ignore')

import numpy as np  # noqa: E402
import tinker  # noqa: E402

TEXT = [7, 8, 9, 7, 8, 10, 11, 7]
WEIGHTS = np.array([0, 0, 0, 1, 1, 1, 1], np.float32)
PROMPT = tinker.ModelInput.from_ints(TEXT)
PARAMS = tinker.SamplingParams(max_tokens=6, seed=3)


def make(text, **inputs):
  inputs = {'target_tokens': np.array(text[1:]), **inputs}
  chunk = tinker.ModelInput.from_ints(text[:-1])
  return tinker.Datum(model_input=chunk, loss_fn_inputs=inputs)


DATUM = make(TEXT, weights=WEIGHTS)


def train(client):
  passed = client.forward_backward([DATUM], 'cross_entropy')
  stepped = client.optim_step(tinker.AdamParams(learning_rate=0.01))
  passed.result(), stepped.result()


def score(client, datum=DATUM):
  (output,) = client.forward([datum], 'cross_entropy').result().loss_fn_outputs
  return output['logprobs'].tolist()


def check_samples(service, client):
  """Returns how far log-probs of samples and prompts are from those of forward."""
  sampler = client.save_weights_and_get_sampling_client().result()
  got = sampler.sample(
    PROMPT, 2, PARAMS, include_prompt_logprobs=True, topk_sample_logprobs=2
  ).result()
  worst = 0.0
  for reply in got.sequences:
    said = got.prompt_logprobs[1:] + reply.logprobs
    found = score(client, make(TEXT + reply.tokens))
    worst = max(worst, np.abs(np.array(found) - said).max())
  first, second = (reply.tokens for reply in got.sequences)
  assert first != second and got.prompt_logprobs[0] is None
  assert len(got.sequences[0].topk_logprobs[0]) == 2
  again = sampler.sample(PROMPT, 2, PARAMS).result().sequences
  assert [reply.tokens for reply in again] == [first, second]
  stops = tinker.SamplingParams(max_tokens=6, seed=3, stop=[first[1]])
  (cut,) = sampler.sample(PROMPT, 1, stops).result().sequences
  assert (cut.tokens, cut.stop_reason) == (first[:2], 'stop')
  logprobs = sampler.compute_logprobs(PROMPT).result()
  np.testing.assert_allclose(logprobs[1:], got.prompt_logprobs[1:], atol=2e-5)

  path = client.save_weights_for_sampler('named').result().path
  loaded = service.create_sampling_client(model_path=path).result()
  target = tinker.TensorData.from_numpy(np.array([[token, 5] for token in TEXT[1:]]))
  reply = loaded.sample(PROMPT, 1, PARAMS, target_prompt_logprobs=target).result()
  assert reply.sequences[0].tokens == first
  scored = reply.target_prompt_logprobs.to_numpy()[:, 0]
  np.testing.assert_allclose(scored, got.prompt_logprobs[1:], atol=2e-5)

  async def many():
    return await asyncio.gather(*(sampler.sample(PROMPT, 1, PARAMS) for _ in range(8)))

  for reply in asyncio.run(many()):
    assert reply.sequences[0].tokens == first
  return worst


def check_losses(client):
  """The value of each loss is the sum of its tokens'; a custom one takes two passes."""
  old = np.where(WEIGHTS > 0, -1.0, 0.0).astype(np.float32)
  datum = make(TEXT, logprobs=old, advantages=WEIGHTS * 0.5)
  for name, config in (
    ('importance_sampling', None),
    ('ppo', {'clip_low_threshold': 0.9}),
    ('cispo', None),
    ('dro', {'beta': 0.1}),
    ('gspo', None),
    ('dppo', None),
  ):
    passed = client.forward([datum], name, config).result()
    each = passed.loss_fn_outputs[0]['elementwise_loss'].to_numpy()
    assert abs(passed.metrics['loss:sum'] - each.sum()) < 1e-4, name
    if name == 'importance_sampling':
      ratio = np.exp(passed.loss_fn_outputs[0]['logprobs'].to_numpy() - old)
      np.testing.assert_allclose(each, -ratio * WEIGHTS * 0.5, rtol=1e-4)
  client.forward_backward([datum], 'ppo').result()
  client.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
  # The client does this with PyTorch. The loss is the sum of w (log π + 1)².
  gradient = 2 * WEIGHTS * (np.array(score(client)) + 1)
  linear = make(TEXT, weights=-gradient.astype(np.float32))
  client.forward_backward([linear], 'cross_entropy').result()
  metrics = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics
  assert metrics['grad_norm:mean'] > 0
  # More data than the client sends in one part.
  data = [make(TEXT[: 3 + i % 5]) for i in range(1500)]
  outputs = client.forward(data, 'cross_entropy').result().loss_fn_outputs
  assert [o['logprobs'].shape[0] for o in outputs] == [2 + i % 5 for i in range(1500)]


def check_errors(service, client):
  """They arrive at once, with their text, and the client goes on after them."""

  def fails(kind, text, call):
    try:
      call().result()
    except kind as error:
      assert text in str(error), error
    else:
      raise AssertionError(f'no error: {text}')

  bad, forward = tinker.BadRequestError, client.forward
  create = service.create_lora_training_client
  fails(bad, 'there are cross_entropy', lambda: forward([DATUM], 'other'))
  fails(bad, 'room for', lambda: forward([make([7] * 200)], 'cross_entropy'))
  fails(bad, '--adapter_rank', lambda: create('tiny', rank=99))
  fails(bad, 'there is tiny', lambda: create('other'))
  step = lambda: client.optim_step(tinker.AdamParams())
  fails(tinker.RequestFailedError, 'no gradient', step)
  gone = 'tinker://gone/weights/a'
  sampler = lambda: service.create_sampling_client(model_path=gone)
  fails(tinker.NotFoundError, 'no state', sampler)


def before(service, url):
  rest = tinker.RestClient(base_url=url, api_key='tml-a')
  (model,) = rest.get_server_capabilities().result().supported_models
  assert (model.model_name, model.trainable) == ('tiny', True)
  create = service.create_lora_training_client
  client, other = create('tiny', rank=2, seed=5), create('tiny', rank=4)
  client, other = client.result(), other.result()
  assert client.get_info().lora_rank == 2
  first = score(client)
  assert first == score(other)
  train(client), train(client)
  assert score(client) != first == score(other)
  worst = check_samples(service, client)
  check_losses(client)
  check_errors(service, other)
  train(other)
  path = client.save_state('kept', user_metadata={'a': 'b'}).result().path
  train(client)
  print(json.dumps([path, score(client), worst]), flush=True)
  sys.stdin.readline()  # The server is killed meanwhile.


def after(service, url, path):
  """Goes on from a saved state, with the optimizer's and without."""
  client = service.create_training_client_from_state_with_optimizer(path).result()
  fresh = service.create_training_client_from_state(path).result()
  train(client), train(fresh)
  rest = tinker.RestClient(base_url=url, api_key='tml-a')
  kept = [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
  runs = [r.training_run_id for r in rest.list_training_runs().result().training_runs]
  info = rest.get_weights_info_by_tinker_path(path).result()
  print(json.dumps([score(client), score(fresh), kept, runs, info.lora_rank]))


def main():
  url, path = sys.argv[1:]
  with tinker.ServiceClient(base_url=url, api_key='tml-a') as service:
    if path:
      after(service, url, path)
    else:
      before(service, url)


if __name__ == '__main__':
  main()
