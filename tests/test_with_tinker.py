"""The client of the Tinker API trains and samples here: `make test-with-tinker`."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import tiny

CLIENT = os.environ.get('PACKAGE_PYTHON')
ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
  not CLIENT, reason='`make test-with-tinker` installs tinker'
)

# Ends the client if it connects, or looks up a name, anywhere but on this machine.
GUARD = """
import os, sys
def guard(event, args):
  if event == 'socket.connect':
    address = args[1]
  elif event == 'socket.getaddrinfo':
    address = args[:1]
  else:
    return
  if isinstance(address, tuple) and address[0] not in ('127.0.0.1', 'localhost'):
    print('it connects to', address, file=sys.stderr, flush=True)
    os._exit(99)
sys.addaudithook(guard)
"""
BEGIN = """
import json, sys, warnings
warnings.simplefilter('ignore')
import numpy as np
import tinker
url, job = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key='tml-a')
text = [7, 8, 9, 7, 8, 10, 11, 7]
def make(text, **inputs):
  inputs = {'target_tokens': np.array(text[1:]), **inputs}
  chunk = tinker.ModelInput.from_ints(text[:-1])
  return tinker.Datum(model_input=chunk, loss_fn_inputs=inputs)
weights = np.array([0, 0, 0, 1, 1, 1, 1], np.float32)
datum = make(text, weights=weights)
def go_on(client):
  passed = client.forward_backward([datum], 'cross_entropy')
  stepped = client.optim_step(tinker.AdamParams(learning_rate=0.01))
  passed.result(), stepped.result()
def score(client, *data):
  data = data or (datum,)
  outputs = client.forward(list(data), 'cross_entropy').result().loss_fn_outputs
  return [x for output in outputs for x in output['logprobs'].tolist()]
"""
BOTH = """
import asyncio
made = service.create_lora_training_client('tiny', rank=2, seed=5)
client, other = made.result(), service.create_lora_training_client('tiny', rank=4).result()
(model,) = tinker.RestClient(base_url=url, api_key='tml-a').get_server_capabilities().result().supported_models
assert (model.model_name, model.trainable) == ('tiny', True), model
assert client.get_info().lora_rank == 2
before = score(client)
assert before == score(other)
go_on(client), go_on(client)
assert score(client) != before == score(other)
# Samples have the log-probs of forward.
sampler = client.save_weights_and_get_sampling_client().result()
params = tinker.SamplingParams(max_tokens=6, seed=3, temperature=1.0, top_k=-1, top_p=1.0)
prompt = tinker.ModelInput.from_ints(text)
got = sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_sample_logprobs=2).result()
worst = 0.0
for reply in got.sequences:
  found = score(client, make(text + reply.tokens))
  said = got.prompt_logprobs[1:] + reply.logprobs
  worst = max(worst, np.abs(np.array(found) - said).max())
assert worst < 2e-5, worst
assert got.prompt_logprobs[0] is None and len(got.sequences[0].topk_logprobs[0]) == 2
assert got.sequences[0].tokens != got.sequences[1].tokens
again = sampler.sample(prompt, 2, params).result()
assert [r.tokens for r in again.sequences] == [r.tokens for r in got.sequences]
first = got.sequences[0].tokens
cut = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=6, seed=3, stop=[first[1]])).result()
assert (cut.sequences[0].tokens, cut.sequences[0].stop_reason) == (first[:2], 'stop')
np.testing.assert_allclose(sampler.compute_logprobs(prompt).result()[1:], got.prompt_logprobs[1:])
named = client.save_weights_for_sampler('named').result().path
loaded = service.create_sampling_client(model_path=named).result()
assert loaded.sample(prompt, 1, params).result().sequences[0].tokens == first
target = tinker.TensorData.from_numpy(np.array([[x, 5] for x in text[1:]]))
scored = loaded.sample(prompt, 1, params, target_prompt_logprobs=target).result()
np.testing.assert_allclose(
  scored.target_prompt_logprobs.to_numpy()[:, 0], got.prompt_logprobs[1:], atol=2e-5)
# Each loss, on one datum; its value is that of the log-probs that it returns.
old = np.where(weights > 0, -1.0, 0.0).astype(np.float32)
rl = make(text, logprobs=old, advantages=weights * 0.5)
for name, config in (
  ('importance_sampling', None), ('ppo', {'clip_low_threshold': 0.9}), ('cispo', None),
  ('dro', {'beta': 0.1}), ('gspo', None), ('dppo', None)):
  passed = client.forward([rl], name, config).result()
  each = passed.loss_fn_outputs[0]['elementwise_loss'].to_numpy()
  assert abs(passed.metrics['loss:sum'] - each.sum()) < 1e-4, name
  if name == 'importance_sampling':
    ratio = np.exp(passed.loss_fn_outputs[0]['logprobs'].to_numpy() - old)
    np.testing.assert_allclose(each, -ratio * weights * 0.5, rtol=1e-4)
# A loss of one's own takes two passes: log-probs, and then a linear loss with the
# gradient by them. The client does this with PyTorch; here it is by hand.
def custom(client):
  logprobs = np.array(score(client))
  gradient = 2 * weights * (logprobs + 1)  # Of the sum of w (log π + 1)².
  return client.forward_backward([make(text, weights=-gradient.astype(np.float32))], 'cross_entropy')
custom(client).result()
norm = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics
assert norm['grad_norm:mean'] > 0
# Asynchronously, and several data in several parts.
async def many():
  return await asyncio.gather(*(sampler.sample(prompt, 1, params) for _ in range(8)))
assert {tuple(r.sequences[0].tokens) for r in asyncio.run(many())} == {tuple(first)}
data = [make(text[: 3 + i % 5]) for i in range(1500)]
outputs = client.forward(data, 'cross_entropy').result().loss_fn_outputs
assert [o['logprobs'].shape[0] for o in outputs] == [2 + i % 5 for i in range(1500)]
# Errors arrive at once, with their text, and the client goes on after them.
def fails(kind, text, call):
  try:
    call().result()
  except kind as error:
    assert text in str(error), error
  else:
    raise AssertionError(text)
fails(tinker.BadRequestError, 'there are cross_entropy', lambda: client.forward([datum], 'other'))
fails(tinker.BadRequestError, 'room for', lambda: client.forward([make([7] * 200)], 'cross_entropy'))
fails(tinker.BadRequestError, '--adapter_rank', lambda: service.create_lora_training_client('tiny', rank=99))
fails(tinker.RequestFailedError, 'no gradient', lambda: other.optim_step(tinker.AdamParams()))
fails(tinker.NotFoundError, 'no state', lambda: service.create_sampling_client(model_path=named + 'x'))
go_on(other)
path = client.save_state('kept', user_metadata={'a': 'b'}).result().path
go_on(client)
print(json.dumps([path, score(client), worst]), flush=True)
sys.stdin.readline()  # The server is killed meanwhile.
"""
AFTER = """
client = service.create_training_client_from_state_with_optimizer(job).result()
fresh = service.create_training_client_from_state(job).result()
go_on(client), go_on(fresh)
rest = tinker.RestClient(base_url=url, api_key='tml-a')
kept = [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
runs = [r.training_run_id for r in rest.list_training_runs().result().training_runs]
info = rest.get_weights_info_by_tinker_path(job).result()
print(json.dumps([score(client), score(fresh), kept, runs, info.lora_rank]))
service.close('success').result()
"""


def start(tmp_path, model):
  flags = {
    'config.model.path': model,
    'config.model.dtype': 'float32',
    'name': 'tiny',
    'workdir': tmp_path / 'work',
    'port': 0,
    'adapter_rank': 4,
    'config.engine.rows': 6,
    'config.engine.slots': 128,
    'config.engine.bucket': 128,
    'config.batch.row_tokens': 128,
  }
  command = [sys.executable, '-m', 'experiments.serve_tinker', '--noconfig.engine.narrow']
  command += [f'--{name}={value}' for name, value in flags.items()]
  server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  assert server.stdout
  for line in server.stdout:
    if line.startswith('http'):
      return server, line.strip()
  raise AssertionError('the server ended')


def ask(url, script, job):
  environment = {k: v for k, v in os.environ.items() if 'proxy' not in k.lower()}
  return subprocess.Popen(
    [CLIENT, '-c', GUARD + BEGIN + script, url, job],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=environment | {'HOME': '/nonexistent'},
  )


def test_the_client_trains_samples_and_goes_on_after_a_kill(tmp_path):
  model = tiny.save(tmp_path / 'model')
  server, url = start(tmp_path, model)
  try:
    client = ask(url, BOTH, 'begin')
    assert client.stdout
    line = client.stdout.readline()
    assert line, f'the client ended with {client.wait(60)}'
    path, want, worst = json.loads(line)
    assert worst < 2e-5
    server.send_signal(signal.SIGKILL)
    server.wait(60)
    client.kill()
    client.communicate()
    server, url = start(tmp_path, model)
    client = ask(url, AFTER, path)
    out, _ = client.communicate(timeout=300)
    assert client.returncode == 0
    found, fresh, kept, runs, rank = json.loads(out)
    assert found == want != fresh  # Bit for bit, the optimizer's state included.
    assert path in kept and path.split('/')[2] in runs and rank == 2
  finally:
    server.kill()
    server.communicate()
