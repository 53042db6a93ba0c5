"""experiments/bench runs, and what it counts holds."""

import json
import mmap

import pytest
import script
import tiny

from agent_r1_jax.models.files import hf_config, weights
from experiments.bench import memory

# One program to decode and one to prefill; a few where programs are counted.
_FEW_PROGRAMS = """
from absl import app
from experiments.bench import __main__ as bench
class Bench(bench.Bench):
  def engine(self, **kwargs):
    one = {'bucket': 1024, 'narrow': False}
    few = one if kwargs.get('warm', True) else {'bucket': 256}
    return super().engine(**few | kwargs)
bench.Bench = Bench
app.run(bench.main)
"""


@pytest.fixture(scope='module')
def lines():
  sizes = ['--rows=16', '--prompt=24', '--reply=8', '--microbatch=4', '--repeats=1']
  what = ['--what=no_work_twice,programs,tools', '--latencies=0.02']
  what += ['--segments=6']
  done = script.run('-c', _FEW_PROGRAMS, '--shape=tiny', *what, *sizes)
  assert done.returncode == 0, done.stderr
  found = map(json.loads, done.stdout.splitlines())
  return {line['measurement']: line for line in found}


def test_four_turns_of_a_group_compute_each_token_once(lines):
  found = lines['no_work_twice']
  groups = 16 // 8
  # A prompt's last token is computed by the decodes that sample what follows it.
  assert found['prefilled'] + found['sampled'] == found['distinct'] - groups
  assert found['shared'] == (24 - 1) * (16 - groups)
  assert round(found['ratio'], 2) == 1.0


def test_ragged_episodes_compile_nothing(lines):
  found = lines['programs']
  assert found['compiled_by_warm_up'] == found['programs'] > 0
  assert found['compiled_by_ragged_episodes'] == 0


def test_slow_tools_have_a_speed_with_and_without_lock_step(lines):
  found = lines['tools']
  assert len(found['tokens_per_second']) == 2 and found['0s'] == 1.0
  assert found['0.02s'] > 0 and found['0.02s/lock_step'] > 0


def test_a_model_of_a_given_shape_is_made_and_the_memory_of_phases_is_measured(tmp_path):
  """A phase has what it freed before its end; the highest of all phases is the run's."""
  shape = hf_config.make(tiny.config('qwen3', layers=4), 'bfloat16')
  (tmp_path / 'shape.json').write_text(json.dumps(shape))
  paths = [tmp_path / 'shape.json', tiny.tokenizer_dir(), tmp_path / 'model']
  memory.make(*map(str, paths), '2')
  assert weights.load(tmp_path / 'model')[0].num_layers == 2
  assert (tmp_path / 'model' / 'tokenizer.json').is_file()
  with mmap.mmap(-1, 1_000_000_000) as pages:  # What was before it does not count.
    for start in range(0, len(pages), mmap.PAGESIZE):
      pages[start] = 1
  meter = memory.Meter()
  with meter.phase('outer'):
    with meter.phase('inner'):
      # Pages of its own: the heap may have room for them already.
      with mmap.mmap(-1, 400_000_000) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
          pages[start] = 1
  rows = [line.split() for line in meter.table().splitlines()[1:]]
  found = {name: [float(x) for x in numbers] for name, *numbers in rows if name != 'the'}
  assert found['inner'][0] > found['inner'][1] + 0.3 and found['inner'][2] == 1
  assert found['outer'][0] < found['inner'][0] == float(rows[-1][-1])
