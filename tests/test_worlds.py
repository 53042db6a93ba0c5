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
  given = (
    '--world=lake',
    '--held_out=4',
    '--watched=2',
    '--tasks=8',
    '--dim=96',
    '--layers=2',
    '--sft.steps=12',
    '--sft.rows=2',
    '--sft.row_tokens=256',
    '--sft.warmup=5',
    *script_lib.config_flags(SIZES),
  )
  return script_lib.run_in_turn(
    'experiments.worlds.learn', *([*given, *x] for x in flags)
  )


def test_a_policy_is_made_trained_compared_and_measured(tmp_path):
  to = f'--workdir={tmp_path}'
  others = ['--algorithm=rloo', '--kl_coef=0.01']
  first, second, refused, masked, taught = learn(
    [to],
    [to, *others],
    [to, '--sft.learning_rate=0.1'],
    [to, '--advantage_mask=False'],
    [to, '--algorithm=distillation', '--kl_coef=0.01'],
  )
  assert first.returncode == 0, first.stderr[-3000:]
  table = json.loads((tmp_path / 'grpo' / 'table.json').read_text())
  assert [*table] == ['Base policy', 'GRPO']
  assert table['GRPO']['new_size']['all']['count'] == 4
  assert (tmp_path / 'base' / 'model' / 'model.safetensors').exists()
  # The base policy is not made again, and another algorithm writes beside the first.
  assert second.returncode == 0, second.stderr[-3000:]
  made, played = (tmp_path / x for x in ('base/log.jsonl', 'grpo/table.json'))
  assert made.stat().st_mtime_ns < played.stat().st_mtime_ns
  again = json.loads((tmp_path / 'rloo' / 'table.json').read_text())
  assert again['Base policy'] == table['Base policy'] and 'RLOO' in again
  assert refused.returncode
  assert 'sft.learning_rate: 0.002 there, 0.1 now' in refused.stderr
  assert 'advantage_mask' in masked.stderr and '--kl_coef' in taught.stderr
  flags = f'--config.model.path={tmp_path / "grpo" / "model"}', '--limit=2'
  flags += f'--workdir={tmp_path / "evaluate"}', *script_lib.config_flags(SIZES)
  commands = [['--task=lake', *flags], ['--task=lake']]
  done, refused = script_lib.run_in_turn('experiments.evaluate', *commands)
  assert done.returncode == 0, done.stderr[-3000:]
  assert '| tools, new_maps' in done.stdout
  assert 'WORKDIR/grpo/model of experiments.worlds.learn' in refused.stderr
