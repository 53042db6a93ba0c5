"""experiments/one_page.py: its parameters are those of train.run; what it imports."""

import ast
import copy
import pathlib

import jax
import numpy as np
import plain
import script

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, report, train
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms
from experiments import one_page
from experiments.miniwiki import tasks as miniwiki

_UPPER = ('tasks', 'tools', 'retrieval', 'guided', 'serve', 'report', 'checks')


def test_its_parameters_equal_those_of_a_run(tmp_path, capsys, no_curves):
  config = copy.deepcopy(one_page.CONFIG)
  config.schedule = config_lib.Schedule(steps=2, tasks=2, samples=4)
  config.limits.max_turn_tokens = 48
  config = fields.replace(config, script.QUICKSTART)
  find = miniwiki.make_search(miniwiki.corpus(0, 'train'))
  make_env, tasks = lambda: one_page.make_env(find), miniwiki.train_tasks(0, 64)
  params = one_page.train(config, tasks, tasks[:2], make_env)
  told = capsys.readouterr().out.splitlines()
  assert [line.split(':')[0] for line in told[:2]] == ['step 1', 'step 2']
  assert ' of 2 right' in told[2]
  expected = train.run(
    config,
    str(tmp_path),
    tasks=tasks,
    make_env=make_env,
    algorithm=algorithms.grpo(kl_coef=0.0),
    watcher=report.Watcher(),
  )
  plain.equal(params, expected)
  # The two steps have changed them.
  _, before = weights.load(config.model.path, dtype='float32')
  changed = jax.tree.map(lambda a, b: np.any(np.asarray(a) != b), params, before)
  assert all(jax.tree.leaves(changed))


def test_it_is_one_page_on_the_ground_floor():
  source = pathlib.Path(one_page.__file__).read_text()
  assert len(source.splitlines()) <= 150
  names = [
    f'{node.module}.{alias.name}'
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
  ]
  assert names
  for name in names:
    assert not name.startswith(tuple(f'agent_r1_jax.{room}' for room in _UPPER)), name
    assert name != 'agent_r1_jax.train.loop'
