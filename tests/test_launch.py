"""The launchers: their syntax, what they would run, and the entry point's processes."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jsonschema
import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'
VENV = str(pathlib.Path(sys.executable).parents[1])
RUN = ('wikipedia.search', '--workdir=/shared/a', '--note=a "b" $c \\d')
# What each launcher cannot do without.
NEEDS = {
  'run.sh': {},
  'local.sh': {},
  'gpu_vm.sh': {'HOSTS': 'me@gpu-0 gpu-1'},
  'tpu_vm.sh': {'NAME': 'first', 'ZONE': 'us-west4-a', 'TYPE': 'v5litepod-16'},
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


def stub_tools(folder, names, script):
  """Makes programs of these names, and a `make` for which everything is up to date."""
  folder.mkdir()
  for name in names:
    (folder / name).write_text(f'#!/bin/sh\n{script}\n')
    (folder / name).chmod(0o755)
  (folder / 'make').symlink_to('/bin/true')
  return folder


def dry_run(name, bare_path, **variables):
  done = launch(name, *RUN, path=bare_path, DRY_RUN='1', **NEEDS[name] | variables)
  assert done.returncode == 0, done.stderr
  return done.stdout


def commands(output):
  return [shlex.split(line) for line in output.splitlines()]


def remote_commands(output, folder):
  """The commands after the check on this machine, which is asserted."""
  make, check, *rest = commands(output)
  assert make[0] == 'make'
  module = ['-m', f'experiments.{RUN[0]}', *RUN[1:]]
  assert check[1:] == [str(LAUNCH / 'check.py'), f'--check={folder}', *module]
  return rest


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
    ('tpu_vm.sh', ['NAME', 'ZONE', 'TYPE']),
    ('kubernetes.sh', ['NAME', 'IMAGE', 'CLAIM', 'DEVICES']),
    ('sky.sh', ['BUCKET']),
  ],
)
def test_a_launcher_without_a_variable_names_it(name, variables, bare_path):
  for variable in variables:
    rest = {key: value for key, value in NEEDS[name].items() if key != variable}
    done = launch(name, *RUN, path=bare_path, DRY_RUN='1', **rest)
    assert done.returncode != 0 and f'{variable}: ' in done.stderr


class TestDryRun:
  """No launcher calls a tool: the PATH has none."""

  def test_local_launchers_call_python_with_the_experiment_and_its_words(self, bare_path):
    experiment = ['-m', f'experiments.{RUN[0]}', *RUN[1:]]
    (command,) = commands(dry_run('run.sh', bare_path))
    assert command[1:] == experiment
    make, python = commands(dry_run('local.sh', bare_path))
    assert make[0] == 'make' and make[-1] == '.venv/installed'
    assert python == ['.venv/bin/python', *experiment]

  def test_gpu_vms_get_the_checkout_and_one_process_each(self, bare_path):
    archive, *rest = remote_commands(dry_run('gpu_vm.sh', bare_path), '/')
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

  def test_a_tpu_slice_is_created_and_all_its_workers_start(self, bare_path):
    output = dry_run('tpu_vm.sh', bare_path)
    _, describe, create, copy, start = remote_commands(output, '/')
    tpus = ['gcloud', 'compute', 'tpus']
    for command in (describe, create, copy, start):
      assert command[:3] == tpus and '--zone=us-west4-a' in command
    assert create[3:6] == ['queued-resources', 'create', 'first']
    assert {'--node-id=first', '--accelerator-type=v5litepod-16', '--spot'} <= {*create}
    assert '--runtime-version=v2-alpha-tpuv5-lite' in create
    assert '--worker=all' in copy and '--worker=all' in start
    (remote,) = [a for a in start if a.startswith('--command=')]
    assert 'EXTRA=tpu' in shlex.split(remote) and 'JAX_' not in remote
    assert experiment_in(remote) == [*RUN]

  def test_flex_start_has_a_duration_and_gclouds_alpha(self, bare_path):
    output = dry_run('tpu_vm.sh', bare_path, FLEX_START='8h')
    create = remote_commands(output, '/')[2]
    assert create[:6] == 'gcloud alpha compute tpus queued-resources create'.split()
    assert {'--provisioning-model=flex-start', '--max-run-duration=8h'} <= {*create}
    assert '--spot' not in create

  def test_several_slices_are_one_request_and_all_their_workers_start(self, bare_path):
    output = dry_run('tpu_vm.sh', bare_path, SLICES='2', TYPE='v6e-16')
    _, _, create, copy, start = remote_commands(output, '/')
    assert {'--node-count=2', '--node-prefix=first'} <= {*create}
    assert '--runtime-version=v2-alpha-tpuv6e' in create
    for command, verb in ((copy, 'scp'), (start, 'ssh')):
      assert command[3:5] == ['queued-resources', verb]
      assert {'--node=all', '--worker=all'} <= {*command}

  @pytest.mark.parametrize(
    ('variables', 'image'),
    [
      ({'TYPE': 'v5p-8'}, 'v2-alpha-tpuv5'),
      ({'TYPE': 'v4-8'}, 'tpu-ubuntu2204-base'),
      ({'TYPE': 'tpu7x-8', 'RUNTIME': 'new'}, 'new'),
    ],
  )
  def test_the_image_follows_the_type(self, bare_path, variables, image):
    output = dry_run('tpu_vm.sh', bare_path, **variables)
    assert f'--runtime-version={image}' in remote_commands(output, '/')[2]

  def test_a_type_without_an_image_says_what_to_do(self, bare_path):
    for kind, message in (('tpu7x-8', 'launch/kubernetes.sh'), ('v9-8', 'Set RUNTIME')):
      variables = NEEDS['tpu_vm.sh'] | {'TYPE': kind}
      done = launch('tpu_vm.sh', *RUN, path=bare_path, DRY_RUN='1', **variables)
      assert done.returncode == 2 and message in done.stderr and done.stdout == ''

  def test_slurm_outside_of_a_job_submits_it(self, bare_path):
    variables = {'SLURM_JOB_ID': '', 'SBATCH': '--nodes=2'}
    (sbatch,) = remote_commands(dry_run('slurm.sh', bare_path, **variables), '')
    assert sbatch == ['sbatch', '--nodes=2', 'launch/slurm.sh', *RUN]

  def test_slurm_runs_in_the_job_and_requeues_it(self, bare_path):
    make, srun, requeue = commands(dry_run('slurm.sh', bare_path))
    assert make[-2:] == ['EXTRA=cuda', '.venv/installed']
    assert srun[0] == 'srun' and srun[-4:] == ['launch/run.sh', *RUN]
    assert requeue == ['scontrol', 'requeue', '17']

  def test_kubernetes_gets_a_valid_jobset_of_both_hosts(self, bare_path):
    output = dry_run('kubernetes.sh', bare_path)
    before, apply, document = output.partition('kubectl apply --filename=-\n')
    assert apply and remote_commands(before, '/shared') == []
    assert '${' not in document.replace('${}', '')
    jobset = yaml.safe_load(document)
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

  def test_sky_gets_the_experiment_in_a_variable(self, bare_path):
    (command,) = remote_commands(dry_run('sky.sh', bare_path), '/shared')
    assert command[:3] == ['sky', 'jobs', 'launch'] and '--num-nodes=2' in command
    assert '--env=BUCKET=gs://mine' in command
    assert words_of('sky.sh', dry_run('sky.sh', bare_path)) == [*RUN]


def words_of(name, output):
  """The words that end in launch/run.sh elsewhere, from a launcher's output."""
  if name == 'kubernetes.sh':
    document = output.partition('kubectl apply --filename=-\n')[2]
    (job,) = yaml.safe_load(document)['spec']['replicatedJobs']
    (container,) = job['template']['spec']['template']['spec']['containers']
    return container['args']
  said = [word for command in commands(output) for word in command]
  if name == 'sky.sh':
    (run,) = [word for word in said if word.startswith('--env=RUN=')]
    return shlex.split(run.removeprefix('--env=RUN='))
  return experiment_in(next(word for word in said if 'launch/local.sh ' in word))


COPIED = ('gpu_vm.sh', 'tpu_vm.sh', 'kubernetes.sh', 'sky.sh')


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

  @pytest.mark.parametrize('name', COPIED)
  @pytest.mark.parametrize(
    ('folder', 'path'), [('', 'mine/a b.py'), ('launch', '../mine/a b.py')]
  )
  def test_a_script_of_the_checkout_is_called_by_its_place_in_it(
    self, checkout, bare_path, name, folder, path
  ):
    done = self.dry(name, checkout, bare_path, checkout / folder, path, '--x=1 2')
    assert done.returncode == 0 and done.stderr == ''
    assert words_of(name, done.stdout) == ['mine/a b.py', '--x=1 2']

  @pytest.mark.parametrize('name', COPIED)
  def test_a_script_from_elsewhere_has_to_be_there(self, checkout, bare_path, name):
    outside = checkout.parent
    for path in ('/shared/mine.py', str(outside / 'other.py')):
      done = self.dry(name, checkout, bare_path, checkout, path)
      assert done.returncode == 0
      assert f'{path} is outside the checkout and is not copied' in done.stderr
      assert words_of(name, done.stdout) == [path]
    for cwd, path in ((outside, 'other.py'), (checkout, 'none.py')):
      done = self.dry(name, checkout, bare_path, cwd, path)
      assert done.returncode == 2 and done.stdout == ''
      assert f'{cwd}/{path} is no file of this checkout' in done.stderr

  @pytest.mark.parametrize('name', ['gpu_vm.sh', 'tpu_vm.sh'])
  def test_what_is_not_committed_is_not_started(self, checkout, tmp_path, name):
    """With git itself, and in the place of the machines' tools one that leaves a mark."""
    tools = stub_tools(
      tmp_path / 'bin', ('ssh', 'scp', 'gcloud'), f'echo ACTIVE; touch {tmp_path}/called'
    )
    git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', checkout]
    for command in (['init', '-q'], ['add', 'launch'], ['commit', '-qm', 'x']):
      subprocess.run([*git, *command], check=True)
    start = lambda: launch(
      name,
      'mine/a b.py',
      path=f'{tools}:{os.environ["PATH"]}',
      cwd=checkout,
      launchers=checkout / 'launch',
      VENV=VENV,
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


TOY = """
from absl import app, flags
from agent_r1_jax import config, fields
flags.DEFINE_string('workdir', 'runs/toy', '')
_CFG = fields.define_flags(config.Config())
if __name__ == '__main__':
  app.run(lambda _: open('ran', 'w'))
"""


class TestChecksHere:
  """Real checks in a checkout of toys; what would rent machines are stubs."""

  @pytest.fixture
  def start(self, tmp_path):
    checkout, log = tmp_path / 'checkout', tmp_path / 'log'
    shutil.copytree(LAUNCH, checkout / 'launch')
    (checkout / 'agent_r1_jax').symlink_to(ROOT / 'agent_r1_jax')
    (checkout / 'experiments').mkdir()
    (checkout / 'experiments' / 'toy.py').write_text(TOY)
    (checkout / 'mine.py').write_text(TOY)
    (checkout / 'plain.py').write_text('open("ran", "w")')
    names = ('git', 'ssh', 'scp', 'gcloud', 'kubectl', 'sky', 'sbatch', 'sleep')
    script = f'echo "${{0##*/}} $*" >>{log}; echo ACTIVE'
    tools = stub_tools(tmp_path / 'bin', names, script)

    def start(name, *words, **variables):
      needs = {k: v for k, v in NEEDS[name].items() if k != 'SLURM_JOB_ID'}
      done = launch(
        name,
        *words,
        path=f'{tools}:{os.environ["PATH"]}',
        cwd=checkout,
        launchers=checkout / 'launch',
        **{'VENV': VENV, 'RESTARTS': '3', 'PAUSE': '0'} | needs | variables,
      )
      assert not (checkout / 'ran').exists()
      called = log.read_text().splitlines() if log.exists() else []
      done.rented = [line for line in called if not line.startswith('git ')]
      return done

    return start

  @pytest.mark.parametrize('name', [*COPIED, 'slurm.sh'])
  def test_every_launcher_refuses_a_misspelt_field(self, start, name):
    done = start(name, 'toy', '--workdir=/shared/a', '--config.engine.row=4')
    assert done.returncode == 1 and done.rented == []
    assert 'did you mean engine.rows?' in done.stderr
    assert 'nothing was started' in done.stderr and 'restarts left' not in done.stderr
    done = start(name, 'toy', '--workdir=/shared/a', '--config.engine.rows=4')
    assert done.returncode == 0 and done.rented, done.stderr

  @pytest.mark.parametrize(
    ('words', 'message'),
    [
      ('nosuch', 'no experiment is called nosuch'),
      ('toy --workdir=/shared/a --nosuch=1', "Unknown command line flag 'nosuch'"),
      ('toy --workdir=/shared/a --config.seed=x', 'invalid literal'),
      ('toy --workdir=/shared/a --config.engine.rows=-1', 'config: engine.rows is -1'),
      ('toy', "--workdir is 'runs/toy'; it has to be in /shared"),
      ('toy --workdir=/shared/../a', 'it has to be in /shared'),
      ('mine.py --workdir=/home/a', 'it has to be in /shared'),
    ],
  )
  def test_what_would_fail_there_is_refused_here(self, start, words, message):
    done = start('sky.sh', *words.split())
    assert done.returncode and message in done.stderr and done.rented == []

  def test_what_cannot_be_checked_is_said_and_started(self, start):
    for words, message in (
      (('/shared/none.py', '--x=1'), 'is not on this machine: its flags'),
      (('plain.py', '--x=1'), 'does not call absl.app.run'),
    ):
      done = start('sky.sh', *words)
      assert done.returncode == 0 and message in done.stdout + done.stderr
      assert words[0] in done.rented[-1]
    assert start('sky.sh', 'toy', CHECK='no').returncode == 0

  def test_one_machine_may_keep_the_workdir_to_itself(self, start):
    done = start('gpu_vm.sh', 'toy', '--workdir=runs/a')
    assert done.returncode == 1 and 'it has to be an absolute path' in done.stderr
    assert start('gpu_vm.sh', 'toy', '--workdir=runs/a', HOSTS='gpu-0').returncode == 0


class TestRequestsOfTpus:
  """tpu_vm.sh with a gcloud that answers with one state after another."""

  @pytest.fixture
  def ask(self, tmp_path):
    log, states, lost = (tmp_path / name for name in ('log', 'states', 'lost'))
    script = f"""
case "$*" in
  *state.state*) head -n 1 {states}; sed -i 1d {states} ;;
  *state.failedData*) echo 'no such zone' ;;
  *) echo "$*" >>{log}; case "$*" in *' ssh '*) ! rm {lost} 2>/dev/null ;; esac ;;
esac"""
    tools = stub_tools(tmp_path / 'bin', ('gcloud', 'git', 'sleep'), script)

    def ask(*said, taken=False):
      if taken:  # While the run is on it: its ssh fails, once.
        lost.touch()
      states.write_text(''.join(f'{state}\n' for state in said))
      path = f'{tools}:{os.environ["PATH"]}'
      done = launch('tpu_vm.sh', *RUN, path=path, CHECK='no', **NEEDS['tpu_vm.sh'])
      verbs = re.findall('^compute tpus [a-z-]+ ([a-z]+) ', log.read_text(), re.MULTILINE)
      return done, verbs

    return ask

  def test_a_slice_that_was_taken_is_asked_for_again(self, ask):
    states = ('', 'WAITING_FOR_RESOURCES', 'PROVISIONING', 'SUSPENDED', '', 'ACTIVE')
    done, verbs = ask(*states)
    assert done.returncode == 0, done.stderr
    assert verbs == ['create', 'delete', 'create', 'scp', 'ssh']

  def test_a_slice_that_is_taken_from_a_run_gets_another(self, ask):
    states = ('ACTIVE', 'SUSPENDING', 'SUSPENDED', '', 'ACTIVE')
    done, verbs = ask(*states, taken=True)
    assert done.returncode == 0, done.stderr
    assert verbs == ['scp', 'ssh', 'delete', 'create', 'scp', 'ssh']

  def test_a_run_that_fails_on_a_slice_that_stays_ends(self, ask):
    done, verbs = ask('ACTIVE', 'ACTIVE', taken=True)
    assert done.returncode == 1 and verbs == ['scp', 'ssh']

  def test_a_request_that_failed_is_deleted_and_its_reason_said(self, ask):
    done, verbs = ask('', 'FAILED')
    assert done.returncode == 1
    assert 'the request failed and is deleted: no such zone' in done.stderr
    assert verbs == ['create', 'delete']


def experiment_in(remote):
  """The words after launch/local.sh, as the remote shell would split them."""
  return shlex.split(re.search(r'launch/local\.sh (.*)>>run\.log 2>&1$', remote)[1])


def check(schema, document):
  schema = json.loads((ROOT / 'tests/schemas' / schema).read_text())
  jsonschema.Draft202012Validator.check_schema(schema)
  jsonschema.Draft202012Validator(schema).validate(document)


def test_the_sky_task_fits_its_schema_and_restarts_after_75():
  task = yaml.safe_load((LAUNCH / 'sky.yaml').read_text())
  check('sky.json', task)
  assert task['resources']['job_recovery']['recover_on_exit_codes'] == [75]
  assert 'launch/run.sh $RUN' in task['run']
  for script in (task['setup'], task['run']):
    subprocess.run(['bash', '-n', '-c', script], check=True)


def test_the_container_starts_run_sh_as_a_user_with_files_that_exist():
  text = (LAUNCH / 'Containerfile').read_text()
  lines = re.findall(r'^([A-Z]+) (.*)$', text, re.MULTILINE)
  last = dict(lines)
  assert last['USER'] == '1000'
  assert json.loads(last['ENTRYPOINT']) == [f'{last["WORKDIR"]}/launch/run.sh']
  for line in (rest for word, rest in lines if word == 'COPY'):
    *sources, _ = [word for word in line.split() if not word.startswith('--')]
    assert all((ROOT / source).exists() for source in sources), line
  assert {'.git', '.venv', 'runs'} <= {*(ROOT / '.dockerignore').read_text().split()}
