"""A task in the layout of HumanEval, and one in that of MBPP."""

import json

from confined import needs_sandbox  # noqa: F401

from agent_r1_jax.tasks import programming

HUMANEVAL = {
  'task_id': 'HumanEval/0',
  'prompt': 'def helper(x):\n  return 2 * x\n\ndef double(x):\n    """ 2 x """\n',
  'entry_point': 'double',
  'canonical_solution': '    return x + x\n',
  'test': 'def check(candidate):\n  assert candidate(helper(2)) == 8\n'
  '  assert candidate([1]) == [1, 1]\n',
}
MBPP = {
  'task_id': 7,
  'text': 'Write a function to double.',
  'code': 'def double(x):\n  return 2 * x',
  'test_list': ['assert double(2) == 4', "assert double('a') == 'aa'"],
  'test_setup_code': '',
}


def load(tmp_path, *rows):
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  load = programming.load_mbpp if 'text' in rows[0] else programming.load_humaneval
  return load(path)
