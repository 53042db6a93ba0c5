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
def test_a_model_is_measured_before_and_after_its_training(tmp_path):
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
  flags = ['--held_out=3', '--watched=1', *script_lib.config_flags(fields)]
  commands = []
  for task, row in ROWS.items():
    data = tmp_path / f'{task}.jsonl'
    data.write_text('\n'.join(json.dumps(row | {'task_id': n}) for n in range(8)))
    given = f'--task={task}', f'--data={data}', f'--workdir={tmp_path / task}'
    commands.append([*given, *flags])
  runs = script_lib.run_in_turn('experiments.problems', *commands)
  for task, done in zip(ROWS, runs, strict=True):
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads((tmp_path / task / 'table.json').read_text())
    assert [*table] == ['Direct answer', 'Base Tool Call', 'GRPO']
    assert all(row['right']['all']['count'] == 3 for row in table.values())
    assert (tmp_path / task / 'table.md').read_text().strip() in done.stdout
    text = max((tmp_path / task / 'trajectories').iterdir()).read_text()
    assert {'gsm8k': 'Use the calculator', 'mbpp': 'the python tool'}[task] in text
