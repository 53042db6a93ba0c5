r"""Trains an agent on task directories (contrib/harbor), or checks them.

  python -m experiments.directories --data=my-tasks --check_only
  python -m experiments.directories --data=my-tasks --workdir=runs/mine \
    --config.model.path=Qwen2.5-Coder-3B-Instruct

Before a run every task is played twice: its solution must score 1, and doing nothing 0.
If tasks fail, they are named and nothing is trained.

The agent has the shell tool; with `--mini=PATH`, the path of mini-swe-agent's command
`mini`, that agent plays instead (contrib/harbor/mini_swe_agent.py). `--watched` of the
tasks are evaluated instead of trained on.
"""

import time

from absl import app, flags

from agent_r1_jax import fields
from agent_r1_jax.contrib.harbor import directories, mini_swe_agent
from agent_r1_jax.host import runtime
from agent_r1_jax.serve import program
from agent_r1_jax.train import preflight, task_checks
from experiments import comparison, task_list

_DATA = flags.DEFINE_string('data', None, 'A folder of tasks.', required=True)
_CHECK_ONLY = flags.DEFINE_bool(
  'check_only', False, 'Check the tasks, and train nothing.'
)
_WORKERS = flags.DEFINE_integer('workers', 2, 'Tasks that are checked at a time.', 1)
_MINI = flags.DEFINE_string('mini', '', 'The command of mini-swe-agent, if it plays.')
_WATCHED = flags.DEFINE_integer('watched', 20, 'Tasks to watch the training with.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/directories', 'Where the run writes.')
_CFG = fields.define_flags(task_list.DIRECTORIES)


def main(_):
  runtime.quiet_logging()
  tasks = task_list.shuffle(directories.load(_DATA.value))
  make_env = directories.DirectoryEnv
  if _MINI.value:
    play = mini_swe_agent.make_run(_MINI.value)
    make_env = lambda: program.Program(play)
  if not _CHECK_ONLY.value:  # Before the check, which takes long.
    with preflight.open_environment(make_env, _CFG.value.limits) as env:
      task_checks.check_times(env, {'tasks': tasks}, _CFG.value.limits)
  start = time.monotonic()
  faults = directories.check(tasks, workers=_WORKERS.value)
  seconds = time.monotonic() - start
  for name, reason in faults.items():
    print(f'{name}: {reason}')
  print(f'{len(tasks) - len(faults)} of {len(tasks)} tasks are right; {seconds:.0f} s')
  if faults:
    raise SystemExit(1)
  if _CHECK_ONLY.value:
    return
  comparison.train_on_rest(_CFG.value, _WORKDIR.value, tasks, make_env, _WATCHED.value)


if __name__ == '__main__':
  app.run(main)
