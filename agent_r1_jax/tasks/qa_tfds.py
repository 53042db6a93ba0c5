"""Questions as a data set of TensorFlow Datasets: array_record, without TensorFlow."""

from collections.abc import Iterable, Mapping, Sequence
import json
import os
import pathlib

import grain
import tensorflow_datasets as tfds

from agent_r1_jax.types import Task


class Questions(tfds.core.GeneratorBasedBuilder):
  """Questions, golden answers and the other fields as JSON, in the given order."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First.'}

  def __init__(self, *, tasks: Mapping[str, Iterable[Task]], **kwargs):
    """Names the tasks of each split."""
    self._tasks = tasks
    super().__init__(file_format='array_record', **kwargs)

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      description='Questions with golden answers.',
      disable_shuffling=True,
      features=tfds.features.FeaturesDict(
        {
          'id': tfds.features.Text(),
          'question': tfds.features.Text(),
          'golden_answers': tfds.features.Sequence(tfds.features.Text()),
          # As text, since nested ragged features need TensorFlow.
          'info': tfds.features.Text(),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    return {split: self._generate_examples(some) for split, some in self._tasks.items()}

  def _generate_examples(self, tasks):
    for number, task in enumerate(tasks):
      example = {'id': task.id, 'question': task.info['question']}
      example |= {'golden_answers': task.answer, 'info': json.dumps(task.info)}
      yield number, example


def write(
  tasks: Mapping[str, Iterable[Task]], directory: str | os.PathLike, *, name: str
) -> pathlib.Path:
  """Builds a data set; returns the directory for `read` and other TFDS users.

  Args:
    tasks: The questions by split name ('train', 'validation', ...).
    directory: TFDS's data_dir.
    name: Name of the configuration, for example 'hotpotqa'.

  Raises:
    ValueError: The data set already exists.
  """
  config = tfds.core.BuilderConfig(name=name, version=Questions.VERSION)
  builder = Questions(tasks=tasks, data_dir=directory, config=config)
  if pathlib.Path(builder.data_path).exists():
    raise ValueError(f'{builder.data_path} exists; delete it to build it again')
  builder.download_and_prepare()
  return pathlib.Path(builder.data_path)


def find(directory: str | os.PathLike) -> pathlib.Path | None:
  """Returns the newest data set that `write` has built in a directory, or None."""
  info_files = pathlib.Path(directory).glob(f'{Questions.name}/*/*/dataset_info.json')
  return max((path.parent for path in info_files), default=None)


def read(directory: str | os.PathLike, split: str = 'train') -> Sequence[Task]:
  """Opens a split, or a sub-split such as 'train[:80%]'.

  Returns:
    A grain.MapDataset, which has a length and reads each task from disk on access. Every
    process can read any task, so each reads only the tasks it plays.

  Raises:
    ValueError: The directory holds no data set, or no such split.
  """
  if not (pathlib.Path(directory) / 'dataset_info.json').exists():
    raise ValueError(f'{directory}: holds no TFDS data set; give what `write` returned')
  builder = tfds.builder_from_directory(directory)
  source = builder.as_data_source(split)  # pyright: ignore (a decorator hides its type)
  return grain.MapDataset.source(source).map(_task)  # pyright: ignore (it is a sequence)


def _task(example):
  info = json.loads(example['info'])
  return Task(
    id=example['id'].decode(),
    messages=[{'role': 'user', 'content': info['question']}],
    answer=[answer.decode() for answer in example['golden_answers']],
    info=info,
  )
