"""The page has the run's data, takes none of it for markup, and a browser shows it."""

import base64
import dataclasses
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest
import test_episodes

from agent_r1_jax import config as config_lib
from agent_r1_jax.report import page
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.train import metrics

ROOT = pathlib.Path(__file__).parents[1]
MODEL = ROOT / 'experiments' / 'miniwiki' / 'model'
HOSTILE = (
  '</script><script>document.title="caught"</script> \x00\x1b[31m \u2028 é中 <b>&amp;'
)
MESSAGES = [{'role': 'user', 'content': HOSTILE}, *test_episodes.trajectory().messages]


def write_run(folder: pathlib.Path, **given) -> table_lib.TokenTable:
  """Writes a workdir of three steps; returns the table of its two learned episodes."""
  folder.mkdir(exist_ok=True, parents=True)
  config = config_lib.Config(model=config_lib.Model(path=str(MODEL)), seed=7)
  (folder / 'config.json').write_text(json.dumps(dataclasses.asdict(config)))
  for step in range(3):
    reward = float('nan') if step == 1 else step / 2
    metrics.write(folder, step, {'rollout/reward': reward, 'eval/dev/em': 0.25})
  group = [test_episodes.trajectory(0, s, reward=1.0 - s, **given) for s in (0, 1)]
  table = table_lib.build(group)
  where = table.action_mask
  table = dataclasses.replace(
    table,
    advantages=np.where(where, 1.5 - 3 * table.trajectory, 0.0),
    values=np.linspace(-1, 1, len(table)),
  )
  columns = [table.take(table.trajectory == i).list_tokens() for i in (0, 1)]
  logs = folder / 'trajectories'
  rollout = [*group, test_episodes.failed()]
  test_episodes.write(logs / 'step-00002-rollout.jsonl', rollout, columns=columns)
  test_episodes.write(logs / 'step-00000-dev.jsonl', [test_episodes.trajectory(4)])
  return table


class Elements(html.parser.HTMLParser):
  """The tags of a page, and its scripts by their ids."""

  def __init__(self, text: str):
    super().__init__()
    self.tags, self.scripts, self._script = [], {}, None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self._script = dict(attrs).get('id', 'code') if tag == 'script' else None

  def handle_data(self, data):
    if self._script:
      self.scripts[self._script] = data
      self._script = None

  def read(self, name: str):
    return json.loads(zlib.decompress(base64.b64decode(self.scripts[name])))


def make_page(folder: pathlib.Path) -> tuple[str, Elements]:
  page.write_page(folder, folder / 'report.html')
  text = (folder / 'report.html').read_text(encoding='utf-8')
  return text, Elements(text)


def test_columns_of_a_known_trajectory_survive(tmp_path):
  table = write_run(tmp_path)
  _, elements = make_page(tmp_path)
  run, (first, second) = elements.read('run'), elements.read('tokens-0')
  for i, columns in enumerate((first, second)):
    rows = table.take(table.trajectory == i)
    assert columns.pop('segments') == [9]
    assert 'behaviour_logprobs' not in columns, 'they equal the log-probs'
    names = ('tokens', 'action_mask', 'old_logprobs', 'policy_steps', 'rewards')
    assert columns.keys() == {*names, 'advantages', 'values'}
    for name, column in columns.items():
      np.testing.assert_allclose(column, getattr(rows, name), atol=6e-5)
  assert run['vocabulary'].keys() == {str(i) for i in range(9)}
  assert run['vocabulary']['2'] == '<|im_end|>'
  episodes = run['episodes']
  assert episodes['tokens'] == [-1, 0, 1, -1]
  assert episodes['reward'] == [1, 1, 0, None] and episodes['status'][3] == 'error'
  assert episodes['group'] == [0, 1, 1, 2] and episodes['sample'] == [0, 0, 1, 0]
  assert episodes['tools'] == [['search']] * 4 and episodes['calls'] == [1] * 4
  assert run['logs'] == [{'step': 0, 'name': 'dev'}, {'step': 2, 'name': 'rollout'}]
  assert run['groups'][1] == [1, 'bridge-0', 'Who built the Arden Bridge?']
  assert run['metrics']['series']['rollout/reward'] == [0, None, 1]
  assert ['seed', '7', True] in run['config'] and not run['problems']
  _, call, result, answer = elements.read('text-0')[1]['messages'][1:]
  assert call['calls'] == [{'name': 'search', 'arguments': {'query': 'Arden Bridge'}}]
  assert result['name'] == 'search' and (answer['turn'], answer['reward']) == (2, 1)
  assert elements.read('text-0')[3]['error'] == 'ValueError: no'


def test_half_a_line_of_metrics_and_half_a_log_are_left_out(tmp_path):
  write_run(tmp_path)
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 3, "rollout/rew')
  logs = tmp_path / 'trajectories'
  whole = (logs / 'step-00002-rollout.jsonl').read_bytes()
  (logs / 'step-00003-rollout.jsonl').write_bytes(whole[: len(whole) // 2])
  (logs / 'step-00003-dev.jsonl.part').write_bytes(whole[:100])
  before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  said = page.write_page(tmp_path, tmp_path / 'report.html')
  assert '3 lines of metrics, 4 episodes, 2 of them with tokens' in said
  assert re.search('Left out: .*step-00003-rollout.jsonl, line 2 is no ep', said)
  after = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  assert after.pop(tmp_path / 'report.html') and after == before


def test_only_metrics_or_only_a_file_of_another_program_make_a_page(tmp_path):
  write_run(tmp_path)
  shutil.rmtree(tmp_path / 'trajectories')
  (tmp_path / 'config.json').write_text('{"model": {"path": "/none"}')
  _, elements = make_page(tmp_path)
  run = elements.read('run')
  assert run['episodes']['reward'] == []
  assert 'config.json is no JSON' in ''.join(run['problems'])
  (tmp_path / 'metrics.jsonl').unlink()
  (tmp_path / 'trajectories').mkdir()
  (tmp_path / 'trajectories' / 'other.jsonl').write_text('{"id": "x"}')
  _, elements = make_page(tmp_path)
  assert 'other.jsonl, line 1 is no episode' in elements.read('run')['problems'][0]


def test_what_an_episode_says_is_no_markup(tmp_path):
  folder = tmp_path / 'a <b> & <script>'
  write_run(folder, messages=MESSAGES, task_id=HOSTILE)
  text, elements = make_page(folder)
  write_run(tmp_path / 'plain')
  plain = make_page(tmp_path / 'plain')[1]
  assert elements.tags == plain.tags, 'the data adds no element'
  assert 'caught' not in text and '<b>' not in text
  assert elements.read('text-0')[1]['messages'][0]['content'] == HOSTILE
  assert elements.read('run')['groups'][1][1] == HOSTILE


CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'google-chrome'))), None)
FLAGS = '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run'
FLAGS += ' --disable-background-networking --disable-component-update --disable-sync'


@pytest.mark.skipif(not CHROMIUM, reason='there is no Chromium on the PATH')
class TestBrowser:
  """The address says what is shown, so that no driver of the browser is needed."""

  def show(self, folder: pathlib.Path, address: str) -> str:
    """Returns the elements of the page after all its scripts have run."""
    flags = [*FLAGS.split(), f'--user-data-dir={folder / "browser"}']
    place = f'file://{folder / "report.html"}#{address}'
    command = [CHROMIUM, *flags, '--virtual-time-budget=20000', '--dump-dom', place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in done.stdout, done.stderr[-2000:]
    return done.stdout

  def test_a_group_its_tokens_and_a_hostile_text(self, tmp_path):
    messages = [
      {'role': 'user', 'content': HOSTILE},
      *test_episodes.trajectory().messages,
    ]
    write_run(tmp_path, messages=messages)
    make_page(tmp_path)
    shown = self.show(tmp_path, 'view=episodes&group=1&color=advantage&tokens=true')
    tokens = re.findall(r'<span class="token"( style="[^"]+")?>([^<]*)', shown)
    assert len(tokens) == 2 * 9 and tokens[2][1] == '&lt;|im_end|&gt;'
    colored = [style for style, _ in tokens if 'color-mix' in style]
    assert len(colored) == 2 * 5, 'the actions, and no token of the environment'
    assert 'var(--plus)' in colored[0] and 'var(--minus)' in colored[-1]
    shown = self.show(tmp_path, 'view=episodes&group=1&q=<SCRIPT>doc')
    assert '<title>caught' not in shown
    assert '&lt;/script&gt;&lt;script&gt;document.title="caught"' in shown
    assert '2 of 4 episodes in 1 groups.' in shown, 'the search finds both'

  def test_filters_leave_the_groups_that_match(self, tmp_path):
    write_run(tmp_path)
    make_page(tmp_path)
    for address in ('high=0.5&tool=search', 'error=environment+raised'):
      shown = self.show(tmp_path, f'view=episodes&{address}')
      assert '1 of 4 episodes in 1 groups.' in shown

  def test_all_curves_are_drawn_for_printing(self, tmp_path):
    for step in range(3):
      metrics.write(tmp_path, step, {f'rollout/metric_{i}': i + step for i in range(60)})
    make_page(tmp_path)
    shown = self.show(tmp_path, '')
    assert shown.count('<svg') == shown.count('<figcaption>') == 60
    assert 'aria-label="rollout/metric_7, by step"' in shown and '<path' in shown
