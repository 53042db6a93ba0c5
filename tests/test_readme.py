"""The README's own task: the script that people copy runs, and leaves what it says."""

import dataclasses
import pathlib
import re
import textwrap

import test_train
import tiny

from agent_r1_jax import metrics, train

_README = pathlib.Path(__file__).parents[1] / 'README.md'
model = test_train.model


def test_the_task_of_the_readme_runs(model, tmp_path, monkeypatch, capfd):
  (script,) = re.findall(r'  ```python\n(.*?)  ```', _README.read_text(), re.S)
  script, app_run = textwrap.dedent(script).split('\n\napp.run(main)')
  assert not app_run.strip()
  names: dict = {}
  exec(script, names)
  # As it is printed, but for the model, and sizes for which programs are compiled anyway.
  small = test_train._config(model, steps=2, eval_every=0)

  def config(model, **given):
    assert model == 'path/to/Qwen2.5-0.5B-Instruct'
    return dataclasses.replace(small, **given | {'steps': small.steps})

  monkeypatch.setattr(train, 'Config', config)
  monkeypatch.chdir(tmp_path)
  tiny.within(names['main'], None)
  workdir = tmp_path / 'runs' / 'mine'
  assert len(metrics.read(workdir)) == 2
  left = ('curve.png', 'numbers.md', 'metrics.jsonl', 'trajectories', 'model')
  said = capfd.readouterr()
  for name in left:
    assert (workdir / name).exists() and f'runs/mine/{name}' in said.out
  (log,) = (workdir / 'trajectories').iterdir()
  assert log.name == 'step-00002-rollout.eval'
  assert '| rollout/reward ' in (workdir / 'numbers.md').read_text()
  assert not re.search('^I[0-9]{4} ', said.err, re.M)
  # An empty answer is wrong, no error.
  task = test_train.types.Task('1', [], '27')
  for reply, reward in (('', 0.0), ('It is 27', 1.0)):
    assert names['reward'](task, [{'role': 'assistant', 'content': reply}]) == reward
