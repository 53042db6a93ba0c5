"""Likely mistakes, made as a user makes them: one line names the cause and the remedy.

A row is a change to a script that would train, or a command.
"""

import errno
import functools
import json
import os
import re
import shutil

import numpy as np
import pytest
from safetensors import numpy as files
import script
import tiny

from agent_r1_jax import config, fields
from agent_r1_jax.host import disk, terminal

_SCRIPT = '''
from absl import app, flags
from agent_r1_jax import config, fields, report, train, types
from agent_r1_jax.agent import env, tool
from agent_r1_jax.rl import algorithms, losses
CFG = fields.define_flags(config.Config(model=config.Model(path='tiny')))
WORKDIR = flags.DEFINE_string('workdir', 'runs/{name}', 'Where the run writes.')
def ask(*messages): return types.Task('1', list(messages), '12')
@tool.tool
def look(word: str) -> str:
  """Looks a word up.

  Args:
    word: The word.
  """
  return word
def reward(task, messages): return 1.0
def main(_):
  tasks, evals = [ask({{'role': 'user', 'content': '3 * 4?'}})], None
  make_env, algorithm = lambda: env.ToolEnv([look], reward), algorithms.grpo()
  {change}
  train.run(CFG.value, WORKDIR.value, tasks=tasks, evals=evals,
            make_env=make_env, algorithm=algorithm, watcher=report.Watcher())
app.run(main)
'''
# Flags of the script, separated by spaces -> what is said.
_FLAGS = {
  '--config.learningrate=1': 'no such field; did you mean optimizer.learning_rate',
  '--config.optimizer.learning_rate=fast': "could not convert string to float: 'fast'",
  '--wrokdir=x': 'Did you mean: workdir',
  'workdir=x': 'workdir=x: a flag begins with two hyphens: --workdir=x',
  '--workdir=': 'workdir is empty; name a directory',
  '--workdir=file': 'cannot be written to .*: give another workdir',
  '--config.sampling.temperature=0': 'sampling.temperature is 0: .* must be above 0',
  '--config.sampling.top_p=0.9': 'sampling: .* set them in evaluation only',
  '--config.chat.stop_strings=End': "is 'End'; it must be JSON such as",
  '--config.chat.tool_format=hermez': "is 'hermez'; give one of 'auto', 'hermes'",
  '--config.model.batch_invariant --config.model.lora_rank=4': 'leave out one of them',
  '--config.batch.row_tokens=64 --config.engine.slots=128': 'Raise it, or leave it 0',
  '--config.engine.rows=10000000': 'memory: .*fewer engine.rows',
  '--config.model.path=': 'model.path is empty; give the directory of a model',
  '--config.model.path=Qwen/Qwen3-4B': 'no such directory.* Names of the Hub are not',
  '--config.model.path=tiny/model.safetensors': 'is a file; give the directory',
  '--config.model.path=adapter': 'holds adapters only; give the merged model',
  '--config.model.path=pickled': 'has neither model.safetensors .* convert',
  '--config.model.path=cut': 'no safetensors file .* truncated.* fetch it again',
  '--config.model.path=mixtral': "is 'mixtral'; supported are qwen2",
  '--config.model.path=no_tokenizer': 'tokenizer.json cannot be read .* copy it',
  '--config.model.path=not_a_number': 'are not finite: the training that wrote them',
}
# A line of the script -> what is said.
_CHANGES = {
  "CFG.value.chat.template = '[' * 100000": 'it must be JSON such as',
  "tasks = ['hello']": r"tasks\[0\] is 'hello'; it must be a types.Task, such as",
  "tasks = 'train.jsonl'": "tasks is 'train.jsonl'; it must be a list of types.Task",
  'tasks = []': 'tasks is empty: give at least one',
  "tasks = [types.Task('1', 'hello', '12')]": "messages is 'hello'; it must be a list",
  "tasks = [ask({'role': 'user'})]": "'user' has no content; it must be a string",
  "tasks = [ask({'role': 'user', 'content': ['x']})]": r'is no part of a message: give',
  "tasks = [ask({'role': 'user', 'content': 'x y ' * 9000})]": 'Raise engine.slots, sho',
  'evals = tasks': 'evals is .*; it must be a dict of sets by their names',
  "evals = {'dev': []}": r"evals\['dev'\] is empty: give tasks to evaluate, or drop it",
  'make_env = make_env()': 'it must be a function that gives a new environment',
  'make_env = env.ToolEnv': r'make_env is called as make_env\(\), but it has the param',
  'make_env = lambda: None': 'make_env gave None; it must give an environment',
  'make_env = lambda: env.ToolEnv([reward], reward)': 'not a Tool; decorate it with @t',
  'make_env = lambda: env.ToolEnv(look, reward)': r'it must be a list: \[my_tool\]',
  'make_env = lambda: env.ToolEnv([look], 1.0)': 'reward is 1.0; it must be a function',
  'make_env = lambda: env.ToolEnv([look, look], reward)': 'tools: two have one name',
  'make_env = lambda: env.ToolEnv([look], len)': r'called as reward\(task, messages\)',
  'algorithm = algorithms.grpo': 'algorithm is <function grpo.*such as algorithms.grpo',
  'algorithm = algorithm._replace(loss=losses.cispo)': r'as algorithm.loss\(stats, bat',
  'env.ToolEnv.least_limits = lambda *_: {"step_seconds": 999}': (
    r"limits.step_seconds is 300, and tasks\[0\] \('1'\) needs 999: raise it"
  ),
  'tool.tool(lambda x: x)': 'no docstring.*fix its signature or docstring',
  'raise ModuleNotFoundError(name="nbclient")': "pip install 'nbclient==",
  # A file of at most 2,000 bytes stands for a full disk; what is printed takes fewer.
  '__import__("resource").setrlimit(1, (2000, 2000))': (
    r'py:\d+: The configuration could not be written .* the disk is full .*Make room'
  ),
}
_ENVIRONMENTS = {
  'AGENT_R1_MEMORY_GB=lots': "is 'lots'; give a number of GB above 0",
  'AGENT_R1_GRACE_SECONDS=soon': "='soon': must be a number of seconds",
  'JAX_NUM_PROCESSES=2': 'JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID must be set too',
  'JAX_PLATFORMS=cuda': 'no device of JAX_PLATFORMS=cuda: install its build',
}
_COMMANDS = {
  'agent_r1_jax.report.episodes missing': 'missing cannot be read: No such file',
  'agent_r1_jax.report.episodes tiny': r'tiny is a folder without logs \(\*.jsonl\)',
  'agent_r1_jax.report.episodes file': 'file, line 1 is no episode',
  'experiments.evaluate --task=chess': 'value should be one of <miniwiki|hotpotqa',
  'experiments.evaluate --task=gsm8k': '--data: the file of the rows is missing',
  'experiments.evaluate --task=gsm8k --data=none.jsonl': 'there is no such file; give',
  'experiments.evaluate --task=gsm8k --data=bad.jsonl': 'line 1 .* fix or drop it',
  'experiments.evaluate --task=miniwiki --methods=x': 'no x; give workflow, direct',
  'experiments.problems --task=gsm8k --data=one.jsonl': 'of 1 tasks: hold out fewer',
  'experiments.serve --host=192.0.2.1': 'nothing can listen at 192.0.2.1:8000',
  'experiments.serve --port=99999': 'port=99999: .* integer in the range',
  'experiments.bench --shape=none': r'shape=none: value should be one of <tiny',
  'experiments.bench --what=none': r"--what: \['none'\]; there are \['sampling'",
  'experiments.report --workdir=tiny': 'has no metrics.jsonl .* finished its first',
  'experiments.plot typo=none-*': 'give LABEL=PATTERN',
  'experiments.serve_retriever --index=none': 'there is no such file; give another',
  'experiments.tables none': 'none has no table.json: it is no workdir',
  'third_party.fetch x': "no entry 'x'; there are hotpotqa",
}
_ROWS = {**_FLAGS, **_CHANGES, **_ENVIRONMENTS, **_COMMANDS}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Has a model, and copies that are broken in one way each."""
  folder = tmp_path_factory.mktemp('mistakes')
  tiny.save(folder / 'tiny')
  copies = 'adapter', 'pickled', 'cut', 'mixtral', 'no_tokenizer', 'not_a_number'
  adapter, pickled, cut, mixtral, no_tokenizer, nan = (folder / copy for copy in copies)
  for copy in copies:
    shutil.copytree(folder / 'tiny', folder / copy)
  (adapter / 'config.json').rename(adapter / 'adapter_config.json')
  (pickled / 'model.safetensors').rename(pickled / 'pytorch_model.bin')
  os.truncate(cut / 'model.safetensors', 500)
  settings = json.loads((mixtral / 'config.json').read_text())
  text = json.dumps(settings | {'model_type': 'mixtral'})
  (mixtral / 'config.json').write_text(text)
  (no_tokenizer / 'tokenizer.json').unlink()
  tensors = files.load_file(nan / 'model.safetensors')
  tensors['model.norm.weight'] = np.full_like(tensors['model.norm.weight'], np.nan)
  files.save_file(tensors, nan / 'model.safetensors', {'format': 'pt'})
  (folder / 'file').write_text('text')
  (folder / 'bad.jsonl').write_text('{')
  row = {'question': '10 * 4?', 'answer': '#### 40'}
  (folder / 'one.jsonl').write_text(json.dumps(row))
  return folder


@pytest.mark.parametrize('row', _ROWS)
def test_a_mistake_is_named_with_its_mend(row, folder):
  name = f'script{[*_ROWS].index(row)}'
  environment = dict([row.split('=')]) if row in _ENVIRONMENTS else {}
  if row in _COMMANDS:
    command = ['-m', *row.split()]
  else:
    text = _SCRIPT.format(name=name, change=row if row in _CHANGES else 'pass')
    (folder / f'{name}.py').write_text(text)
    # Nothing runs for ever where a mistake is not seen.
    command = [f'{name}.py', '--config.schedule.steps=1']
    command += row.split() if row in _FLAGS else []
  done = script.run(*command, cwd=folder, timeout=120, **environment)
  assert done.returncode in (1, 2), done.stderr
  assert 'Traceback' not in done.stderr
  assert re.search(_ROWS[row], done.stderr, re.DOTALL), done.stderr


def test_a_refusal_names_the_line_of_the_script(capsys):
  """Not that of a library through which the script called us."""
  names = {}
  library = '/environment/lib/site-packages/jax/profiler.py'
  exec(compile('def call(f): f()', library, 'exec'), names)
  refused = functools.partial(fields.replace, config.Config(), {'x': 1})
  with pytest.raises(ValueError) as caught:
    names['call'](refused)
  terminal._print_error(caught.type, caught.value, caught.tb)
  assert capsys.readouterr().err.startswith(f'{__file__}:')


@pytest.mark.parametrize('cause', [None, ValueError('Orbax')])
def test_a_full_disk_is_one_line_and_a_failed_call_is_not(cause, tmp_path, capsys):
  with pytest.raises(OSError) as full, disk.explain_write_errors(tmp_path, 'The model'):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  full.value.__cause__ = cause
  terminal._print_error(full.type, full.value, full.tb)
  (line,) = capsys.readouterr().err.splitlines()
  assert re.match(rf'{re.escape(__file__)}:\d+: The model could not be', line)
  with pytest.raises(OSError) as failed:
    (tmp_path / 'none' / 'file').write_text('')
  terminal._print_error(failed.type, failed.value, failed.tb)
  assert 'Traceback' in capsys.readouterr().err


def test_help_shows_the_flags_that_scripts_share_and_where_the_fields_are():
  shown = script.run('-m', 'experiments.wikipedia.search', '--help', timeout=120).stdout
  for text in ('--config: Each field is a flag', '--[no]help_config', '--held_out'):
    assert text in shown
  assert shown.count('\n') < 60
