"""Reads a run's workdir for its model card."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
import math
import pathlib
import re
from typing import Any, NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models.files import tensor_files
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train import fingerprint, metrics

# The file that describes each folder, and the folders' tensor files.
_FOLDERS = {'model': 'config.json', 'adapter': 'adapter_config.json'}
_TENSORS = '*.safetensors'
# Configuration fields that are directories of this machine.
_DIRECTORIES = ('model.path', 'model.reference')


class RunRecord(NamedTuple):
  """A run, as its workdir describes it.

  Attributes:
    workdir: The run's directory.
    part: The published part, 'model' or 'adapter': a folder of the workdir.
    config: The configuration, by dotted name, and `devices` and `version`.
    made_of: The algorithm, tools, environment and tasks (train/fingerprint.py).
    lines: The lines of metrics.jsonl.
    shape: The config.json of `model`.
    sizes: The part's number of parameters by type, such as {'F32': 720512}.
    table: The text of table.md, or ''.
  """

  workdir: pathlib.Path
  part: str
  config: dict[str, Any]
  made_of: dict[str, Any]
  lines: list[dict[str, Any]]
  shape: dict[str, Any]
  sizes: dict[str, int]
  table: str

  @property
  def folder(self) -> pathlib.Path:
    """The published folder."""
    return self.workdir / self.part

  @property
  def steps(self) -> int:
    """The number of training steps in metrics.jsonl."""
    return max((line['step'] for line in self.lines), default=0)


@contextlib.contextmanager
def open_run(workdir: pathlib.Path, part: str = 'model') -> Iterator[RunRecord]:
  """Reads a run; inside `with` no other process can resume it.

  Raises:
    ValueError: There is no run, it is still running, it has not written this part yet, or
      a file is damaged.
  """
  if not (workdir / 'config.json').is_file():
    raise ValueError(
      f'{workdir}: there is no run here (no config.json); give the --workdir of a run'
    )
  with workdir_lib.lock(workdir):
    yield _read(workdir, part)


def _read(workdir: pathlib.Path, part: str) -> RunRecord:
  config = workdir_lib.flatten_fields(_read_json(workdir / 'config.json'))
  lines = metrics.read(workdir) if (workdir / 'metrics.jsonl').exists() else []
  record = RunRecord(
    workdir,
    part,
    config,
    made_of=_read_json(workdir / 'made_of.json', otherwise={}),
    lines=lines,
    shape=_read_json(workdir / 'model' / 'config.json', otherwise={}),
    sizes={},
    table='',
  )
  _check_part(record)
  table = workdir / 'table.md'
  return record._replace(
    sizes=_count_parameters(record.folder),
    table=table.read_text(encoding='utf-8') if table.exists() else '',
  )


def _check_part(record: RunRecord) -> None:
  """Raises ValueError if the run has not written the part to publish."""
  folder = record.folder
  if (folder / _FOLDERS[record.part]).is_file() and any(folder.glob(_TENSORS)):
    return
  if record.part == 'adapter' and not record.config.get('model.lora_rank'):
    raise ValueError(
      f'{folder}: a run without adapters (model.lora_rank=0) has none; publish its model'
    )
  steps = record.config.get('schedule.steps', 0)
  raise ValueError(
    f'{folder}: there is none yet. A run writes it after its last step, and '
    f'{record.steps} of {steps} are done; the same command as before resumes the run'
  )


def _read_json(path: pathlib.Path, otherwise: Any = None) -> Any:
  if otherwise is not None and not path.exists():
    return otherwise
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is no JSON ({error}): the file is damaged') from None


def _count_parameters(folder: pathlib.Path) -> dict[str, int]:
  sizes: dict[str, int] = {}
  for file in sorted(folder.glob(_TENSORS)):
    for tensor in tensor_files.read_header(file).values():
      count = math.prod(tensor.shape)
      sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + count
  return sizes


def list_changes(record: RunRecord) -> dict[str, str]:
  """Returns the configuration fields that differ from the defaults.

  Of a directory only the name is shown, since the rest of the path is this machine's.
  """
  defaults = workdir_lib.flatten_fields(dataclasses.asdict(config_lib.Config()))
  return {
    name: pathlib.Path(value).name if name in _DIRECTORIES else str(value)
    for name, value in record.config.items()
    if name in defaults and value != defaults[name]
  }


class Change(NamedTuple):
  """A metric at the beginning and end of a run: steps, values, and episodes.

  `episodes` is the number of episodes behind the last value; None if it is not logged.
  """

  first_step: int
  first: float
  last_step: int
  last: float
  episodes: int | None


def summarize_curve(record: RunRecord) -> dict[str, Change]:
  """Returns the changes of a run's rewards and scores.

  The metrics are rollout/reward and, for each set, eval/SET/reward and eval/SET/em.
  """
  names = dict.fromkeys(name for line in record.lines for name in line)
  curve = {}
  for name in names:
    if re.fullmatch(r'rollout/reward|eval/.*/(reward|em)', name):
      found = [line for line in record.lines if name in line]
      first, last = found[0], found[-1]
      count = last.get(f'{name.rpartition("/")[0]}/episodes')
      episodes = None if count is None else round(count)
      curve[name] = Change(first['step'], first[name], last['step'], last[name], episodes)
  return curve


def list_tools(record: RunRecord) -> list[str]:
  """Returns the names of the tools used in training."""
  return sorted(record.made_of.get('tools') or {})


def describe_algorithm(record: RunRecord) -> dict[str, str]:
  """Returns the algorithm's functions, each as a call, and its other settings.

  Example: {'advantages': 'group_relative(divide_by_std=True)', 'loss': 'ppo_clip(...)'}.
  A function in the user's script is shown by its name.
  """
  defaults = algorithms.Algorithm._field_defaults
  parts = {}
  for name, part in (record.made_of.get('algorithm') or {}).items():
    if name in ('reads', 'value_targets'):
      continue
    if isinstance(part, dict):
      calls = list(_find_calls(part))
      parts |= {name: ', '.join(calls)} if calls else {}
    elif name in defaults and part != fingerprint.describe(defaults[name]):
      parts[name] = shorten(part)
  return parts


def _find_calls(part: Mapping[str, Any]) -> Iterator[str]:
  """Yields the functions in a description of train/fingerprint.py, with their numbers."""
  name = part.get('function') or part.get('partial') or part.get('type')
  inner = [x for x in part.values() if isinstance(x, dict)]
  if name and not any(x.get('function') or x.get('partial') for x in inner):
    hidden = ('function', 'partial', 'type', 'code')
    given = {
      key: shorten(value)
      for key, value in part.items()
      if key not in hidden and isinstance(value, str)
    }
    arguments = ', '.join(f'{key}={value}' for key, value in given.items())
    yield f'{shorten(str(name))}({arguments})'
    return
  for x in inner:
    yield from _find_calls(x)


def shorten(text: str) -> str:
  """'agent_r1_jax.rl.losses.ppo_clip.<locals>.surrogate' -> 'ppo_clip'; '0.2' stays.

  Paths of this machine are cut to their name: "'/data/judge'" -> "'judge'".
  """
  if not text[:1].isalpha():
    return re.sub(r"""(?<=^['"])(/|~|\w:[/\\]).*[/\\]""", '', text)
  return text.partition('.<locals>')[0].rpartition('.')[2]
