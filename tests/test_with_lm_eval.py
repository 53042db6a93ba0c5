"""lm-evaluation-harness scores a policy that is served: `make test-with-lm-eval`."""

import json
import os
import subprocess

import numpy as np
import pytest
import serving
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import tokenizer as tokenizer_lib

LM_EVAL = os.environ.get('PACKAGE_PYTHON')
MODEL = serving.ROOT / 'experiments' / 'miniwiki' / 'model'

# One token and several, likely ones and others; a choice that the policy would write.
ROWS = [
  {
    'question': 'In which country is Josnem?',
    'choices': ['Storki', 'Fassun', 'a'],
    'y': 0,
  },
  {'question': 'Who is the rector of Fassun College?', 'choices': ['x', 'Kipir'], 'y': 1},
  {'question': 'é漢😀: which?', 'choices': ['one of these', 'é漢', '😀'], 'y': 2},
] * 3
TASK = """
task: local_rows
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: y
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.mark.skipif(not LM_EVAL, reason='`make test-with-lm-eval` installs lm-eval')
@pytest.mark.parametrize(('tokenized', 'batch'), [('True', 4), ('False', 1)])
def test_log_likelihoods_are_the_learners(tmp_path, tokenized, batch):
  rows = tmp_path / 'rows.jsonl'
  rows.write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
  (tmp_path / 'local_rows.yaml').write_text(TASK.format(rows=rows))
  with serving.serve() as url:
    _evaluate(tmp_path, url, tokenized, batch)
  (log,) = tmp_path.glob('out/*/samples_*.jsonl')
  samples = [json.loads(line) for line in log.read_text().splitlines()]
  assert len(samples) == len(ROWS)
  (results,) = tmp_path.glob('out/*/results_*.json')
  found = json.loads(results.read_text())['results']['local_rows']['acc,none']
  right = []
  for sample in samples:
    row = sample['doc']
    scores = _score(f'Question: {row["question"]}\nAnswer:', row['choices'])
    for ((said, _),), expected in zip(sample['resps'], scores, strict=True):
      np.testing.assert_allclose(float(said), expected, rtol=1e-6, atol=5e-5)
    right.append(int(np.argmax(scores)) == row['y'])
  assert found == pytest.approx(np.mean(right))


def _evaluate(folder, url: str, tokenized: str, batch: int):
  model = {
    'model': 'policy',
    'base_url': f'{url}/v1/completions',
    'tokenizer': MODEL,
    'tokenizer_backend': 'huggingface',
    'tokenized_requests': tokenized,
    'num_concurrent': 2,
    'max_retries': 1,
  }
  arguments = ','.join(f'{name}={value}' for name, value in model.items())
  command = [LM_EVAL, '-m', 'lm_eval', 'run', '--model', 'local-completions']
  command += ['--model_args', arguments, '--tasks', 'local_rows']
  command += ['--include_path', folder, '--batch_size', str(batch)]
  command += ['--output_path', folder / 'out', '--log_samples']
  offline = {'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1', 'HF_HOME': str(folder)}
  done = subprocess.run(
    command, env=os.environ | offline, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr[-4000:]


def _score(context: str, choices: list[str]) -> list[float]:
  """The learner's log-likelihoods of choices; lm-eval moves the blank to the choice."""
  shape, params, _ = serving.policy()
  tokenizer = tokenizer_lib.load(MODEL)
  before = len(tokenizer.encode(context))
  ids = [np.int32(tokenizer.encode(f'{context} {choice}')) for choice in choices]
  segments = [types.Segment(x, x > -1, np.float32(0 * x)) for x in ids]
  learned = tiny.learned(params, segments, shape=shape)
  return [float(logprobs[before:].sum()) for logprobs in learned]
