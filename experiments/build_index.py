r"""Builds an index of a corpus, for experiments.serve_retriever.

  agent-r1-jax build-index --corpus=corpus.jsonl.gz --out=runs/bm25
  agent-r1-jax build-index --corpus=corpus.jsonl.gz --out=runs/e5 \
    --encoder=e5-base-v2 --factory=IVF4096,SQ8 --parameters=nprobe=64

Without an encoder it is BM25. With one (a directory in Hugging Face layout: e5, bge,
MiniLM) the passages are encoded on JAX's devices, in shards in OUT/shards: after a kill,
the same command resumes. Other processes with --encode_only help with the shards. Another
--factory does not encode again; once the index is good, OUT/shards may be removed.
"""

import pathlib

from absl import app, flags

from agent_r1_jax.host import runtime
from agent_r1_jax.report import progress
from agent_r1_jax.retrieval import bm25, dense, documents, encoder, shards

_CORPUS = flags.DEFINE_string(
  'corpus', None, 'Passages: JSON lines of id, title, text.', required=True
)
_OUT = flags.DEFINE_string('out', None, 'Directory of the index.', required=True)
_ENCODER = flags.DEFINE_string('encoder', '', "Model's directory; none is BM25.")
_FACTORY = flags.DEFINE_string('factory', 'Flat', 'FAISS factory of the index.')
_PARAMETERS = flags.DEFINE_string('parameters', '', 'FAISS parameters of the search.')
_SHARD = flags.DEFINE_integer('shard', 10_000, 'Passages in a shard.', lower_bound=1)
_ENCODE_ONLY = flags.DEFINE_bool('encode_only', False, 'Build no index.')


def main(_):
  runtime.quiet_logging()
  runtime.enable_compilation_cache()
  out = pathlib.Path(_OUT.value)
  # Check the encoder's directory before reading a large corpus.
  model = encoder.Encoder(_ENCODER.value) if _ENCODER.value else None
  passages = documents.read_corpus(_CORPUS.value)
  print(f'{len(passages)} passages of {_CORPUS.value}')
  if model is None:
    bm25.BM25(passages).save(out)
  else:
    print(
      f'{_ENCODER.value}: {model.config.dtype}, pooling {model.config.pooling}, query '
      f'prefix {model.query_prefix!r}, passage prefix {model.passage_prefix!r}'
    )
    with progress.Progress(len(passages), label='encoding') as bar:
      vectors = shards.encode_corpus(
        passages,
        model.encode_passages,
        out / 'shards',
        size=_SHARD.value,
        on_progress=bar.update,
      )
    if _ENCODE_ONLY.value:
      return
    print(f'indexing {len(passages)} vectors of {model.dim} numbers: {_FACTORY.value}')
    dense.Dense(
      passages,
      model.encode_passages,
      vectors=vectors,
      encode_query=model.encode_queries,
      factory=_FACTORY.value,
      parameters=_PARAMETERS.value,
    ).save(out)
  print(f'index: {out}')


if __name__ == '__main__':
  app.run(main)
