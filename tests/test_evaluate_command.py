"""The command that measures a policy, as its users start it, on a tiny random model."""

import gzip
import json
import pathlib
import signal

import numpy as np
import pytest
import script as script_lib
import tiny

from agent_r1_jax.report import episodes
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.rollout import store as store_lib

# Ends the command as a kill does that cuts the fourth episode short on the disk.
KILLED = """
import os, signal
from absl import app
from agent_r1_jax.host import disk
from agent_r1_jax.rollout import store
from experiments import evaluate

def append(file, data, written=[], append=disk.append):
  written.append(data)
  append(file, data if len(written) < 4 else data[: len(data) // 2])
  if len(written) == 4:
    os.kill(os.getpid(), signal.SIGKILL)

disk.append = append
app.run(evaluate.main)
"""


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  stop = tiny.chat().stop_ids[0]
  return tiny.save(tmp_path_factory.mktemp('model') / 'model', likely={stop: 1.4})


def _flags(model, workdir: pathlib.Path, *flags: str) -> list[str]:
  small = {'rows': 8, 'prefill_rows': 8, 'prefill_tokens': 256, 'decode_steps': 16}
  return [
    *(f'--config.model.path={model}', f'--workdir={workdir}', '--limit=2'),
    *script_lib.one_program(slots=1024),
    *(f'--config.engine.{name}={value}' for name, value in small.items()),
    '--config.limits.max_turn_tokens=16',
    '--config.model.dtype=float32',
    *flags,
  ]


def _run(*commands: list[str]):
  return script_lib.run_in_turn('experiments.evaluate', *commands)


def _tokens(workdir: pathlib.Path) -> dict:
  """The tokens of every episode on the disk, by method, task and sample."""
  return {
    (path.parents[2].name, *key): [s['tokens'].tolist() for s in fields['segments']]
    for path in sorted(workdir.rglob('*.episodes'))
    for key, fields in store_lib._read(path)
  }


def test_a_command_that_was_killed_goes_on_as_if_it_had_not_been(model, tmp_path):
  data = tmp_path / 'rows.jsonl'
  rows = [{'question': f'What is {n} * 4?', 'answer': f'#### {4 * n}'} for n in range(3)]
  data.write_text('\n'.join(map(json.dumps, rows)))
  flags = ('--task=gsm8k', f'--data={data}', '--methods=direct,react', '--n=2')
  one, other = tmp_path / 'one', tmp_path / 'other'
  killed = script_lib.run('-c', KILLED, *_flags(model, one, *flags))
  assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
  assert len(before := _tokens(one)) == 3
  # Another configuration is refused, and names the field.
  other_flags = *flags, '--config.evaluation.temperature=0.5'
  resumed, whole, refused = _run(
    *(_flags(model, workdir, *flags) for workdir in (one, other)),
    _flags(model, one, *other_flags),
  )
  assert resumed.returncode == whole.returncode == 0, resumed.stderr + whole.stderr
  assert refused.returncode
  assert 'evaluation.temperature: 1.0 there, 0.5 now' in refused.stderr
  tokens = _tokens(one)
  assert tokens == _tokens(other) and len(tokens) == 2 * 2 * 2
  assert before.items() <= tokens.items()
  # What had ended was not played again: its file is as it was, and others were added.
  assert len(list((one / 'direct').rglob('*.episodes'))) == 2
  assert (one / 'table.md').read_text() == (other / 'table.md').read_text()
  assert (one / 'table.md').read_text().strip() in resumed.stdout
  results = json.loads((one / 'results.json').read_text())
  assert results['n'] == 2 and [*results['methods']] == ['direct', 'react']
  found = results['methods']['react']['']
  assert found['tasks'] == 2 and found['turns'] >= 1 and found['pass@2'] == found['best']
  played = episodes.read(one / 'episodes.jsonl')
  assert len(played) == 8 and {e['sample'] for e in played} == {0, 1}
  assert {e['id'].split('/')[0] for e in played} == {'direct', 'react'}
  asked = {e['id'][:3]: e['messages'][0]['content'] for e in played}
  assert 'Action Input:' in asked['rea'] and '"calculator"' in asked['rea']
  assert 'Action' not in asked['dir']


def test_questions_with_passages_are_answered_by_four_methods(model, tmp_path):
  names = ['Oslo', 'Bergen', 'Hamar']
  files = {
    'corpus': [{'id': n, 'title': n, 'text': f'{n} is a city.'} for n in names],
    'train': [
      {'id': n, 'question': f'What is {n}?', 'golden_answers': ['a city']} for n in names
    ],
  }
  for name, rows in files.items():
    with gzip.open(tmp_path / f'{name}.jsonl.gz', 'wt', encoding='utf-8') as file:
      file.writelines(json.dumps(row) + '\n' for row in rows)
  flags = '--task=musique', f'--data={tmp_path}'
  (done,) = _run(_flags(model, tmp_path / 'run', *flags))
  assert done.returncode == 0, done.stderr[-3000:]
  results = json.loads((tmp_path / 'run' / 'results.json').read_text())
  assert [*results['methods']] == ['direct', 'rag', 'react', 'tools']
  for sets in results['methods'].values():
    assert sets['']['tasks'] == 2 and np.isfinite(list(sets[''].values())).all()
  assert '| method |' in done.stdout and '[.000, .658] 0/2' in done.stdout
  played = episodes.read(tmp_path / 'run' / 'episodes.jsonl')
  (rag, *_) = [e for e in played if e['id'].startswith('rag/')]
  assert '(Title: ' in rag['messages'][0]['content']


def test_questions_without_passages_need_a_retriever(model, tmp_path):
  """Their file as its authors ship it, and an index of passages of others."""
  names = ['Oslo', 'Bergen', 'Hamar']
  index = bm25.BM25([documents.Document(n, n, f'{n} is a city.') for n in names])
  index.save(tmp_path / 'index')
  rows = ''.join(f'What is {name}?,a city\n' for name in names)
  (tmp_path / 'bamboogle.csv').write_text(f'Question,Answer\n{rows}')
  flags = '--task=bamboogle', f'--data={tmp_path / "bamboogle.csv"}'
  with_index = f'--retriever={tmp_path / "index"}', '--methods=rag'
  refused, done = _run(
    _flags(model, tmp_path / 'run', *flags),
    _flags(model, tmp_path / 'run', *flags, *with_index),
  )
  assert refused.returncode and 'what is searched' in refused.stderr
  assert done.returncode == 0, done.stderr[-3000:]
  (first, _) = episodes.read(tmp_path / 'run' / 'episodes.jsonl')
  assert 'is a city.' in first['messages'][0]['content']
