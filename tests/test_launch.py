"""The launchers: their syntax, what they would run, and the entry point's processes."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'
RUN = ('wikipedia.search', '--workdir=/shared/a', '--note=a "b" $c \\d')
# What each launcher cannot do without.
NEEDS = {
  'run.sh': {},
  'local.sh': {},
  'gpu_vm.sh': {'HOSTS': 'me@gpu-0 gpu-1'},
  'tpu_vm.sh': {
    'NAME': 'first',
    'ZONE': 'us-west4-a',
    'TYPE': 'v5litepod-16',
    'RUNTIME': 'v2-alpha-tpuv5-lite',
  },
  'slurm.sh': {'SLURM_GPUS_ON_NODE': '4', 'SLURM_JOB_ID': '17'},
  'kubernetes.sh': {
    'NAME': 'first',
    'IMAGE': 'my/image',
    'HOSTS': '2',
    'CLAIM': 'data',
    'DEVICES': '{nvidia.com/gpu: 8}',
  },
  'sky.sh': {'BUCKET': 'gs://mine', 'SKY': '--num-nodes=2'},
}


def launch(name, *arguments, path=None, cwd=None, launchers=LAUNCH, **variables):
  """Runs a launcher with nothing but these variables, and PATH."""
  environment = {'PATH': path or os.environ['PATH'], 'HOME': '/nowhere'} | variables
  return subprocess.run(
    [launchers / name, *arguments],
    cwd=cwd,
    env=environment,
    capture_output=True,
    text=True,
  )


@pytest.fixture(scope='module')
def bare_path(tmp_path_factory):
  """A PATH with everyday commands, and no launcher's tool to be called by mistake."""
  folder = tmp_path_factory.mktemp('bin')
  for name in ('bash', 'env', 'dirname', 'basename', 'mktemp', 'rm', 'seq', 'sleep'):
    (folder / name).symlink_to(shutil.which(name) or f'{name} is missing')
  return str(folder)


def dry_run(name, bare_path):
  done = launch(name, *RUN, path=bare_path, DRY_RUN='1', **NEEDS[name])
  assert done.returncode == 0, done.stderr
  return done.stdout


def commands(output):
  return [shlex.split(line) for line in output.splitlines()]


def test_shellcheck_finds_nothing():
  tool = pathlib.Path(sys.executable).parent / 'shellcheck'
  scripts = sorted(LAUNCH.glob('*.sh'))
  assert {script.name for script in scripts} == {*NEEDS, 'dry_run.sh', 'place.sh'}
  done = subprocess.run(
    [tool, '--external-sources', *scripts, ROOT / '.ci/run'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
  ('name', 'variables'),
  [
    ('gpu_vm.sh', ['HOSTS']),
    ('tpu_vm.sh', ['NAME', 'ZONE', 'TYPE', 'RUNTIME']),
    ('kubernetes.sh', ['NAME', 'IMAGE', 'CLAIM', 'DEVICES']),
    ('sky.sh', ['BUCKET']),
  ],
)
def test_what_is_missing_is_named(name, variables, bare_path):
  for variable in variables:
    rest = {key: value for key, value in NEEDS[name].items() if key != variable}
    done = launch(name, *RUN, path=bare_path, DRY_RUN='1', **rest)
    assert done.returncode != 0 and f'{variable}: ' in done.stderr


class TestDryRun:
  """No launcher calls a tool: the PATH has none."""

  def test_run(self, bare_path):
    (command,) = commands(dry_run('run.sh', bare_path))
    assert command[1:] == ['-m', f'experiments.{RUN[0]}', *RUN[1:]]

  def test_local(self, bare_path):
    make, python = commands(dry_run('local.sh', bare_path))
    assert make[0] == 'make' and make[-1] == '.venv/installed'
    assert python == ['.venv/bin/python', '-m', f'experiments.{RUN[0]}', *RUN[1:]]

  def test_gpu_vm(self, bare_path):
    archive, *rest = commands(dry_run('gpu_vm.sh', bare_path))
    assert archive[:2] == ['git', 'archive']
    copies = [command for command in rest if command[0] == 'scp']
    hosts = NEEDS['gpu_vm.sh']['HOSTS'].split()
    assert sorted(copy[-1] for copy in copies) == sorted(
      f'{host}:checkout.tar' for host in hosts
    )
    for i, host in enumerate(hosts):
      (remote,) = [command[2] for command in rest if command[:2] == ['ssh', host]]
      for variable in (
        'JAX_COORDINATOR_ADDRESS=gpu-0:8476',
        'JAX_NUM_PROCESSES=2',
        f'JAX_PROCESS_ID={i}',
        'EXTRA=cuda',
      ):
        assert variable in shlex.split(remote)
      assert experiment_in(remote) == [*RUN]

  def test_tpu_vm(self, bare_path):
    _, describe, create, copy, start = commands(dry_run('tpu_vm.sh', bare_path))
    tpus = ['gcloud', 'compute', 'tpus']
    for command in (describe, create, copy, start):
      assert command[:3] == tpus and '--zone=us-west4-a' in command
    assert create[3:6] == ['queued-resources', 'create', 'first']
    assert {'--node-id=first', '--accelerator-type=v5litepod-16', '--spot'} <= {*create}
    assert '--worker=all' in copy and '--worker=all' in start
    (remote,) = [a for a in start if a.startswith('--command=')]
    assert 'EXTRA=tpu' in shlex.split(remote) and 'JAX_' not in remote
    assert experiment_in(remote) == [*RUN]

  def test_slurm(self, bare_path):
    make, srun, requeue = commands(dry_run('slurm.sh', bare_path))
    assert make[-2:] == ['EXTRA=cuda', '.venv/installed']
    assert srun[0] == 'srun' and srun[-4:] == ['launch/run.sh', *RUN]
    assert requeue == ['scontrol', 'requeue', '17']

  def test_kubernetes(self, bare_path):
    output = dry_run('kubernetes.sh', bare_path)
    assert output.startswith('kubectl apply --filename=-\n')
    assert '${' not in output.replace('${}', '')
    jobset = yaml.safe_load(output.split('\n', 1)[1])
    check('jobset.json', jobset)
    job = jobset['spec']['replicatedJobs'][0]['template']['spec']
    (container,) = job['template']['spec']['containers']
    assert container['args'] == [*RUN]
    assert container['resources']['limits'] == {'nvidia.com/gpu': 8}
    variables = {e['name']: e.get('value') for e in container['env']}
    assert variables == {
      'JAX_COORDINATOR_ADDRESS': 'first-host-0-0.first:8476',
      'JAX_NUM_PROCESSES': '2',
      'JAX_PROCESS_ID': None,
    }
    assert job['parallelism'] == job['completions'] == 2

  def test_sky(self, bare_path):
    (command,) = commands(dry_run('sky.sh', bare_path))
    assert command[:3] == ['sky', 'jobs', 'launch'] and '--num-nodes=2' in command
    assert '--env=BUCKET=gs://mine' in command
    (run,) = [a for a in command if a.startswith('--env=RUN=')]
    assert shlex.split(run.removeprefix('--env=RUN=')) == [*RUN]


# How each launcher's output holds the words that end in launch/run.sh elsewhere.
WORDS = {
  'gpu_vm.sh': lambda out: experiment_in(
    next(c[2] for c in commands(out) if c[:2] == ['ssh', 'gpu-1'])
  ),
  'tpu_vm.sh': lambda out: experiment_in(
    next(word for word in commands(out)[-1] if word.startswith('--command='))
  ),
  'kubernetes.sh': lambda out: yaml.safe_load(out.split('\n', 1)[1])['spec'][
    'replicatedJobs'
  ][0]['template']['spec']['template']['spec']['containers'][0]['args'],
  'sky.sh': lambda out: shlex.split(
    next(
      word.removeprefix('--env=RUN=')
      for word in commands(out)[0]
      if word.startswith('--env=RUN=')
    )
  ),
}


class TestScriptsElsewhere:
  """What a path of a script becomes on machines that have a copy of the checkout."""

  @pytest.fixture
  def checkout(self, tmp_path):
    shutil.copytree(LAUNCH, tmp_path / 'checkout' / 'launch')
    (tmp_path / 'checkout' / 'mine').mkdir()
    (tmp_path / 'checkout' / 'mine' / 'a b.py').write_text('')
    (tmp_path / 'other.py').write_text('')
    return tmp_path / 'checkout'

  def dry(self, name, checkout, bare_path, cwd, *words):
    return launch(
      name,
      *words,
      path=bare_path,
      cwd=cwd,
      launchers=checkout / 'launch',
      DRY_RUN='1',
      **NEEDS[name],
    )

  @pytest.mark.parametrize('name', WORDS)
  @pytest.mark.parametrize(
    ('folder', 'path'),
    [('', 'mine/a b.py'), ('mine', 'a b.py'), ('launch', '../mine/a b.py')],
  )
  def test_one_of_the_checkout_is_called_by_its_place_in_it(
    self, checkout, bare_path, name, folder, path
  ):
    done = self.dry(name, checkout, bare_path, checkout / folder, path, '--x=1 2')
    assert done.returncode == 0 and done.stderr == ''
    assert WORDS[name](done.stdout) == ['mine/a b.py', '--x=1 2']

  @pytest.mark.parametrize('name', WORDS)
  def test_one_from_elsewhere_has_to_be_there(self, checkout, bare_path, name):
    outside = checkout.parent
    for path in ('/shared/mine.py', str(outside / 'other.py')):
      done = self.dry(name, checkout, bare_path, checkout, path)
      assert done.returncode == 0
      assert f'{path} is outside the checkout and is not copied' in done.stderr
      assert WORDS[name](done.stdout) == [path]
    for cwd, path in ((outside, 'other.py'), (checkout, 'none.py')):
      done = self.dry(name, checkout, bare_path, cwd, path)
      assert done.returncode == 2 and done.stdout == ''
      assert f'{cwd}/{path} is no file of this checkout' in done.stderr

  @pytest.mark.parametrize('name', ['gpu_vm.sh', 'tpu_vm.sh'])
  def test_what_is_not_committed_is_not_started(self, checkout, tmp_path, name):
    """With git itself, and in the place of the machines' tools one that leaves a mark."""
    tools = tmp_path / 'bin'
    tools.mkdir()
    for tool in ('ssh', 'scp', 'gcloud'):
      (tools / tool).write_text(f'#!/bin/sh\necho ACTIVE; touch {tmp_path}/called\n')
      (tools / tool).chmod(0o755)
    git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', checkout]
    for command in (['init', '-q'], ['add', 'launch'], ['commit', '-qm', 'x']):
      subprocess.run([*git, *command], check=True)
    start = lambda: launch(
      name,
      'mine/a b.py',
      path=f'{tools}:{os.environ["PATH"]}',
      cwd=checkout,
      launchers=checkout / 'launch',
      **NEEDS[name],
    )
    done = start()
    assert done.returncode == 2 and 'mine/a b.py is not in the last commit' in done.stderr
    assert not (tmp_path / 'called').exists()
    subprocess.run([*git, 'add', '.'], check=True)
    subprocess.run([*git, 'commit', '-qm', 'y'], check=True)
    done = start()
    assert done.returncode == 0 and (tmp_path / 'called').exists(), done.stderr

  def test_slurm_is_submitted_from_the_checkout(self, checkout, bare_path):
    done = self.dry('slurm.sh', checkout, bare_path, checkout, 'mine/a b.py')
    assert commands(done.stdout)[1][-2:] == ['launch/run.sh', 'mine/a b.py']
    done = self.dry('slurm.sh', checkout, bare_path, checkout.parent, 'mine/a b.py')
    assert done.returncode == 2 and 'submit the job from the checkout' in done.stderr


def experiment_in(remote):
  """The words after launch/local.sh, as the remote shell would split them."""
  return shlex.split(re.search(r'launch/local\.sh (.*)>>run\.log 2>&1$', remote)[1])


def check(schema, document):
  schema = json.loads((ROOT / 'tests/schemas' / schema).read_text())
  jsonschema.Draft202012Validator.check_schema(schema)
  jsonschema.Draft202012Validator(schema).validate(document)


def test_sky_task():
  task = yaml.safe_load((LAUNCH / 'sky.yaml').read_text())
  check('sky.json', task)
  assert task['resources']['job_recovery']['recover_on_exit_codes'] == [75]
  assert 'launch/run.sh $RUN' in task['run']
  for script in (task['setup'], task['run']):
    subprocess.run(['bash', '-n', '-c', script], check=True)


def test_container_file():
  lines = [
    line.split(maxsplit=1)
    for line in (LAUNCH / 'Containerfile').read_text().splitlines()
    if line and not line.startswith('#')
  ]
  words = [word for word, _ in lines]
  last = dict(lines)
  assert words.index('FROM') < words.index('USER') < words.index('ENTRYPOINT')
  assert last['USER'] == '1000'
  (entry,) = json.loads(last['ENTRYPOINT'])
  assert entry == f'{last["WORKDIR"]}/launch/run.sh'
  for line in (rest for word, rest in lines if word == 'COPY'):
    *sources, _ = [word for word in line.split() if not word.startswith('--')]
    assert all((ROOT / source).exists() for source in sources), line
  ignored = (ROOT / '.dockerignore').read_text().split()
  assert {'.git', '.venv', 'runs'} <= {*ignored}


TOY = """
import pathlib, signal, sys, time
log, status = pathlib.Path(sys.argv[1]), sys.argv[2]
log.open('a').write('x')

def saved(*_):
  time.sleep(0.3)
  sys.exit(75)

signal.signal(signal.SIGTERM, saved)
print('up', flush=True)
if status == 'killed':
  signal.raise_signal(signal.SIGKILL)
if status == 'waits':
  # In pieces: a signal just before a sleep begins is handled only when it ends.
  for _ in range(12000):
    time.sleep(0.1)
sys.exit(int(status))
"""


@pytest.fixture
def heard():
  """A shell's background job, as this suite may be, ignores Ctrl-C; bash keeps that."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


class TestEntryPoint:
  """launch/run.sh with real processes, in a checkout of its own with one experiment."""

  @pytest.fixture
  def start(self, tmp_path, heard):
    """Starts the toy, an experiment or a script; its `log` has one letter a start."""
    for folder, file in (('experiments', 'toy.py'), ('my project', 'mine.py')):
      (tmp_path / folder).mkdir()
      (tmp_path / folder / file).write_text(TOY)
    shutil.copytree(LAUNCH, tmp_path / 'launch')

    def start(status, *wrapper, name='toy', **variables):
      environment = os.environ | {'PYTHON': sys.executable, 'PAUSE': '0.1'} | variables
      environment.pop('PYTHONPATH', None)  # The experiments there are others.
      return subprocess.Popen(
        [*wrapper, tmp_path / 'launch/run.sh', name, tmp_path / 'log', status],
        cwd=tmp_path / 'my project',
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
      )

    return start

  def starts(self, tmp_path):
    return len((tmp_path / 'log').read_text())

  @pytest.mark.parametrize(
    ('name', 'status', 'restarts', 'ended', 'starts'),
    [
      ('toy', '0', '3', 0, 1),
      ('toy', '75', '0', 75, 1),
      ('toy', '75', '2', 75, 3),
      ('toy', '1', '1', 1, 2),
      ('toy', 'killed', '1', 128 + signal.SIGKILL, 2),
      ('mine.py', '75', '2', 75, 3),
      ('mine.py', '3', '0', 3, 1),
    ],
  )
  def test_status_and_restarts(
    self, start, tmp_path, name, status, restarts, ended, starts
  ):
    with start(status, name=name, RESTARTS=restarts) as process:
      _, said = process.communicate(timeout=600)
    assert (process.returncode, self.starts(tmp_path)) == (ended, starts)
    assert said.count(f'{name} ended with {ended}') == starts - 1

  @pytest.mark.parametrize('name', ['toy', 'mine.py'])
  @pytest.mark.parametrize('sent', [signal.SIGTERM, signal.SIGINT])
  @pytest.mark.parametrize('times', [1, 3])
  def test_a_signal_is_passed_on_and_nothing_restarted(
    self, start, tmp_path, name, sent, times
  ):
    with start('waits', name=name, RESTARTS='3') as process:
      assert process.stdout.readline() == 'up\n'
      for _ in range(times):
        process.send_signal(sent)
        time.sleep(0.05)
      assert process.wait(timeout=600) == 75
    assert self.starts(tmp_path) == 1

  def test_a_signal_to_the_whole_group(self, start, tmp_path):
    """As Slurm and a terminal's Ctrl-C do it."""
    with start('waits', RESTARTS='3') as process:
      assert process.stdout.readline() == 'up\n'
      os.killpg(process.pid, signal.SIGTERM)
      assert process.wait(timeout=600) == 75
    assert self.starts(tmp_path) == 1

  def test_a_signal_in_the_pause_ends_it(self, start, tmp_path):
    with start('75', RESTARTS='3', PAUSE='1200') as process:
      assert 'ended with 75' in process.stderr.readline()
      process.send_signal(signal.SIGTERM)
      assert process.wait(timeout=600) == 75
    assert self.starts(tmp_path) == 1

  def test_as_process_1_of_a_namespace(self, start, tmp_path):
    """As in a container, where a signal without a handler would be lost."""
    namespace = ('unshare', '--user', '--map-root-user', '--pid', '--fork')
    if not shutil.which('unshare') or subprocess.run([*namespace, 'true']).returncode:
      pytest.skip('this machine gives no process namespaces')
    with start('waits', *namespace, RESTARTS='3') as process:
      assert process.stdout.readline() == 'up\n'
      children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
      (first,) = children.read_text().split()  # process 1 of its namespace
      os.kill(int(first), signal.SIGTERM)
      assert process.wait(timeout=600) == 75
    assert self.starts(tmp_path) == 1

  @pytest.mark.parametrize('launcher', ['run.sh', 'local.sh'])
  def test_a_script_runs_where_its_user_is_and_imports_this_checkout(
    self, tmp_path, launcher
  ):
    """local.sh makes no environment: the checkout is a copy whose .venv is there."""
    checkout, folder = tmp_path / 'checkout', tmp_path / 'mine'
    shutil.copytree(LAUNCH, checkout / 'launch')
    (checkout / 'agent_r1_jax').mkdir()
    (checkout / 'agent_r1_jax' / '__init__.py').write_text('HERE = "the copy"')
    (checkout / 'Makefile').write_text('.venv/installed:\n\ttouch made\n')
    (checkout / '.venv' / 'bin').mkdir(parents=True)
    python = checkout / '.venv' / 'bin' / 'python'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / 'in').mkdir(parents=True)
    (folder / 'in' / 'mine.py').write_text(
      'import os, sys, agent_r1_jax\n'
      'print(os.getcwd(), agent_r1_jax.HERE, sys.argv[1:], sep="|")'
    )
    launchers = checkout / 'launch'
    words = ('in/mine.py', '--workdir=runs/a b')
    done = launch(launcher, *words, cwd=folder, launchers=launchers)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said == f"{folder}|the copy|['--workdir=runs/a b']"
    assert (checkout / 'made').exists() == (launcher == 'local.sh')
    done = launch(launcher, 'none.py', cwd=folder, launchers=launchers)
    assert done.returncode == 2 and f'no file {folder}/none.py' in done.stderr

  def test_without_an_experiment_it_lists_them(self):
    done = launch('run.sh')
    assert done.returncode == 2 and 'miniwiki.search' in done.stderr
    done = launch('run.sh', 'bench', DRY_RUN='1')
    assert '-m experiments.bench' in done.stdout
    done = launch('run.sh', 'miniwiki.serch', RESTARTS='3', PAUSE='0')
    assert (
      done.returncode == 2 and 'no experiment is called miniwiki.serch' in done.stderr
    )
    assert 'miniwiki.search' in done.stderr and 'restarts left' not in done.stderr
