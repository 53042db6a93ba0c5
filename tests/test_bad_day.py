"""The worst day in short, as a user runs it."""

import json

import script as script_lib


def test_everything_holds(tmp_path):
  """One of each thing is done to a run; docs/reliability.md has the long day."""
  workdir = tmp_path / 'day'
  done = script_lib.run(
    '-m',
    'experiments.bad_day',
    f'--workdir={workdir}',
    '--kills=1',
    '--terminations=1',
    '--interrupts=0',
    '--stops=1',
    '--fills=1',
    '--reach=6',
    # On a machine that does other work, too.
    '--answer=120',
    '--run=config.schedule.steps=3',
    '--run=config.schedule.tasks=4',
    '--run=config.schedule.samples=2',
    '--run=config.engine.rows=8',
    '--run=config.engine.prefill_rows=4',
    '--run=config.limits.reset_seconds=5',
    timeout=3000,
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  assert 'Everything holds.' in done.stdout
  report = json.loads((workdir / 'report.json').read_text())
  assert report['problems'] == []
  counted = report['counted']
  assert counted['status/error'] > 0 and counted['tool_errors'] > 0
  met = {kind['kind'] for kinds in report['outcomes'].values() for kind in kinds}
  assert met & {'kill', 'terminate'}


def test_the_same_faults_strike_in_every_process():
  code = (
    'from agent_r1_jax import types\n'
    'from experiments import bad_day_faults as faults\n'
    'print([faults.fault_of(types.Task(str(i), [])) for i in range(200)])'
  )
  first, second = (script_lib.run('-c', code).stdout for _ in range(2))
  assert first == second
  for place in ('tool', 'reward', 'reset', 'retriever'):
    assert f"'{place}'" in first
