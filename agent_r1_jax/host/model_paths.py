"""Paths of models: a directory, or a file next to its tokenizer."""

import os
import pathlib


def get_directory(path: str | os.PathLike) -> pathlib.Path:
  """Returns the directory with the tokenizer of the model at `path`."""
  path = pathlib.Path(path)
  return path.parent if path.is_file() else path
