"""The experiment beside other systems: this project's side of it, and the report."""

import json
import pathlib

import pytest
import script

ROOT = pathlib.Path(__file__).parents[1]


def test_this_projects_side_trains_and_counts(tmp_path):
  code = (
    'from absl import app; from agent_r1_jax import fields\n'
    'from experiments.miniwiki import shapes\n'
    f'shapes.CONFIG = fields.replace(shapes.CONFIG, {script.QUICKSTART})\n'
    'from experiments.beside import by_jax; app.run(by_jax.main)'
  )
  done = script.run('-c', code, f'--workdir={tmp_path}', '--steps=2', '--tasks=2')
  assert done.returncode == 0, done.stderr[-3000:]
  lines = [*map(json.loads, (tmp_path / 'steps.jsonl').read_text().splitlines())]
  assert [line['step'] for line in lines] == [1, 2, 2]
  assert all(0 <= line['em'] <= 1 and line['cpu_seconds'] > 0 for line in lines[:2])
  # No token of these episodes is computed twice.
  assert lines[2]['computed'] <= 1.02 * lines[2]['distinct']
  assert json.loads((tmp_path / 'cost.json').read_text())['peak_mb'] > 0
  assert (tmp_path / 'model' / 'model.safetensors').exists()


def test_report_draws_what_was_collected(tmp_path):
  out = tmp_path / 'beside'
  out.with_suffix('.jsonl').write_text(
    (ROOT / 'docs/results/beside_tables.jsonl').read_text()
  )
  done = script.run('-m', 'experiments.beside.report', f'--out={out}')
  assert done.returncode == 0, done.stderr[-3000:]
  assert (
    out.with_suffix('.md').read_text()
    == (ROOT / 'docs/results/beside_tables.md').read_text()
  )
  assert out.with_suffix('.png').stat().st_size > 10_000


def test_trl_trains_on_the_replies_as_they_were_sampled():
  pytest.importorskip('trl', reason='TRL has an environment of its own')
  from experiments.beside import by_trl

  text = 'a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>'
  messages = [(m['role'], m['content']) for m in by_trl.split_turns(text)]
  assert messages == [('assistant', 'a'), ('tool', 'b'), ('assistant', 'c')]
