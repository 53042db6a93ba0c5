"""The rows of a data set, split by flags that pretrain.py and search.py share."""

from absl import flags

from agent_r1_jax import types
from agent_r1_jax.tasks import qa_data
from experiments.wikipedia import settings

DATA = flags.DEFINE_string(
  'data',
  qa_data.FETCHED.format('2wikimultihopqa'),
  'Folder of corpus and train.jsonl.gz.',
)
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows held out for the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')


def read() -> tuple[list[types.Task], list[types.Task], list[types.Task]]:
  """Returns the rows held out for the table, those to watch, and those to learn from."""
  rows = list(qa_data.read_questions(DATA.value))
  sizes = (_HELD_OUT.value, _WATCHED.value)
  held_out, watched, rest = settings.split(rows, *sizes, seed=_SPLIT.value)
  return held_out, watched, rest
