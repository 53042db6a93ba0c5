"""Shapes of published models by name, for commands that need no weights."""

from collections.abc import Iterator
import contextlib
import difflib
import json
import pathlib
import tempfile

from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import hf_config
from experiments import model_formats

# V, D, L, N, K, H, F, tied, as in models/decoder.py: Qwen2.5, and one for the tests.
SIZES = {
  'qwen2.5-0.5b': (151_936, 896, 24, 14, 2, 64, 4864, True),
  'qwen2.5-1.5b': (151_936, 1536, 28, 12, 2, 128, 8960, True),
  'qwen2.5-3b': (151_936, 2048, 36, 16, 2, 128, 11_008, True),
  'qwen2.5-7b': (152_064, 3584, 28, 28, 4, 128, 18_944, False),
  'qwen2.5-14b': (152_064, 5120, 48, 40, 8, 128, 13_824, False),
  'qwen2.5-32b': (152_064, 5120, 64, 40, 8, 128, 27_648, False),
  'tiny': (1024, 128, 2, 4, 2, 128, 256, False),
}


def read_shape(name: str) -> decoder.DecoderConfig:
  """Returns the shape of a name in SIZES, a directory, a config.json or a GGUF file."""
  if name not in SIZES:
    return hf_config.read(name, model_formats.find())
  V, D, L, N, K, H, F, tied = SIZES[name]
  return decoder.DecoderConfig('qwen2', V, D, L, N, K, H, F, tie_embeddings=tied)


@contextlib.contextmanager
def make_directory(name: str) -> Iterator[str]:
  """Yields a model's directory: the given path, or one with the named config.json."""
  path = pathlib.Path(name)
  named = name in SIZES or path.is_file()
  close = difflib.get_close_matches(name, SIZES, n=1, cutoff=0.8)
  if close and not named and not path.exists():
    raise ValueError(f'{name}: no such directory; did you mean the shape {close[0]!r}?')
  if path.is_dir() or path.suffix == '.gguf' or not named:
    yield name
    return
  with tempfile.TemporaryDirectory() as folder:
    if name in SIZES:
      text = json.dumps(hf_config.make(read_shape(name), 'bfloat16'))
    else:
      text = path.read_text()
    pathlib.Path(folder, 'config.json').write_text(text)
    yield folder
