"""The experiment on problems that can be verified, as its users start it."""

import json

from confined import needs_sandbox  # noqa: F401
import pytest
import script as script_lib
import tiny

ROWS = {
  'gsm8k': {'question': 'What is 10 * 4?', 'answer': '#### 40'},
  'mbpp': {'text': 'Write a function to double.', 'test_list': ['assert double(2) == 4']},
}


@pytest.mark.usefixtures('needs_sandbox')
@pytest.mark.parametrize('task', ['gsm8k', 'mbpp'])
def test_a_model_is_measured_before_and_after_its_training(task, tmp_path):
  data, workdir = tmp_path / 'rows.jsonl', tmp_path / 'run'
  data.write_text('\n'.join(json.dumps(ROWS[task] | {'task_id': n}) for n in range(8)))
  fields = {
    'model.path': tiny.save(tmp_path / 'model'),
    'engine.rows': 4,
    'engine.slots': 1024,
    'engine.bucket': 1024,
    'engine.narrow': False,
    'engine.prefill_tokens': 256,
    'engine.replicas': 1,
    'batch.microbatch': 1,
    'limits.max_turn_tokens': 16,
    'schedule.steps': 1,
    'schedule.tasks': 2,
    'schedule.samples': 2,
    'schedule.eval_every': 0,
  }
  done = script_lib.run(
    *('-m', 'experiments.problems', f'--task={task}', f'--data={data}'),
    *(f'--workdir={workdir}', '--held_out=3', '--watched=1'),
    *(f'--config.{name}={value}' for name, value in fields.items()),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  table = json.loads((workdir / 'table.json').read_text())
  assert [*table] == ['Direct answer', 'Base Tool Call', 'GRPO']
  assert all(row['right']['all']['count'] == 3 for row in table.values())
  assert (workdir / 'table.md').read_text().strip() in done.stdout
  log = max((workdir / 'trajectories').iterdir())
  text = log.read_text()
  assert {'gsm8k': 'Use the calculator', 'mbpp': 'the python tool'}[task] in text
