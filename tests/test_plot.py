"""experiments/plot.py draws and tabulates groups of runs."""

import script

from agent_r1_jax.train import metrics


def plot(*arguments):
  return script.run('-m', 'experiments.plot', *arguments)


def test_a_figure_and_a_table_of_two_groups(tmp_path):
  for label, seeds in (('a', 3), ('b', 1)):
    for seed in range(seeds):
      folder, numbers = tmp_path / f'{label}-{seed}', {'eval/x/em': 0.5}
      folder.mkdir()
      for step in range(10 - seed):
        metrics.write(folder, step, numbers | {'rollout/reward': seed / 10})
  out = tmp_path / 'out' / 'v1.0'
  groups = f'first={tmp_path}/a-*', f'second={tmp_path}/b-*'
  done = plot(*groups, f'--out={out}')
  assert done.returncode == 0, done.stderr
  text = ' '.join(done.stdout.split())
  # t(.975, 2) = 4.303, times 0.1 / √3.
  assert '| first | .100 ± .248 | .500 ± .000 | 3 |' in text
  assert '| second | .000 | .500 | 1 |' in text
  assert 'a-1 ends at step 8, others at step 9' in text
  assert r'$\pm$ .248' in (tmp_path / 'out' / 'v1.0.tex').read_text()
  kinds = {path.suffix: path.stat().st_size for path in out.parent.iterdir()}
  assert sorted(kinds) == ['.md', '.pdf', '.png', '.tex'] and min(kinds.values()) > 50
