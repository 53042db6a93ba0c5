"""Serves indexes of experiments.build_index over HTTP; see contrib/search_servers.

  agent-r1-jax retriever --index=runs/bm25
  agent-r1-jax retriever --index=runs/e5,runs/bm25 --encoder=e5-base-v2

Several indexes are fused by reciprocal rank. The address is printed when the server
accepts requests; SIGTERM ends it within seconds.
"""

from absl import app, flags

from agent_r1_jax.contrib.search_servers import server
from agent_r1_jax.host import runtime
from experiments import retrievers

_INDEX = flags.DEFINE_list('index', None, 'Directories of indexes.', required=True)
_ENCODER = flags.DEFINE_string('encoder', '', 'Directory of the model of dense indexes.')
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
_PORT = flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.', 0, 65535)
_BATCH = flags.DEFINE_integer('batch', 64, 'The most queries in a search.', 1)
_WINDOW = flags.DEFINE_float('window', 0.002, 'Seconds to wait for more queries.', 0.0)
_WAITING = flags.DEFINE_integer('waiting', 1024, 'The most queries that wait.', 1)
_TIMEOUT = flags.DEFINE_float('timeout', 10.0, 'Seconds that a query may take.', 0.0)
_CACHE = flags.DEFINE_integer('cache', 10_000, 'Answers to keep.', 0)


def main(_):
  runtime.quiet_logging()
  runtime.enable_compilation_cache()
  retriever = retrievers.open_indexes(_INDEX.value, _ENCODER.value)
  # The encoder compiles one program for each of a few lengths and batch sizes.
  for words in (5, 20, 40):
    for count in (1, 2, 4, 8, 16, 32, 64):
      if count <= _BATCH.value:
        retriever.search(['who ' * words] * count, 1)
  served = server.make_app(
    retriever,
    max_batch=_BATCH.value,
    window=_WINDOW.value,
    max_waiting=_WAITING.value,
    timeout=_TIMEOUT.value,
    cache=_CACHE.value,
  )
  server.serve(served, _HOST.value, _PORT.value)


if __name__ == '__main__':
  app.run(main)
