"""Checks the machine, the configuration and the environment before a run.

  agent-r1-jax doctor --task=miniwiki --workdir=runs/quickstart
  agent-r1-jax doctor --config.model.path=DIR --algorithm=ppo
  agent-r1-jax doctor --config.model.path=qwen2.5-3b  # not downloaded yet
  agent-r1-jax doctor --config.model.path=qwen2.5-3b --compile
  agent-r1-jax doctor --config.model.path=qwen2.5-3b --topology=h100:1

A name in experiments/published.py, or a config.json, stands for that model's shape.
--compile compiles the programs to measure memory, as a run does; without it memory is
counted from shapes, within seconds. --topology compiles for hardware that you do not have
(experiments/bench/chips.py), of which JAX may use three quarters of a GPU's memory, or
what XLA_PYTHON_CLIENT_MEM_FRACTION and AGENT_R1_MEMORY_GB say. --task is a task of
experiments.evaluate, or empty; its environment is played with scripted replies. The exit
status is 1 if a check fails. For an environment of your own, call checks.doctor.examine
in your script (docs/monitoring.md).
"""

import faulthandler
import os
import sys

from absl import app, flags
from ml_collections import config_flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.checks import doctor
from agent_r1_jax.host import runtime
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train.plan import footprint, sizes
from experiments import model_formats, published, task_list
from experiments.bench import chips

_TASK = flags.DEFINE_enum('task', '', ['', *task_list.TASKS], 'What is played.')
_DATA = flags.DEFINE_string('data', '', 'Its file or folder.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/new', 'Where the run would write.')
_ALGORITHMS = {'grpo': algorithms.grpo, 'ppo': algorithms.ppo}
_ALGORITHM = flags.DEFINE_enum('algorithm', 'grpo', [*_ALGORITHMS], 'The algorithm.')
_COMPILE = flags.DEFINE_bool('compile', False, 'Whether programs are compiled.')
_TOPOLOGY = flags.DEFINE_string('topology', '', 'Chips that are not here, as h100:1.')
_CFG = fields.define_flags(config_lib.Config())
# Compilation limit for absent chips: longer than for a run, since nobody waits.
_ABSENT_SECONDS = 600.0
# After this, even code that holds the interpreter is killed, with its stacks printed.
_MOST_SECONDS = 900


def find_absent(topology: str, mesh: config_lib.Mesh) -> footprint.Machine:
  """Returns a topology's chips, as a run with this mesh would use them."""
  kind = topology.partition(':')[0]
  devices = chips.find(topology)
  chip = chips.CHIPS[kind]
  engine = chips.find(chips.name_part(kind, mesh.tensor))
  share = float(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.75'))
  memory = sizes.read_memory() or chip.memory * (share if chip.platform == 'gpu' else 1)
  training = len(devices) - mesh.samplers
  engines = max(1, (mesh.samplers or training) // mesh.tensor)
  return footprint.Machine(
    chip.platform,
    memory,
    training,
    engines,
    absent=tuple(devices),
    absent_engine=tuple(engine),
  )


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
  if _TOPOLOGY.value:
    playing['machine'] = find_absent(_TOPOLOGY.value, config.mesh)
    playing['seconds'] = _ABSENT_SECONDS
  else:
    playing['seconds'] = sizes.SECONDS if _COMPILE.value else 0.0
  algorithm = _ALGORITHMS[_ALGORITHM.value]()
  with published.make_directory(config.model.path) as path:
    config = fields.replace(model_formats.add(config), {'model.path': path})
    findings = doctor.examine(config, _WORKDIR.value, algorithm, **playing)
  faulthandler.cancel_dump_traceback_later()
  sys.exit(doctor.show(findings))


if __name__ == '__main__':
  app.run(main)
