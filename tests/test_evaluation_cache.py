"""What was measured once is read, and measured again when what it depends on changed."""

import contextlib
import pathlib
import warnings

import pytest
import script
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.train import evaluate
from experiments import evaluation_cache


def _tasks(*questions: str) -> list[types.Task]:
  return [
    types.Task(q, [{'role': 'user', 'content': q}], 'one', {'question': q})
    for q in questions
  ]


class Play:
  """`evaluate_or_read` with a tiny policy that counts the episodes it plays."""

  def __init__(self, folder: pathlib.Path):
    self.path = folder / 'results.jsonl'
    self.model = folder / 'model'
    tiny.save(self.model)
    self.config = config_lib.Config(
      engine=config_lib.Engine(
        rows=tiny.SIZES['rows'],
        slots=tiny.SIZES['slots'],
        decode_steps=tiny.SIZES['decode_steps'],
        prefill_rows=tiny.SIZES['prefill_rows'],
        prefill_tokens=tiny.SIZES['prefill_tokens'],
        bucket=tiny.BUCKET,
      ),
      limits=config_lib.Limits(max_turns=1, max_turn_tokens=8),
    )
    self.rows = {'short': _tasks('one', 'two'), 'long': _tasks('one two three four')}
    self.episodes = 0

  def __call__(self, **depends_on):
    """Returns the numbers, and how many episodes were played for them."""
    self.episodes = 0

    class Counts(env.ToolEnv):
      async def reset(_, task):
        self.episodes += 1
        return await super().reset(task)

    def make_env():
      return Counts([], lambda task, messages: 1.0)

    numbers = evaluation_cache.evaluate_or_read(
      self.path,
      self.config,
      self.model,
      {method: ({'': tasks}, make_env) for method, tasks in self.rows.items()},
      summarize=lambda sets: evaluate.summarize(sets['']),
      depends_on=depends_on,
    )
    return numbers, self.episodes


@pytest.fixture
def play(tmp_path):
  return Play(tmp_path)


def test_the_second_time_nothing_is_played(play, capsys):
  first, episodes = play(world=1)
  assert episodes == 3 and list(first) == ['short', 'long']
  assert first['short']['tokens'] > 0
  assert 'as in' not in capsys.readouterr().out
  again, episodes = play(world=1)
  assert (again, episodes) == (first, 0)
  assert capsys.readouterr().out.count(f'as in {play.path}; nothing that it') == 2


def test_every_environment_is_closed_once(play, tmp_path):
  """Those that are made to look at, too."""
  made = []
  make_env = lambda: tiny.ClosedOnce(made, [], lambda *_: 1.0)
  rows = {'short': ({'': play.rows['short']}, make_env)}
  train.play(play.config, play.model, rows, workdir=tmp_path / 'played')
  assert [env.closings for env in made] == [1] * 4


def test_what_the_numbers_depend_on_is_played_again(play):
  first, _ = play(world=1)
  assert play(world=2)[1] == 3
  play.rows['long'] = _tasks('one two three five')
  assert play(world=1)[1] == 1  # Of two methods, one.
  play.config.limits.max_turn_tokens = 6
  assert play(world=1)[1] == 3
  play.config.limits.max_turn_tokens = 8
  # What changes the speed alone does not count; and what was before is there still.
  play.config.engine.replicas, play.rows['long'] = 2, _tasks('one two three four')
  assert play(world=1) == (first, 0)


@pytest.mark.parametrize(
  ('name', 'value', 'counts'),
  [
    ('chat.tool_format', 'react', True),
    ('chat.tools_in_prompt', 'own', True),
    ('chat.stop_strings', '["x"]', True),
    ('evaluation.temperature', 1.0, True),
    ('evaluation.tool_grammar', True, True),
    ('limits.max_turns', 2, True),
    ('model.dtype', 'bfloat16', True),
    ('engine.slots', 99, True),
    ('seed', 1, True),
    ('engine.rows', 2, False),
    ('model.lora_rank', 4, False),
    ('optimizer.learning_rate', 0.1, False),
    ('sampling.temperature', 0.5, False),
    ('sinks', '', False),
  ],
)
def test_which_fields_count(tmp_path, monkeypatch, name, value, counts):
  tiny.save(tmp_path / 'model')
  played, config = [], config_lib.Config()
  monkeypatch.setattr(evaluation_cache, '_code_digest', lambda: 'code')
  monkeypatch.setattr(
    train, 'play', lambda *_: played.append(1) or {'a': {'': []}}, raising=True
  )
  for given in (config, fields.replace(config, {name: value})):
    evaluation_cache.evaluate_or_read(
      tmp_path / 'results.jsonl',
      given,
      tmp_path / 'model',
      {'a': ({'': []}, lambda: None)},
      summarize=lambda sets: 0,
      depends_on={},
    )
  assert len(played) == 1 + counts


def test_another_model_in_the_same_place_is_played_again(play):
  play()
  config = play.model / 'config.json'
  config.write_text(config.read_text() + '\n')
  assert play()[1] == 3
  # The same files, written once more, are the same model.
  for path in play.model.iterdir():
    path.write_bytes(path.read_bytes())
  assert play()[1] == 0


def test_other_code_is_played_again(play, monkeypatch):
  play()
  monkeypatch.setattr(evaluation_cache, '_code_digest', lambda: 'a reward was corrected')
  assert play()[1] == 3


def test_the_code_is_that_of_the_package_and_of_the_script(tmp_path):
  folder = tmp_path / 'of_a_user' / 'game'
  folder.mkdir(parents=True)
  seen = []
  for text, world, other in ('111', '211', '221', '222'):
    (folder / 'script.py').write_text(
      'from experiments import evaluation_cache\nfrom of_a_user import world\n'
      f'print(evaluation_cache._code_digest())\n{text}'
    )
    (tmp_path / 'of_a_user' / 'world.py').write_text(world)
    (tmp_path / 'of_a_user' / 'other.py').write_text(other)  # It is not imported.
    done = script.run('-m', 'of_a_user.game.script', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen.append(done.stdout)
  assert seen[0] != seen[1] != seen[2] == seen[3]
  done = script.run(folder / 'script.py', PYTHONPATH=f'{script.ROOT}:{tmp_path}')
  # of_a_user/world.py is not in the folder of the script: nothing else is known of it.
  assert done.stdout and done.stdout != seen[3]


class TestFile:
  def test_a_line_is_found_by_all_of_its_key(self, tmp_path):
    path = tmp_path / 'a' / 'results.jsonl'
    assert evaluation_cache.find(path, {'method': 'x'}) is None
    evaluation_cache.add(path, {'method': 'x', 'seed': 0, 'n': 1})
    evaluation_cache.add(path, {'method': 'x', 'seed': 1, 'n': 2})
    assert evaluation_cache.find(path, {'method': 'x', 'seed': 0})['n'] == 1
    assert evaluation_cache.find(path, {'method': 'x'})['n'] == 2  # The last.
    assert evaluation_cache.find(path, {'method': 'x', 'seed': 2}) is None
    assert evaluation_cache.find(path, {'method': 'x', 'other': None}) is None
    # A tuple is a list once it is written.
    evaluation_cache.add(path, {'sizes': (1, 2)})
    assert evaluation_cache.find(path, {'sizes': (1, 2)})

  def test_a_line_cut_short_loses_itself_alone(self, tmp_path):
    path = tmp_path / 'results.jsonl'
    evaluation_cache.add(path, {'method': 'x'})
    path.write_text(path.read_text() + '{"method": "y", "n": [1, ')
    evaluation_cache.add(path, {'method': 'z'})
    with pytest.warns(UserWarning, match='line 2 is no JSON'):
      found = evaluation_cache.read(path)
    assert [line['method'] for line in found] == ['x', 'z']

  def test_processes_that_write_at_the_same_time_lose_no_line(self, tmp_path):
    path = tmp_path / 'results.jsonl'
    code = (
      'import sys; from experiments import evaluation_cache\n'
      'for i in range(50):\n'
      '  evaluation_cache.add(sys.argv[1], {"who": sys.argv[2], "i": i})'
    )
    with contextlib.ExitStack() as stack:
      start = lambda who: stack.enter_context(script.Process('-c', code, path, who))
      writers = [start(who) for who in 'abc']
      assert [writer.wait(300) for writer in writers] == [0, 0, 0]
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      lines = evaluation_cache.read(path)
    assert {(line['who'], line['i']) for line in lines} == {
      (who, i) for who in 'abc' for i in range(50)
    }
