"""The command that makes a base policy of a world, trains it and compares."""

import json

import script as script_lib

# So small that every program is compiled once, and nothing is learned.
SIZES = script_lib.QUICKSTART | {
  'engine.slots': 256,
  'engine.bucket': 256,
  'engine.decode_steps': 4,
  'batch.row_tokens': 256,
  'limits.max_turns': 2,
  'schedule.tasks': 2,
  'schedule.samples': 2,
  'schedule.steps': 1,
}


def learn(*flags):
  return script_lib.run(
    '-m',
    'experiments.worlds.learn',
    '--world=lake',
    '--held_out=4',
    '--watched=2',
    '--tasks=8',
    '--dim=96',
    '--layers=2',
    '--sft.steps=12',
    '--sft.rows=2',
    '--sft.warmup=5',
    *script_lib.config_flags(SIZES),
    *flags,
  )


def test_a_policy_is_made_trained_compared_and_measured(tmp_path):
  done = learn(f'--workdir={tmp_path}')
  assert done.returncode == 0, done.stderr[-3000:]
  table = json.loads((tmp_path / 'grpo' / 'table.json').read_text())
  assert [*table] == ['Base policy', 'GRPO']
  assert table['GRPO']['new_size']['all']['count'] == 4
  assert (tmp_path / 'base' / 'model' / 'model.safetensors').exists()
  # The base policy is not made again, and another algorithm writes beside the first.
  begun = (tmp_path / 'base' / 'log.jsonl').stat().st_mtime_ns
  others = ('--algorithm=rloo', '--kl_coef=0.01', '--lake_reward=sparse')
  done = learn(f'--workdir={tmp_path}', *others)
  assert done.returncode == 0, done.stderr[-3000:]
  assert (tmp_path / 'base' / 'log.jsonl').stat().st_mtime_ns == begun
  again = json.loads((tmp_path / 'rloo' / 'table.json').read_text())
  assert again['Base policy'] == table['Base policy'] and 'RLOO' in again
  done = learn(f'--workdir={tmp_path}', '--sft.learning_rate=0.1')
  assert done.returncode and 'sft.learning_rate: 0.002 there, 0.1 now' in done.stderr
  done = script_lib.run(
    '-m',
    'experiments.evaluate',
    '--task=lake',
    f'--workdir={tmp_path / "evaluate"}',
    f'--config.model.path={tmp_path / "grpo" / "model"}',
    '--limit=2',
    *script_lib.config_flags(SIZES),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert '| tools, new_maps' in done.stdout
  done = script_lib.run('-m', 'experiments.evaluate', '--task=lake')
  assert 'WORKDIR/grpo/model of experiments.worlds.learn' in done.stderr
