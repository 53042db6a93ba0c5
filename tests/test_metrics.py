"""Numbers in files survive a kill, and people are told the truth about them."""

import errno
import json
import math

import jax.numpy as jnp
import mounts
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.report import plots, tables
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.train import metrics
from experiments import curves
from experiments import tables as tables_lib


class TestWrite:
  def test_what_is_written_is_read(self, tmp_path):
    written = {'reward': np.float32(0.5), 'loss': jnp.asarray(2), 'n': 3}
    metrics.drop_lines(tmp_path, 0)
    assert metrics.read(tmp_path) == []
    metrics.write(tmp_path, 0, written)
    metrics.write(tmp_path, 0, {'eval/em': 0.25})
    assert metrics.read(tmp_path) == [
      {'step': 0, 'reward': 0.5, 'loss': 2.0, 'n': 3.0},
      {'step': 0, 'eval/em': 0.25},
    ]

  def test_not_finite_numbers_are_valid_json_and_come_back(self, tmp_path):
    metrics.write(tmp_path, 0, {'a': math.nan, 'b': math.inf, 'c': -math.inf})
    line = (tmp_path / 'metrics.jsonl').read_text()
    stored = json.loads(line, parse_constant=pytest.fail)
    assert stored == {'step': 0, 'a': 'nan', 'b': 'inf', 'c': '-inf'}
    (row,) = metrics.read(tmp_path)
    assert math.isnan(row['a']) and row['b'] == math.inf and row['c'] == -math.inf


def killed(workdir, steps=6, half='{"step": 6, "rew'):
  """A run that wrote `steps` lines and half of one more."""
  for step in range(steps):
    metrics.write(workdir, step, {'reward': step / 10})
  with (workdir / 'metrics.jsonl').open('a') as file:
    file.write(half)


class TestResume:
  @pytest.mark.parametrize(('resume_step', 'left'), [(0, 0), (4, 4), (math.inf, 6)])
  def test_lines_after_the_checkpoint_and_half_a_line_are_dropped(
    self, tmp_path, resume_step, left
  ):
    killed(tmp_path)
    metrics.drop_lines(tmp_path, resume_step)
    assert [row['step'] for row in metrics.read(tmp_path)] == [*range(left)]
    metrics.write(tmp_path, left, {'reward': 9.0})
    assert metrics.read(tmp_path)[left:] == [{'step': left, 'reward': 9.0}]
    assert [path.name for path in tmp_path.iterdir()] == ['metrics.jsonl']

  @pytest.mark.parametrize('half', ['', '{', '{"step": 6}', 'null', '\x00\x00', '7'])
  def test_read_copes_with_any_last_line(self, tmp_path, half):
    killed(tmp_path, half=half)
    steps = [row['step'] for row in metrics.read(tmp_path)]
    assert steps == list(range(7 if half == '{"step": 6}' else 6))
    metrics.drop_lines(tmp_path, 3)
    assert [row['step'] for row in metrics.read(tmp_path)] == [0, 1, 2]

  def test_a_broken_line_in_the_middle_is_named(self, tmp_path):
    killed(tmp_path)
    path = tmp_path / 'metrics.jsonl'
    path.write_text(path.read_text().replace('{"step": 2', '{"stop": 2'))
    with pytest.raises(ValueError, match=r'metrics\.jsonl, line 3 is no line'):
      metrics.read(tmp_path)


class TestFullDisk:
  def test_a_line_that_cannot_be_written_is_an_error(self, tmp_path):
    numbers = {f'number/{i}': 0.1 * i for i in range(300)}
    with mounts.mounted(tmp_path, 'size=256k') as workdir:
      metrics.write(workdir, 0, numbers)
      filler = mounts.fill(workdir)
      said = r'line of step 1 .*metrics\.jsonl: the disk is full \(0\.0 MB free\)'
      with pytest.raises(OSError, match=said) as full:
        tiny.within(metrics.write, workdir, 1, numbers, seconds=60)
      assert full.value.errno == errno.ENOSPC
      assert 'start the same command again' in str(full.value)
      assert (workdir / 'metrics.jsonl').read_text().count('\n') == 1
      assert (workdir / 'metrics.jsonl').read_text().endswith('}\n')
      filler.unlink()
      metrics.write(workdir, 1, numbers)
      assert metrics.read(workdir) == [{'step': i} | numbers for i in range(2)]

  def test_a_full_disk_takes_no_start_of_the_lines_before(self, tmp_path):
    with mounts.mounted(tmp_path, 'size=64k') as workdir:
      for step in range(99):
        metrics.write(workdir, step, {'reward': 0.1 * step})
      lines = metrics.read(workdir)
      filler = mounts.fill(workdir)
      with pytest.raises(OSError, match='lines before this start .* disk is full'):
        metrics.drop_lines(workdir, 97)
      assert metrics.read(workdir) == lines
      filler.unlink()
      metrics.drop_lines(workdir, 97)
      assert metrics.read(workdir) == lines[:97]

  def test_episodes_are_kept_again_when_there_is_room(self, tmp_path):
    task = types.Task('t0', [])
    episode = types.Trajectory(task, 0, 0, [], [], [{'content': 'x' * 9000}], 'done')
    with mounts.mounted(tmp_path, 'size=128k') as workdir:
      rollout = store_lib.EpisodeStore(workdir).open_rollout(0, [task])
      rollout.add(('t0', 0), episode)
      filler = mounts.fill(workdir)
      said = r'not written to .* disk is full \(0\.0 MB'
      with pytest.warns(UserWarning, match=said) as warned:
        rollout.add(('t0', 1), episode)
        rollout.add(('t0', 2), episode)
      assert len(warned) == 1
      filler.unlink()
      rollout.add(('t0', 3), episode)
      rollout = store_lib.EpisodeStore(workdir).open_rollout(0, [task])
      found = [n for n in range(4) if rollout.get(('t0', n))]
    assert found == [0, 3]


def rows(seed, steps=60):
  random = np.random.default_rng(seed)
  for step in range(steps):
    yield {'step': step, 'reward': step / steps + random.normal(0, 0.05)}
    if step % 10 == 0:
      yield {'step': step, 'eval/bridge/em': step / steps, 'eval/comparison/em': 0.5}


PANELS = {'Reward': ['reward'], 'Exact match': ['em', 'eval/*/em']}


class TestCurve:
  def width(self, path):
    content = path.read_bytes()
    assert content.startswith(b'\x89PNG')
    return int.from_bytes(content[16:20], 'big')

  def test_a_workdir_and_seeds_of_unequal_length_are_drawn(self, tmp_path):
    for row in rows(0):
      metrics.write(tmp_path, row.pop('step'), row)
    out = tmp_path / 'plots' / 'curve.png'
    plots.plot_curves([tmp_path], out, PANELS)
    assert self.width(out) == 2 * 784
    plots.plot_curves([tmp_path, list(rows(1, 40))], out, PANELS, title='GRPO')
    assert self.width(out) == 2 * 784

  def test_panels_without_numbers_are_left_out(self, tmp_path):
    plots.plot_curves([[{'step': 0, 'em': 0.1}]], tmp_path / 'c.png', PANELS)
    assert self.width(tmp_path / 'c.png') == 784
    with pytest.raises(ValueError, match="none of .'reward'"):
      plots.plot_curves([[{'step': 0, 'loss': 0.1}]], tmp_path / 'c.png', PANELS)

  def test_seeds_are_aligned_by_step(self):
    seeds = [[{'step': s, 'x': s + 10 * seed} for s in (0, 2, 4)] for seed in (0, 1)]
    del seeds[1][1]
    steps, values = plots.align_seeds(seeds, 'x')
    assert steps.tolist() == [0, 4]
    assert values.tolist() == [[0, 4], [10, 14]]

  def test_groups_and_their_final_values(self, tmp_path):
    groups = {'GRPO': [list(rows(0)), list(rows(1))], 'one': [list(rows(2))], 'none': []}
    curves.plot_groups(groups, tmp_path / 'c.png', ['reward', 'eval/*/em'])
    assert self.width(tmp_path / 'c.png') == 2 * 784
    found = curves.final_values(groups, 'eval/*/em')
    # The last of six evaluations, at step 50 of 60.
    np.testing.assert_allclose(found['GRPO'], (50 / 60 + 0.5) / 2)
    assert len(found['one']) == 1 and found['none'] == []
    with pytest.raises(ValueError, match="none of .'loss'"):
      curves.plot_groups(groups, tmp_path / 'd.png', ['loss'])

  def test_smoothing_keeps_a_constant_and_a_short_curve(self):
    np.testing.assert_allclose(plots._smooth(np.full(100, 0.3)), 0.3)
    np.testing.assert_array_equal(plots._smooth(np.arange(8.0)), np.arange(8.0))


class TestTable:
  @pytest.mark.parametrize(
    ('successes', 'n', 'low', 'high'),
    [  # Newcombe (1998), table I, method 3
      (81, 263, 0.2553, 0.3662),
      (15, 148, 0.0624, 0.1605),
      (0, 20, 0.0, 0.1611),
      (1, 29, 0.0061, 0.1718),
    ],
  )
  def test_wilson_intervals_equal_newcombes_table(self, successes, n, low, high):
    np.testing.assert_allclose(
      tables.wilson_interval(successes, n), (low, high), atol=5e-5
    )
    mirrored = tables.wilson_interval(n - successes, n)
    np.testing.assert_allclose(mirrored, (1 - high, 1 - low), atol=5e-5)

  def test_wilson_at_the_edges(self):
    assert tables.wilson_interval(0, 0) == (0.0, 1.0)
    assert tables.wilson_interval(0, 5)[0] == 0.0
    for successes, n in ((-1, 5), (6, 5)):
      with pytest.raises(ValueError, match=f'{successes} successes of {n}'):
        tables.wilson_interval(successes, n)

  def test_a_table_has_shares_with_intervals_and_aligned_columns(self):
    rows = {
      'Naive RAG': {'in-domain': tables.Count(61, 300), 'note': 'top 5'},
      'GRPO': {'in-domain': tables.Count(300, 300), 'average': 0.75},
    }
    text = tables.format_table(rows, ['in-domain', 'average', 'note'])
    assert text.splitlines()[2:] == [
      '| Naive RAG | .203 [.162, .252] 61/300    | -       | top 5 |',
      '| GRPO      | 1.000 [.987, 1.000] 300/300 | .750    | -     |',
    ]

  def test_intervals_over_seeds_are_students(self):
    mean, half = tables_lib.mean_interval([[0.4, 1.0], [0.6, 1.0]])
    # Student's t with one degree of freedom: 12.706.
    np.testing.assert_allclose(half, [12.706 * 0.1, 0.0], atol=1e-3)
    np.testing.assert_allclose(mean, [0.5, 1.0])
    alone, three = tables.Interval(0.5, math.nan), tables.Interval(0.5, 0.02)
    text = tables_lib.format_latex({'GRPO_1': {'a%': alone, 'b': three}}, ['a%', 'b'])
    assert r'GRPO\_1 & .500 & .500 $\pm$ .020 \\' in text
    assert r'method & a\% & b \\' in text

  def test_an_unknown_column_is_a_mistake(self):
    with pytest.raises(ValueError, match="row 'GRPO' has ..out"):
      tables.format_table({'GRPO': {'out': 0.1}}, ['in'])
