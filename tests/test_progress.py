"""What a run shows in a terminal, and in a log file."""

import fcntl
import io
import itertools
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import types

import jax
import pytest
import waiting

from agent_r1_jax.report import meter as meter_lib
from agent_r1_jax.report import progress as progress_lib


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def test_a_log_file_gets_a_line_every_few_seconds_and_the_phase_of_a_slow_step():
  file, clock = io.StringIO(), Clock()
  with progress_lib.Progress(12, label='GRPO', start=2, file=file, clock=clock) as shown:
    clock.now += 8000
    for step in range(3, 10):
      shown.set_phase('rollout', 32, 128)
      clock.now += 1.0
      shown.update(step, reward=step / 10)
    clock.now += 60
    shown.set_phase('rollout', 32, 128)
  assert file.getvalue().splitlines() == [
    'GRPO 2/12  2:13:20 spent  rollout 32/128',
    # The first step compiled: it says nothing of the others.
    'GRPO 7/12  reward 0.700  2:13:25 spent, 0:05 left',
    'GRPO 9/12  reward 0.900  2:14:27 spent, 0:03 left  rollout 32/128',
  ]


def test_the_first_step_tells_often_that_it_lives_and_how_long_all_will_take():
  file, clock, sampled = io.StringIO(), Clock(), [0]
  with progress_lib.Progress(
    100, label='mine', every=0.0, file=file, clock=clock, count_tokens=lambda: sampled[0]
  ) as shown:
    shown.set_phase('compile', 4, 40)
    clock.now += 6
    shown.set_phase('compile', 9, 40)
    sampled[0] = 7  # Programs are warmed up by sampling.
    shown.set_phase('rollout')
    for done, seconds, tokens in ((0, 6, 900), (1, 7, 1800), (8, 8, 3600)):
      clock.now += seconds
      sampled[0] = 7 + tokens
      shown.set_phase('rollout', done or None, 16)
    shown.update(1, reward=0.5)
    for _ in range(2):  # From then on, once a minute is enough.
      clock.now += 20
      shown.set_phase('update')
    shown.update(2, reward=0.5)
  assert file.getvalue().splitlines() == [
    'mine 0/100  0:06 spent  compile 9/40',
    'mine 0/100  0:12 spent  rollout, 900 tokens',
    'mine 0/100  0:19 spent  rollout 1/16, 1,800 tokens',
    'mine 0/100  0:27 spent, about 1:10:00 left  rollout 8/16, 3,600 tokens',
    'mine 1/100  reward 0.500  0:27 spent, about 34:39 left',
    'mine 2/100  reward 0.500  1:07 spent, 1:05:20 left',
  ]


def test_a_phase_that_reports_nothing_is_seen_to_live(monkeypatch):
  """As a rollout of which no episode has ended: a thread looks at the tokens."""
  monkeypatch.setattr(progress_lib, '_LOOK_SECONDS', 0.01)
  file, clock, sampled = io.StringIO(), Clock(), itertools.count(0, 50)
  with progress_lib.Progress(
    9, every=0.0, file=file, clock=clock, count_tokens=lambda: next(sampled)
  ) as shown:
    shown.set_phase('rollout')
    clock.now += 6
    waiting.until(lambda: 'rollout' in file.getvalue(), 'a line')
  assert re.search(r'0/9  0:06 spent  rollout, \d+ tokens', file.getvalue())


def test_a_training_step_has_a_line_of_its_own_that_controls_no_terminal():
  file, metrics = io.StringIO(), {name: 0.25 for name in progress_lib.VIEW.values()}
  metrics |= {'eval/a/em': 0.2, 'eval/b/em': 0.4, 'train/kl': -3e-8, 'train/loss': 1.0}
  label = '\x1b]0;x\x07'
  with progress_lib.Progress(
    2, label=label, every=0.0, file=file, clock=Clock()
  ) as shown:
    shown.print_line('1 episode failed: \x1b]52;c;eA==\x07')
    shown.update(1)
    shown.show_metrics(2, metrics)
  said, first, last = file.getvalue().splitlines()
  assert said == '1 episode failed: ␛]52;c;eA==␇' and first.startswith('␛]0;x␇ 1/2')
  for text in ('exact match 0.250', 'KL -3e-08', 'idle 25%', 'memory 0.2 GB'):
    assert text in last
  assert 'eval match 0.300' in last and 'loss' not in last


def test_a_sparkline_has_a_bar_for_the_mean_of_equally_many_values():
  draw = lambda values: progress_lib._draw_sparkline(values, 12)
  assert [draw([]), draw([0.5, 0.5]), draw([0, math.nan, 7])] == ['', '▁▁', '▁█']
  assert draw(range(24)) == '▁▂▂▃▄▄▅▅▆▇▇█'


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='Linux has it')
def test_a_log_without_room_ends_no_run():
  file = open('/dev/full', 'w')
  with progress_lib.Progress(2, file=file) as progress:
    progress.update(1, reward=0.5)
    progress.print_line('step 1: 3 calls failed')
  with pytest.raises(OSError, match='No space left'):
    file.close()  # as it tells whoever asks


# Ctrl-C comes amid it; what was redirected is as before in the end.
_RUN = """
import logging, os, signal, sys, threading
logging.basicConfig()
from agent_r1_jax.host import preemption
from agent_r1_jax.report import progress
streams, metrics = (sys.stdout, sys.stderr), dict.fromkeys(progress.VIEW.values(), 0.5)
with preemption.watch() as watch, progress.Progress(9, label='GRPO', every=0.0) as p:
  for step in range(1, 4):
    p.show_metrics(step, metrics)
    p._live.refresh()
    logging.warning('a library warns %d', step)
    print('a print', step)
    p.print_line(f'[bold] 100% of {step}\\x1b]0;title\\x07')
  p.set_phase('rollout', 32, 128)
  if sys.argv[1] == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
  os.kill(os.getpid(), signal.SIGINT)
  while not watch.is_requested() or p._live:
    threading.Event().wait(0.01)
  p.show_metrics(4, metrics)
assert (sys.stdout, sys.stderr) == streams
print('the end')
"""


def show(columns, *arguments):
  """Runs it in a terminal; returns its last screen, and whether there is a cursor."""
  there, here = pty.openpty()
  fcntl.ioctl(here, termios.TIOCSWINSZ, struct.pack('HHHH', 50, columns, 0, 0))
  environment = os.environ | {'TERM': 'xterm', 'COLUMNS': str(columns)}
  process = subprocess.Popen(
    [sys.executable, '-c', _RUN, *arguments],
    stdin=here, stdout=here, stderr=here, env=environment,
  )  # fmt: skip
  os.close(here)
  data = b''
  try:
    while part := os.read(there, 4096):
      data += part
  except OSError:
    pass  # Linux's way to say that nobody writes any more.
  os.close(there)
  process.wait(60)
  return draw(data.decode(), columns)


def draw(text, columns):
  """A terminal as far as the view needs one: lines, erasing, moving up."""
  lines, row, column, cursor = [''], 0, 0, True
  for mark, number, kind, char in re.findall(r'(\x1b\[\??)([\d;]*)(\w)|([^\x1b])', text):
    if mark == '\x1b[?':
      cursor = kind == 'h'
    elif kind == 'A':
      row -= int(number or 1)
    elif kind == 'K':
      lines[row] = ''
    elif char == '\r':
      column = 0
    elif char:
      if char == '\n' or column == columns:
        row, column = row + 1, 0
        lines += [''] * (row == len(lines))
      if char != '\n':
        lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
        column += 1
  return lines, cursor


@pytest.mark.parametrize('columns', [80, 140])
def test_a_terminal_has_one_view_below_all_lines(columns):
  lines, cursor = show(columns, 'interrupt')
  text = '\n'.join(lines)
  begin = next(i for i, line in enumerate(lines) if line.startswith('╭─ GRPO'))
  said = [
    line
    for i in range(1, 4)
    for line in (
      f'WARNING:root:a library warns {i}',
      f'a print {i}',
      f'[bold] 100% of {i}␛]0;title␇',
    )
  ]
  assert [line.strip() for line in lines[:begin]] == said
  assert text.count('╭─ GRPO') == 1 and max(map(len, lines)) <= columns
  for shown in ('3/9', 'exact match', 'tokens/s', 'rollout 32/128'):
    assert shown in text
  end = next(i for i, line in enumerate(lines) if line.startswith('╰─'))
  after = ''.join(lines[end + 1 :])
  assert after.index('Ctrl-C: saving') < after.index('GRPO 4/9') < after.index('the end')
  assert cursor


def test_a_killed_run_leaves_a_cursor():
  lines, cursor = show(80, 'kill')
  assert cursor and any('3/9' in line for line in lines)


def test_operations_of_an_update_are_those_of_a_second_and_a_chip(monkeypatch):
  stats = types.SimpleNamespace(sampled=0, idle_seconds=0.0)
  engine = types.SimpleNamespace(
    stats=stats, replicas=[0], mesh=types.SimpleNamespace(size=4)
  )
  meter = meter_lib.Meter(engine)
  assert not {'machine/update_tflops', 'machine/mfu'} & meter.measure().keys()
  metrics = {'train/operations': 24e12, 'time/update': 2.0}
  measured = meter.measure(metrics)
  assert measured['machine/update_tflops'] == 3.0 and 'machine/mfu' not in measured
  monkeypatch.setitem(meter_lib.PEAKS, jax.devices()[0].device_kind, 12e12)
  assert meter.measure(metrics)['machine/mfu'] == 0.25
