"""First light: its plan, its limits, parts that go wrong, and its table."""

from concurrent import futures
import json
import os
import pathlib
import threading

import numpy as np
import pytest
import script
import waiting

from experiments.bench import first_light
from experiments.bench.light import (
  lines,
  policy,
  profile,
  quickstart,
  report,
  sampler,
  update,
)

Part = first_light.Part


@pytest.fixture
def environment():
  here = pathlib.Path(__file__).parent
  return {**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, (here, script.ROOT)))}


def fault(name: str, **more) -> Part:
  return Part(name, 60, 1, 'light_faults', **more)


def test_parts_are_planned_in_order_and_what_does_not_fit_is_named():
  parts = [Part('a', 100, 10), Part('b', 50, 50), Part('c', 100, 20), Part('d', 5, 5)]
  names = lambda found: [part.name for part in found]
  fitting, left_out = first_light.plan(parts, 1000)
  assert (names(fitting), left_out) == (['a', 'b', 'c', 'd'], [])
  # After a there are 40 seconds, too few for b; c gets what is left, and d nothing.
  fitting, left_out = first_light.plan(parts, 140)
  assert (names(fitting), names(left_out)) == (['a', 'c'], ['b', 'd'])
  assert first_light.choose_limit(parts[2], 40) == 40
  assert first_light.choose_limit(parts[2], 400) == 100
  assert first_light.choose_limit(parts[2], 19) is None


def test_nine_minutes_are_enough_for_all_parts_up_to_the_peer():
  fitting, _ = first_light.plan(first_light.PARTS, 9 * 60)
  assert [part.name for part in fitting[:9]] == [
    *('card', 'rows', 'slots', 'policy', 'update', 'cudnn', 'sampler', 'attention'),
    'peer',
  ]


@pytest.mark.parametrize(
  ('how', 'word'), [('crashes', 'exit status -11'), ('raises', 'the driver is gone')]
)
def test_a_part_that_fails_is_one_line_and_the_next_one_follows(
  tmp_path, monkeypatch, environment, how, word
):
  monkeypatch.setattr(first_light, 'make_environment', lambda out: environment)
  first_light.run([fault(how), fault('works')], 120, tmp_path, 'tiny')
  found = lines.read(tmp_path)
  assert word in (tmp_path / 'report.md').read_text()
  (failed,) = [
    line['failed'] for line in found if line['part'] == how and 'failed' in line
  ]
  assert word in failed
  # What it knew before it failed is kept.
  kept = [line['part'] for line in found if line['what'] == 'before']
  assert kept == [how, 'works']


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path, environment):
  failure = first_light.run_part(fault('hangs'), 5.0, tmp_path, 'tiny', environment)
  assert failure == 'ended after its 5 s'
  (child,) = [line['pid'] for line in lines.read(tmp_path) if line['what'] == 'child']
  # A process that was killed ends when the machine gets to it: soon, not at once.
  waiting.until(lambda: waiting.has_ended(child), 'the end of the child')


def test_a_kernel_that_fails_its_check_is_left_out_of_the_later_parts(
  tmp_path, monkeypatch, environment
):
  given = []

  def run_part(part, limit, out, shape, environment):
    given.append((part.name, environment.get('AGENT_R1_ROW_ATTENTION')))
    if part.name == 'rows':
      lines.write(out, 'rows', {'what': 'row_attention', 'failed': 'the gap is nan'})
    return ''

  monkeypatch.delitem(environment, 'AGENT_R1_ROW_ATTENTION', raising=False)
  monkeypatch.setattr(first_light, 'make_environment', lambda out: environment)
  monkeypatch.setattr(first_light, 'run_part', run_part)
  first_light.run(first_light.PARTS[:4], 600, tmp_path, 'full')
  assert given == [('card', None), ('rows', None), ('slots', '0'), ('policy', '0')]


def test_only_the_newest_lines_of_a_folder_count(tmp_path, monkeypatch, environment):
  """After a first try, the same command is given again."""
  monkeypatch.setattr(lines, 'out', lambda: tmp_path)
  lines.write(tmp_path, 'rows', {'what': 'rows', 'failed': 'ended after its 35 s'})
  for rate in 1e12, 3e12:
    lines.write(tmp_path, 'card', lines.make('copy', rate, 'bytes/s'))
  given = []
  run_part = lambda part, limit, out, shape, environment: given.append({**environment})
  monkeypatch.setattr(first_light, 'make_environment', lambda out: environment)
  monkeypatch.setattr(first_light, 'run_part', run_part)
  first_light.run(first_light.PARTS[1:3], 600, tmp_path, 'full')
  assert given[1].get('AGENT_R1_ROW_ATTENTION') != '0'
  assert lines.find('card', 'copy') == 3e12


def test_steps_are_lines_before_their_run_ends_and_an_earlier_run_is_none(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(lines, 'out', lambda: tmp_path)
  (tmp_path / 'run').mkdir()

  def write(step):
    with (tmp_path / 'run' / 'metrics.jsonl').open('a') as file:
      print(json.dumps({'step': step, 'time/rollout': 1.0}), file=file)

  write(7)
  workdir = quickstart.make_workdir('run')
  assert not workdir.exists()
  workdir.mkdir()
  write(1)
  running = True
  found = quickstart.follow('a run', workdir, lambda: running)
  assert next(found)['what'] == 'a run, step 1'
  write(2)
  running = False
  assert [line['what'] for line in found] == ['a run, step 2']


class _Program:
  """Is compiled when `ready` is set, and counts how often."""

  def __init__(self, ready: threading.Event):
    self.ready, self.count = ready, 0

  def compile(self):
    self.count += 1
    self.ready.wait()


def test_what_is_compiled_late_is_measured_last_and_compiled_once(monkeypatch):
  monkeypatch.setattr(lines, 'count_seconds_left', lambda: 20.0)
  monkeypatch.setattr(futures, 'wait', lambda every, timeout: early.ready.wait())
  ready = threading.Event()
  late, early = _Program(ready), _Program(threading.Event())
  early.ready.set()
  cases = update.Case('0.6b', 64), update.Case('0.6b', 32)
  programs = dict(zip(cases, (late, early), strict=True))

  def measure(case):
    yield {'what': case.name}
    ready.set()

  lower = {case: lambda case=case: [programs[case]] for case in cases}
  found = [*update.measure_compiled(lower, measure, '{}')]
  assert found == [{'what': cases[1].name, 'compiling': 1}, {'what': cases[0].name}]
  assert late.count == early.count == 1


def test_what_has_no_time_left_is_a_line(tmp_path, monkeypatch, environment):
  monkeypatch.setattr(first_light, 'make_environment', lambda out: environment)
  first_light.run([Part('late', 60, 30)], 10, tmp_path, 'full')
  (line,) = lines.read(tmp_path)
  assert line['failed'] == 'left out: 10 s are left, and it needs 30'


def test_lines_that_were_cut_off_are_left_out(tmp_path):
  lines.write(tmp_path, 'card', {'what': 'copy', 'measured': 3e12, 'unit': 'bytes/s'})
  with (tmp_path / lines.FILE).open('a') as file:
    file.write('{"part": "card", "wh')
  assert [line['what'] for line in lines.read(tmp_path)] == ['copy']


def test_a_ratio_is_1_at_the_bound_and_less_if_worse():
  assert lines.make('step', 2.0, 's', 1.5)['ratio'] == 0.75
  faster = lines.make('copy', 3e12, 'bytes/s', 4e12, higher_is_better=True)
  assert faster['ratio'] == 0.75
  assert 'ratio' not in lines.make('share', 1.0, 'of all')


def test_the_report_explains_what_is_below_the_bound():
  low = lines.make('0.6b', 2.0, 's', 0.5, mfu=0.25, published=0.111)
  shares = {'products': 0.5, 'attention': 0.3}
  found = [
    {'part': 'card', 'what': 'device', 'device': 'H100', 'packages': {'jax': '0.11.2'}},
    {'part': 'update', **low},
    {'part': 'sampler', **lines.make('decode', 1.0, 'ms a call', 0.9)},
    {'part': 'agent', 'what': 'agent', 'failed': 'ended after its 50 s'},
    {'part': 'profile', 'what': '0.6b', 'of': 'update', 'shares': shares}
    | {'largest': {'gemm': 0.4}, 'idle': 0.1},
  ]
  text = report.write(found)
  assert 'H100, jax 0.11.2.' in text
  assert '| update | 0.6b | 2 s | 0.5 | 0.25 | MFU 0.111 | MFU 0.25 |' in text
  assert 'agent, agent: ended after its 50 s' in text
  assert '0.25 of the bound; of the busy time products 50%, attention 30%' in text
  assert 'decode: ' not in text  # .9 needs no explanation.


def test_an_event_counts_without_those_inside_it():
  Event = profile.Event
  stream = [Event('while', 0, 100), Event('gemm', 10, 60), Event('copy', 60, 80)]
  stream.append(Event('sort', 150, 200))
  assert dict(profile.count_own_time(stream)) == {
    **{'while': 30, 'gemm': 50},
    **{'copy': 20, 'sort': 50},
  }
  found = profile.describe([stream])
  assert found['idle'] == 0.25 and found['shares']['products'] == 0.333
  kinds = map(profile.find_kind, ('row_attention_keys', 'loop_add_fusion', 'infeed'))
  assert list(kinds) == ['attention', 'elementwise', 'other']


def test_a_trace_of_a_program_has_its_instructions():
  import jax
  import jax.numpy as jnp

  x = jnp.ones((256, 256))
  product = jax.jit(jnp.matmul)
  streams = profile.trace(lambda: product(x, x))
  assert any(profile.find_kind(e.name) == 'products' for s in streams for e in s)


def test_a_cpu_computes_the_numbers_that_are_carried_to_accelerators(monkeypatch):
  """Write golden.npz again (policy.py) where these numbers change on purpose."""
  monkeypatch.setattr(policy, '_LARGEST', {'float32': policy._LARGEST['float32']})
  found = {line['what']: line for line in policy.compare()}
  assert len(found) == 5 and not any('failed' in line for line in found.values())
  assert found['sampled tokens as on a CPU, float32']['measured'] == 1.0


@pytest.fixture
def tiny_flags():
  lines.FLAGS(['test', '--shape=tiny'])
  yield
  lines.FLAGS.unparse_flags()


def test_an_update_and_a_decode_are_measured_with_what_they_need(tiny_flags):
  """On a CPU, for their sense and not for their speed."""
  found = update.measure(update.Case('tiny', 256))
  # 6 a number of a kernel and token, the head's for actions only; 12 N H a pair, layer.
  layers = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
  products = 6 * (256 * layers + 128 * 256 * 64)
  assert found['operations'] == products + 12 * 64 * 2 * (256 * 257 // 2)
  assert 0 < found['mfu'] == pytest.approx(found['ratio'], abs=1e-3)
  (found,) = sampler.measure(sampler.Case('tiny', 4, (64,), 8))
  assert found['tokens_per_call'] == 1.0 and found['bound'] > 0
  case = sampler.Case('tiny', 4, (64,), 8, cache='int8')
  small, large = (
    sampler.make_decoder(c).a_token for c in (case, case._replace(cache='model'))
  )
  # 16 numbers of a head and a scale of 4 bytes, in place of 16 of 2 bytes.
  assert np.isclose(small / large, 20 / 32)


def test_the_first_part_runs_as_printed_and_the_table_is_written(tmp_path):
  command = ['-m', 'experiments.bench.first_light', f'--out={tmp_path}']
  done = script.run(*command, '--shape=tiny', '--parts=card')
  assert done.returncode == 0, done.stderr
  first, *found = lines.read(tmp_path)
  assert first['what'] == 'begun' and first['left_out_unless_time_is_saved'] == []
  assert [line['what'] for line in found] == [
    *('device', 'copy', 'bfloat16 product', 'card: seconds')
  ]
  again = script.run('-m', 'experiments.bench.first_light', f'--report={tmp_path}')
  assert again.stdout.strip() == (tmp_path / 'report.md').read_text().strip()
  assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
  ('flags', 'word'), [(['--parts=crad'], 'crad'), ([], '--out: name a folder')]
)
def test_mistakes_are_one_line(tmp_path, flags, word):
  out = [f'--out={tmp_path}'] if flags else []
  done = script.run('-m', 'experiments.bench.first_light', *out, *flags)
  assert done.returncode != 0 and word in done.stderr + done.stdout


def test_the_wheels_that_are_carried_have_the_versions_of_the_requirements():
  read = lambda path: dict(
    line.split('#')[0].split(';')[0].strip().split('==')
    for line in (script.ROOT / path).read_text().splitlines()
    if '==' in line.split('#')[0]
  )
  carried = read('experiments/bench/light/wheels.txt')
  pinned = read('requirements.txt')
  assert {'faiss-cpu', 'grain', 'ml_collections'} <= carried.keys() & pinned.keys()
  assert all(carried[name] == pinned[name] for name in carried.keys() & pinned.keys())


def test_the_page_lists_the_parts_and_their_limits():
  page = (script.ROOT / 'docs/results/first_light.md').read_text()
  table = page.split('| part | what it measures')[1].split('\n\n')[0]
  limits = {}
  for row in table.splitlines()[2:]:
    _, names, _, seconds, _ = row.split('|')
    pairs = zip(names.split(','), seconds.split(','), strict=True)
    limits |= {name.strip(' `'): float(x) for name, x in pairs}
  assert limits == {part.name: part.seconds for part in first_light.PARTS}
