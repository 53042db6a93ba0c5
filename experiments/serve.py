r"""Serves a policy behind OpenAI's API; see agent_r1_jax/serve/server.py.

  python -m experiments.serve --config.model.path=runs/quickstart/model
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Who founded Kelby?"}]}'

The address is printed when the server accepts requests. Keys are read from the variable
AGENT_R1_API_KEYS of the environment, separated by commas; without it there are none.
SIGTERM leaves replies 30 seconds to end.
"""

import os

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.host import runtime
from agent_r1_jax.serve import server
from agent_r1_jax.train import setup, sizes
from agent_r1_jax.web import http

_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
_PORT = flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.', 0, 65535)
_NAME = flags.DEFINE_string('name', 'policy', 'What clients call the policy.')
_WAITING = flags.DEFINE_integer('waiting', 256, 'The most replies that wait.', 0)
_SECONDS = flags.DEFINE_float('seconds', 600.0, 'The most seconds of a reply.', 0.0)
_CFG = fields.define_flags(
  config_lib.Config(engine=config_lib.Engine(rows=64, decode_steps=16))
)


def main(_):
  runtime.quiet_logging()
  _CFG.value.check()
  keys = server.read_keys(os.environ.get('AGENT_R1_API_KEYS', ''))
  # A port that is taken is refused before the model is loaded.
  http.listen(_HOST.value, _PORT.value).close()
  config = sizes.resolve(_CFG.value, None, None)
  mesh = setup.make_mesh(config.mesh)
  model, params, chat = setup.load(config.model, config.chat, mesh)
  engine = setup.make_engine(config, model, params, mesh)
  del params  # The engine has its own.
  engine.warm_up(automata=[chat.stop_automaton(model.vocab_size)])
  served = server.make_app(
    engine,
    chat,
    name=_NAME.value,
    keys=keys,
    max_waiting=_WAITING.value,
    seconds=_SECONDS.value,
  )
  server.serve(engine, served, _HOST.value, _PORT.value)


if __name__ == '__main__':
  app.run(main)
