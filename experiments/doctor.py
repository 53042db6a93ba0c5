"""Looks at the machine, the configuration and the environment before a run.

  python -m experiments.doctor --task=miniwiki --workdir=runs/quickstart
  python -m experiments.doctor --config.model.path=DIR --algorithm=ppo
  python -m experiments.doctor --config.model.path=qwen2.5-3b  # not downloaded yet
  python -m experiments.doctor --config.model.path=qwen2.5-3b --compile

A name of experiments/published.py stands for that model's shape. --compile asks the
compiler what the programs take, as a run does; without it the memory is counted from
shapes, within seconds. --task is one of those of experiments.evaluate, or empty; its
environment is played with scripted replies. The exit status is 1 if something fails. A
script with an environment of its own calls checks.doctor.examine (docs/seeing.md).
"""

import faulthandler
import sys

from absl import app, flags
from ml_collections import config_flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.checks import doctor
from agent_r1_jax.host import runtime
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train import sizes
from experiments import published, task_list

_TASK = flags.DEFINE_enum('task', '', ['', *task_list.TASKS], 'What is played.')
_DATA = flags.DEFINE_string('data', '', 'Its file or folder.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/new', 'Where the run would write.')
_ALGORITHMS = {'grpo': algorithms.grpo, 'ppo': algorithms.ppo}
_ALGORITHM = flags.DEFINE_enum('algorithm', 'grpo', [*_ALGORITHMS], 'The algorithm.')
_COMPILE = flags.DEFINE_bool('compile', False, 'Whether programs are compiled.')
_CFG = fields.define_flags(config_lib.Config())
# What holds the interpreter is ended by force, with the stacks.
_MOST_SECONDS = 900


def main(_):
  faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
  runtime.quiet_logging()
  config, playing = _CFG.value, {}
  if _TASK.value:
    source = task_list.Source(_DATA.value, config.model.path, 100)
    benchmark = task_list.TASKS[_TASK.value](source)
    given = config_flags.get_override_values(flags.FLAGS['config'])
    config = fields.replace(benchmark.config, given)
    methods = benchmark.methods
    sets, make_env = methods['tools' if 'tools' in methods else 'agent']
    tasks = [task for tasks in sets.values() for task in tasks]
    playing = {'tasks': tasks, 'make_env': make_env}
  playing['seconds'] = sizes.SECONDS if _COMPILE.value else 0.0
  algorithm = _ALGORITHMS[_ALGORITHM.value]()
  with published.make_directory(config.model.path) as path:
    config = fields.replace(config, {'model.path': path})
    findings = doctor.examine(config, _WORKDIR.value, algorithm, **playing)
  faulthandler.cancel_dump_traceback_later()
  sys.exit(doctor.show(findings))


if __name__ == '__main__':
  app.run(main)
