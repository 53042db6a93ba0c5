r"""Serves a model to clients of the Tinker API; see contrib/tinker/server.py.

  agent-r1-jax tinker --config.model.path=runs/quickstart/model \
    --workdir=runs/tinker
  TINKER_BASE_URL=http://localhost:8000 TINKER_API_KEY=tml-any python recipe.py

Clients train adapters of this model and sample from them: contrib/tinker/guide.md. The
address is printed when the server accepts requests. Keys are comma-separated in the
environment variable AGENT_R1_API_KEYS; without it no key is needed. Saved states are in
the workdir, and survive a kill of the server.
"""

import os

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.contrib.tinker import learning, sampling, server, states, training
from agent_r1_jax.host import runtime, workdir
from agent_r1_jax.rl import packing
from agent_r1_jax.serve import server as openai_server
from agent_r1_jax.train.plan import setup, sizes
from agent_r1_jax.web import http
from experiments import model_formats

_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
_PORT = flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.', 0, 65535)
_NAME = flags.DEFINE_string(
  'name', None, 'What clients call the model; default: its path.'
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/tinker', 'Where states are saved.')
_CLIENTS = flags.DEFINE_integer('clients', 8, 'The most training runs at a time.', 1)
_SAMPLERS = flags.DEFINE_integer('samplers', 8, 'Adapters that sample at a time.', 1)
_RANK = flags.DEFINE_integer('adapter_rank', 32, 'The highest rank of an adapter.', 1)
_WAITING = flags.DEFINE_integer('waiting', 256, 'The most replies that wait.', 0)
_SECONDS = flags.DEFINE_float('seconds', 600.0, 'The most seconds of a reply.', 0.0)
_CFG = fields.define_flags(
  config_lib.Config(
    engine=config_lib.Engine(rows=64, decode_steps=16),
    batch=config_lib.Batch(row_tokens=1024, microbatch=4),
  )
)


def main(_):
  runtime.quiet_logging()
  _CFG.value.check()
  keys = openai_server.read_keys(os.environ.get('AGENT_R1_API_KEYS', ''))
  # Check that the port is free before loading the model.
  http.listen(_HOST.value, _PORT.value).close()
  config = sizes.resolve(model_formats.add(_CFG.value), None, None)
  model, params, chat = setup.load(config.model, config.chat)
  engine = setup.make_engine(
    config, model, params, adapters=_SAMPLERS.value, adapter_rank=_RANK.value
  )
  shape = packing.MicrobatchShape(config.batch.microbatch, config.batch.row_tokens)
  learner = learning.Learning(model, params, shape, _RANK.value)
  del params  # The engine and the learner have their own copies.
  engine.warm_up(automata=[chat.stop_automaton(model.vocab_size)])
  with workdir.lock(_WORKDIR.value):
    saved = states.States(_WORKDIR.value, _NAME.value or config.model.path, model)
    seconds = _SECONDS.value
    trainings = training.Trainings(
      learner, saved, most=_CLIENTS.value, seconds=3 * seconds
    )
    samplers = sampling.Samplers(
      engine, chat, trainings, max_waiting=_WAITING.value, seconds=seconds
    )
    served = server.make_app(trainings, samplers, keys)
    openai_server.serve(engine, served, _HOST.value, _PORT.value)


if __name__ == '__main__':
  app.run(main)
