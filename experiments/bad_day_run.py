"""The run that `bad_day` disturbs: training on miniwiki with an environment of faults.

python -m experiments.bad_day_run --workdir=runs/visible --faults=visible
"""

import pathlib
import sys
import threading

from absl import app, flags, logging

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, report, train
from agent_r1_jax.rl import algorithms
from agent_r1_jax.tools import search
from experiments import bad_day_faults as faults
from experiments.miniwiki import tasks as miniwiki

BASE = pathlib.Path(__file__).parent / 'miniwiki' / 'model'

_WORKDIR = flags.DEFINE_string('workdir', 'runs/bad_day_run', 'Directory of the run.')
_FAULTS = flags.DEFINE_enum('faults', 'none', ['none', 'hidden', 'visible'], 'Faults.')
_CFG = fields.define_flags(
  config_lib.Config(
    model=config_lib.Model(path=str(BASE)),
    schedule=config_lib.Schedule(steps=32, tasks=8, samples=4, eval_every=2),
    limits=config_lib.Limits(
      max_turns=4, max_turn_tokens=60, reset_seconds=10.0, step_seconds=30.0
    ),
    optimizer=config_lib.Optimizer(learning_rate=3e-4),
    engine=config_lib.Engine(
      rows=32,
      slots=448,
      decode_steps=16,
      prefill_rows=16,
      prefill_tokens=32,
      # The last bits of a log-prob must not depend on how many rows are decoded
      # together, nor on how long they are: slow tools change both.
      bucket=448,
      narrow=False,
      replicas=1,
    ),
    batch=config_lib.Batch(microbatch=8, row_tokens=448),
    checkpoint=config_lib.Checkpoint(every=1, keep=2, keep_rollouts=True),
    max_error_rate=0.9,
  ),
)


def main(_):
  logging.set_verbosity(logging.WARNING)
  tool = search.search_tool(miniwiki.index(0), k=1, timeout=faults.LONG_SECONDS)
  # From here on signals are heard; what came before was imports and the index.
  print('begin', flush=True)
  train.run(
    _CFG.value,
    _WORKDIR.value,
    tasks=miniwiki.train_tasks(0, 512),
    make_env=faults.make_environment(_FAULTS.value, tool),
    algorithm=algorithms.grpo(kl_coef=0.0),
    evals={'dev': miniwiki.test_set('miniwiki-hotpot', 8, 0, 'dev')},
    label=_FAULTS.value,
    watcher=report.Watcher(),
  )
  hung = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
  print(f'end, with {len(hung)} other threads', file=sys.stderr, flush=True)


if __name__ == '__main__':
  app.run(main)
