"""Strict settings for every test, and the fixtures that several files share."""

import collections
import dataclasses
import functools
import gc
import os
import pathlib
import shutil
import tempfile
import threading
import time

# Before anything imports JAX: the tests need no accelerator, and take none from others.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
# Other workers, and scripts that tests start, compile what a test has compiled: once is
# enough. The user's own programs stay out of it.
os.environ['JAX_COMPILATION_CACHE_DIR'] = (
  os.environ['JAX_COMPILATION_CACHE_DIR']
  if 'PYTEST_XDIST_WORKER' in os.environ
  else tempfile.mkdtemp(prefix='agent_r1_jax_')
)
# Most of a test's time is compilation, which takes half as long without optimizations.
# With JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the environment the tests compile as users do.
if os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1') == '1':
  # The older emitters of XLA compile a gradient in a third of the time.
  os.environ['XLA_FLAGS'] = (
    '--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters '
    '--xla_cpu_parallel_codegen_split_count=1 ' + os.environ.get('XLA_FLAGS', '')
  )
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.03'
# Nothing may be fetched: whoever tries fails at once and not after a time-out.
os.environ['HF_HUB_OFFLINE'] = '1'

import jax
import pytest
import shapes
import spinning

# The shapes in the signatures of the device's rooms are checked while the tests run.
shapes.install(['agent_r1_jax.models', 'agent_r1_jax.engine', 'agent_r1_jax.rl'])
jax.config.update('jax_numpy_rank_promotion', 'raise')
# Traces of programs make many objects, and hardly a circle of them.
gc.set_threshold(20_000, 20, 20)


_BEGAN = time.monotonic()


def pytest_addoption(parser):
  parser.addoption(
    '--seconds',
    type=float,
    default=float('inf'),
    help='Skip tests that have not begun after so many seconds.',
  )
  parser.addoption(
    '--rewrite-refusals',
    action='store_true',
    help='Write refusals.txt anew for the tests that run (see refusals.py).',
  )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
  seconds = item.config.getoption('--seconds')
  if time.monotonic() - _BEGAN > seconds:
    pytest.skip(f'{seconds:g} seconds had passed (--seconds)')


@pytest.fixture(scope='session')
def data_dir() -> pathlib.Path:
  """The folder of the real data sets; the test skips where there is none."""
  name = os.environ.get('AGENT_R1_DATA')
  if not name:
    pytest.skip('AGENT_R1_DATA is not set: no real data here')
  path = pathlib.Path(name)
  if not path.is_dir():
    pytest.fail(f'AGENT_R1_DATA={name} is no directory')
  return path


@pytest.fixture
def refused(request, tmp_path_factory):
  """Expects a refusal that names a field; its wording stands in refusals.txt."""
  import refusals

  rewrite = request.config.getoption('--rewrite-refusals')
  name = _name_test(request.node)
  found = refusals.Refusals(
    name, str(tmp_path_factory.getbasetemp()), None if rewrite else refusals.read()
  )
  yield found
  if rewrite:
    refusals.update(name, found.said)


def _name_test(item) -> str:
  """A test's name from this folder on."""
  file = item.path.relative_to(pathlib.Path(__file__).parent)
  return f'{file}::{item.nodeid.split("::", 1)[1]}'


@pytest.fixture
def engine():
  """An engine on the tiny policy."""
  import clients

  return clients.engine()


@pytest.fixture(params=['llama', 'qwen3_5_text'])
def family(request, monkeypatch):
  """The family of the tiny policy: one that attends alone, one that has states too."""
  import clients
  import tiny

  if request.param != 'llama':
    monkeypatch.setattr(tiny.config, '__defaults__', (request.param, 2))
    params = functools.cache(lambda: tiny.params(tiny.config()))
    reference = functools.cache(lambda: clients.run(clients.engine(), range(16)))
    monkeypatch.setattr(clients, 'params', params)
    monkeypatch.setattr(clients, 'reference', reference)
  return request.param


@pytest.fixture
def float64():
  """Formulas are compared where rounding cannot hide a difference."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def no_clock(monkeypatch):
  """Calls of users' functions are late when they say so; see late.py."""
  import late  # It imports the package, so not before the hook is there.

  late.install(monkeypatch)


@pytest.fixture
def no_curves(monkeypatch):
  """Runs draw no curves, a third of a second each; test_metrics.py looks at some."""
  from agent_r1_jax.report import plots

  touch = lambda runs, path, *_, **__: pathlib.Path(path).touch()
  monkeypatch.setattr(plots, 'plot_curves', touch)


@pytest.fixture
def traced_once(monkeypatch):
  """Runs with the same algorithm object and equal optimizers trace their update once."""
  from agent_r1_jax.rl import learner, optimizers

  for name, cached in _cached_makers().items():
    monkeypatch.setattr(learner, name, cached)
  make, made = optimizers.make, _OPTIMIZERS

  def make_once(options, rate):
    key = dataclasses.astuple(options), rate
    if key not in made:
      made[key] = make(options, rate)
    return made[key]

  monkeypatch.setattr(optimizers, 'make', make_once)


_OPTIMIZERS: dict = {}


@functools.cache
def _cached_makers():
  from agent_r1_jax.rl import learner

  names = 'objective', 'critic_objective'
  return {name: functools.cache(getattr(learner, name)) for name in names}


@pytest.fixture
def init_at_once(monkeypatch):
  """decoder.init is one program, and not one for each shape of its leaves."""
  from agent_r1_jax.models import decoder

  monkeypatch.setattr(decoder, 'init', jax.jit(decoder.init, static_argnums=0))


@pytest.fixture
def gate():
  """What hangs waits for it, and goes on at the test's end."""
  event = threading.Event()
  yield event
  event.set()


@pytest.fixture(scope='module', autouse=True)
def older_objects_stay():
  """No collection in a file's tests looks at what earlier files have left behind."""
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='module', autouse=True)
def no_thread_spins():
  """A thread that computes on after its file takes a core from all files after it."""
  yield
  if threads := spinning.find(10.0):
    pytest.fail(f'One of these threads computes for ever: {", ".join(threads)}.')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
  """Begins with the files of few tests, each of which takes long.

  A worker takes file after file. A long one that comes last runs alone, while the other
  workers have nothing left to do.
  """
  tests = collections.Counter(item.path for item in items)
  items.sort(key=lambda item: tests[item.path])
  if config.getoption('--rewrite-refusals') and '::' not in ' '.join(config.args):
    import refusals

    refusals.drop_missing({_name_test(item) for item in items})


def pytest_configure(config):
  """Starts what the workers fork programs from, before they are started themselves."""
  if config.getoption('numprocesses', None):
    import script

    script.start_forks()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  """Of whole files: a worker traces what its files share once."""
  import affinity

  by_file = config.getoption('dist') == 'loadfile'
  return affinity.Scheduling(config, log) if by_file else None


def pytest_sessionstart():
  """Lets runs in a worker return no memory to the kernel between their phases.

  The worker is large for what its tests have compiled; their phases are as short as those
  of a small process, and would take a part of a second each.
  """
  from agent_r1_jax.host import memory

  memory.KEPT = 1 << 40
  # What is traced stays: to look at it after each 700 objects takes 3 % of the time.
  gc.set_threshold(50_000)


def pytest_sessionfinish():
  """Ends what this process has started."""
  import script

  script.end_forks()


def pytest_unconfigure():
  """Removes what was compiled."""
  if 'PYTEST_XDIST_WORKER' not in os.environ:
    shutil.rmtree(os.environ['JAX_COMPILATION_CACHE_DIR'], ignore_errors=True)
