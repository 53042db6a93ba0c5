"""The client of the Tinker API trains and samples here: `make test-with-tinker`."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tiny

CLIENT = os.environ.get('PACKAGE_PYTHON')
FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[2]


@contextlib.contextmanager
def serve(tmp_path, model):
  """The address of a server, which is killed in the end."""
  flags = {
    'config.model.path': model,
    'config.model.dtype': 'float32',
    'name': 'tiny',
    'workdir': tmp_path / 'work',
    'port': 0,
    'adapter_rank': 8,
    'config.engine.rows': 6,
    'config.engine.slots': 128,
    'config.engine.bucket': 128,
    'config.batch.row_tokens': 128,
  }
  command = [sys.executable, '-m', 'experiments.serve_tinker', '--noconfig.engine.narrow']
  command += [f'--{name}={value}' for name, value in flags.items()]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
    try:
      assert server.stdout
      url = next(line for line in server.stdout if line.startswith('http'))
      yield url.strip()
    finally:
      server.kill()


def ask(*command):
  """Starts a client, which has no home with keys of its own."""
  environment = {k: v for k, v in os.environ.items() if 'proxy' not in k.lower()}
  return subprocess.Popen(
    [CLIENT, *command],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=environment | {'HOME': '/nonexistent'},
  )


@pytest.mark.skipif(not CLIENT, reason='`make test-with-tinker` installs tinker')
def test_the_client_trains_samples_and_goes_on_after_a_kill(tmp_path):
  model, script = tiny.save(tmp_path / 'model'), FOLDER / 'tinker_client.py'
  with serve(tmp_path, model) as url, ask(script, url, '') as client:
    assert client.stdout
    line = client.stdout.readline()
    client.kill()  # Both are killed while it waits.
  path, want, worst = json.loads(line)
  assert worst < 2e-5
  with serve(tmp_path, model) as url:
    with ask(script, url, path) as client:
      out, _ = client.communicate(timeout=300)
      assert client.returncode == 0
    found, fresh, kept, runs, rank = json.loads(out)
    assert found == want != fresh  # Bit for bit, the optimizer's state included.
    assert path in kept and path.split('/')[2] in runs and rank == 2
    # The page's script.
    page = (ROOT / 'agent_r1_jax/contrib/tinker/guide.md').read_text()
    (block,) = re.findall(r'^```python\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    for printed, here in (
      ('http://localhost:8000', url),
      ("'experiments/miniwiki/model'", repr(model)),
      ("'miniwiki'", "'tiny'"),
    ):
      assert printed in block
      block = block.replace(printed, here)
    with ask('-c', block) as client:
      out, _ = client.communicate(timeout=300)
    assert client.returncode == 0
    *losses, _, path = out.strip().split('\n')
    losses = [float(line.split()[0]) for line in losses[:3]]
    assert losses == sorted(losses, reverse=True) and path.startswith('tinker://')
