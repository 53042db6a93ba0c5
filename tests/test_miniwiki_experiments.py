"""The quickstart's two scripts, in small, as a user runs them."""

import json

import pytest
import script as script_lib

from agent_r1_jax.agent import tokenizer
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.models.files import weights


def run(script, *flags):
  return script_lib.run('-m', f'experiments.{script}', *flags)


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  out = tmp_path_factory.mktemp('base')
  done = run(
    'miniwiki.pretrain',
    f'--out={out}',
    '--dim=96',
    '--layers=2',
    '--examples=200',
    '--sft.steps=12',
    '--sft.rows=4',
    '--sft.warmup=5',
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return out


def test_pretraining_writes_a_policy_whose_loss_falls(base):
  log = [json.loads(line) for line in (base / 'log.jsonl').read_text().splitlines()]
  assert [line['step'] for line in log] == list(range(1, 13))
  # The first steps copy; then reading begins anew.
  assert log[-1]['loss'] < max(line['loss'] for line in log) - 1
  config, params = weights.load(base / 'model')
  assert config.vocab_size == len(tokenizer.load(base / 'model'))
  assert params['embed']['embedding'].shape == (config.vocab_size, 96)


def test_the_quickstart_writes_its_files_and_goes_on_with_more_steps(tmp_path):
  flags = (
    f'--workdir={tmp_path}',
    '--questions=4',
    '--watched=2',
    '--config.schedule.tasks=2',
    '--config.schedule.samples=3',
    *script_lib.config_flags(script_lib.QUICKSTART),
    '--config.limits.max_turn_tokens=32',
    '--config.schedule.eval_every=1',
    # Of so few episodes all may earn the same: decay changes the policy all the same.
    '--config.optimizer.weight_decay=0.1',
  )
  commands = ((*flags, f'--config.schedule.steps={n}') for n in (1, 2))
  done, again = script_lib.run_in_turn('experiments.miniwiki.search', *commands)
  assert done.returncode == again.returncode == 0, (done.stderr + again.stderr)[-3000:]
  rows = [
    {
      line.split('|')[1].strip(): line
      for line in run.stdout.splitlines()
      if line.startswith('|')
    }
    for run in (done, again)
  ]
  for row in ('Direct answer', 'Naive RAG', 'Base Tool Call', 'GRPO'):
    assert row in rows[0]
    # The baselines are those of before; the policy has changed, and is played again.
    assert row == 'GRPO' or rows[0][row] == rows[1][row]
  assert len(list((tmp_path / 'episodes').iterdir())) == 3
  names = ('curve.png', 'numbers.md', 'table.md', 'config.json', 'metrics.jsonl', 'model')
  for name in names:
    assert (tmp_path / name).exists(), name
    assert name in done.stdout or name == 'config.json'
  assert len(list((tmp_path / 'trajectories').glob('step-00001-*.jsonl'))) == 4
  table = json.loads((tmp_path / 'table.json').read_text())
  assert table['GRPO']['miniwiki-2wiki']['all']['count'] == 4
  lines = [
    json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [line['step'] for line in lines] == [0, 1, 2]
  # The first line is an evaluation without update; of a CPU no peak is known.
  assert ['machine/update_tflops' in line for line in lines] == [False, True, True]
  assert not any('machine/mfu' in line for line in lines)


def test_a_reward_model_is_trained_measured_and_saved(tmp_path):
  """Of the quickstart's own base, which answers a quarter of the questions."""
  sizes = script_lib.config_flags(script_lib.QUICKSTART)
  done = run(
    'train_reward_model',
    f'--workdir={tmp_path / "fitted"}',
    '--config.schedule.tasks=8',
    '--config.schedule.samples=4',
    '--config.schedule.steps=2',
    *sizes,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'training tasks: 24 trajectories' in done.stdout
  assert 'held-out tasks: 8 trajectories' in done.stdout
  found = implicit_value.read(tmp_path / 'fitted' / 'model')
  assert f'AUC {found["auc"]:.3f}' in done.stdout
