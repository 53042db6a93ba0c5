r"""Serves a policy behind OpenAI's and Anthropic's APIs; see contrib/dialects/guide.md.

  agent-r1-jax serve --config.model.path=runs/quickstart/model
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Who founded Kelby?"}]}'

With adapters, a request's "model" names one of them, or the policy without any:

  agent-r1-jax serve --config.model.path=Qwen/Qwen2.5-3B-Instruct \
    --adapter=search=runs/search/adapter --adapter=code=runs/code/adapter

The address is printed when the server accepts requests. Keys are comma-separated in the
environment variable AGENT_R1_API_KEYS; without it no key is needed. After SIGTERM,
running replies have 30 seconds to finish.
"""

from collections.abc import Iterable
import os

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.contrib import dialects
from agent_r1_jax.host import runtime
from agent_r1_jax.models import lora
from agent_r1_jax.models.files import peft_files
from agent_r1_jax.serve import server
from agent_r1_jax.train.plan import setup, sizes
from agent_r1_jax.web import http
from experiments import model_formats

_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
_PORT = flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.', 0, 65535)
_NAME = flags.DEFINE_string('name', 'policy', 'What clients call the policy.')
_WAITING = flags.DEFINE_integer('waiting', 256, 'The most replies that wait.', 0)
_SECONDS = flags.DEFINE_float('seconds', 600.0, 'The most seconds of a reply.', 0.0)
_ADAPTERS = flags.DEFINE_multi_string(
  'adapter', [], 'NAME=DIR: an adapter in PEFT layout, and its name; can be repeated.'
)
_CFG = fields.define_flags(
  config_lib.Config(engine=config_lib.Engine(rows=64, decode_steps=16))
)


def _read_names(adapters: Iterable[str]) -> dict[str, str]:
  """Reads NAME=DIR of each --adapter; returns the directories by name."""
  directories = {}
  for text in adapters:
    name, _, directory = text.partition('=')
    if not name or not directory:
      raise ValueError(f'--adapter={text}: give it as NAME=DIR.')
    if name in directories or name == _NAME.value:
      raise ValueError(f'--adapter={text}: {name} is the name of another one already.')
    directories[name] = directory
  return directories


def main(_):
  runtime.quiet_logging()
  _CFG.value.check()
  directories = _read_names(_ADAPTERS.value)
  keys = server.read_keys(os.environ.get('AGENT_R1_API_KEYS', ''))
  # Check that the port is free before loading the model.
  http.listen(_HOST.value, _PORT.value).close()
  config = sizes.resolve(model_formats.add(_CFG.value), None, None)
  mesh = setup.make_mesh(config.mesh)
  model, params, chat = setup.load(config.model, config.chat, mesh)
  adapters = {name: peft_files.load(d, model) for name, d in directories.items()}
  ranks = [lora.get_rank(adapter) for adapter in adapters.values()]
  engine = setup.make_engine(
    config,
    model,
    params,
    mesh,
    adapters=len(adapters),
    adapter_rank=max(ranks, default=1),
  )
  del params  # The engine has its own copy.
  for name, adapter in adapters.items():
    engine.adapters.set(name, adapter)
  engine.warm_up(automata=[chat.stop_automaton(model.vocab_size)])
  served = server.make_app(
    engine,
    chat,
    name=_NAME.value,
    keys=keys,
    max_waiting=_WAITING.value,
    seconds=_SECONDS.value,
    dialects=dialects.ALL,
  )
  server.serve(engine, served, _HOST.value, _PORT.value)


if __name__ == '__main__':
  app.run(main)
