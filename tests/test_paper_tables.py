"""The script of the paper's tables, in small, as a user runs it."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
METHODS = (
  'Naive RAG,ReAct prompting,Supervised fine-tuning,REINFORCE++,PPO (both masks off)'
)


def run(*flags):
  command = [sys.executable, '-m', 'experiments.paper_tables', *flags]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_every_kind_of_method_and_the_tables_of_what_is_there(tmp_path):
  small = (
    f'--out={tmp_path}',
    '--seeds=0',
    '--questions=4',
    '--config.steps=1',
    '--config.tasks=2',
    '--config.samples=2',
    '--config.rows=8',
    '--config.microbatch=2',
  )
  for methods in (METHODS, METHODS):
    done = run(*small, f'--methods={methods}')
    assert done.returncode == 0, done.stderr[-3000:]
  # The second time there was nothing left to do.
  assert done.stdout == ''
  results = (tmp_path / 'results.jsonl').read_text()
  lines = [json.loads(line) for line in results.splitlines()]
  assert [line['method'] for line in lines] == METHODS.split(',')
  for line in lines:
    assert len(line['sets']) == 3
    assert all(kinds['all']['count'] == 4 for kinds in line['sets'].values())
    assert line['seconds'] > 0
    assert len(line['rewards']) == (line['method'][:3] in ('REI', 'PPO'))
  another = [dict(line, seed=1) for line in lines if line['rewards']]
  for line in another:
    line['sets']['miniwiki-2wiki']['all']['mean'] = 1.0
  with (tmp_path / 'results.jsonl').open('a') as file:
    file.writelines(json.dumps(line) + '\n' for line in another)
  target = tmp_path / 'docs' / 'tables'
  done = run(f'--out={tmp_path}', f'--render={target}')
  assert done.returncode == 0, done.stderr[-3000:]
  text = target.with_suffix('.md').read_text()
  third, fourth = text.split('### Table 4: masks, all')
  assert '| REINFORCE++ ' in third and '| REINFORCE++ ' not in fourth
  assert '| PPO (both masks off) ' in fourth
  # Half of the way between two seeds, and Student's interval of two.
  first = lines[3]['sets']['miniwiki-2wiki']['all']['mean']
  half = 12.706 * abs(1 - first) / 2
  assert f'{(1 + first) / 2:.3f} ± {half:.3f}' in third
  assert target.with_suffix('.png').stat().st_size > 10_000
  assert len(target.with_suffix('.jsonl').read_text().splitlines()) == 7


def test_an_unknown_method_is_refused(tmp_path):
  done = run(f'--out={tmp_path}', '--methods=GRPO2')
  assert done.returncode != 0 and "['GRPO2']; there are" in done.stderr + done.stdout
