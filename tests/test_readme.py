"""The README's own task: the script that people copy runs, and leaves what it says."""

import pathlib
import re
import textwrap

import pytest
import runs
import script as script_lib

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.train import metrics

_ROOT = pathlib.Path(__file__).parents[1]
model = runs.model


@pytest.fixture
def script(tmp_path):
  """The page as it is printed, in a file."""
  (text,) = re.findall(
    r'  ```python\n(.*?)  ```', (_ROOT / 'README.md').read_text(), re.S
  )
  path = tmp_path / 'mine.py'
  path.write_text(textwrap.dedent(text))
  return path


def _run(script, *flags):
  return script_lib.run(script.name, *flags, cwd=script.parent)


def test_the_task_of_the_readme_runs(model, script, tmp_path):
  # Sizes for which programs are compiled anyway.
  small, default = runs.config(model, steps=2, eval_every=0), config_lib.Config()
  chosen = {name: fields.get(small, name) for name in fields.names(default)}
  done = _run(
    script,
    *(
      f'--config.{name}={value}'
      for name, value in chosen.items()
      if value != fields.get(default, name)
    ),
  )
  assert done.returncode == 0, done.stderr
  workdir = tmp_path / 'runs' / 'mine'
  assert len(metrics.read(workdir)) == 2
  left = ('curve.png', 'numbers.md', 'metrics.jsonl', 'trajectories', 'model')
  for name in left:
    assert (workdir / name).exists() and f'runs/mine/{name}' in done.stdout
  logs = sorted(log.name for log in (workdir / 'trajectories').iterdir())
  assert logs == ['step-00001-rollout.jsonl', 'step-00002-rollout.jsonl']
  assert '| rollout/reward ' in (workdir / 'numbers.md').read_text()
  assert not re.search('^I[0-9]{4} ', done.stderr, re.M)


def test_an_empty_answer_is_wrong_and_no_error(script):
  names: dict = {}
  # The function alone: the page's flags are those of its own process.
  (source,) = re.findall(r'^def reward.*?(?=\n\n\n)', script.read_text(), re.S | re.M)
  exec(source, names)
  task = types.Task('1', [], '27')
  for reply, reward in (('', 0.0), ('It is 27', 1.0)):
    assert names['reward'](task, [{'role': 'assistant', 'content': reply}]) == reward
