"""A script that compares methods refuses what training would, before it plays them."""

import json
import pathlib
from unittest import mock

import pytest
import tiny

from agent_r1_jax import train, types
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.retrieval import bm25, documents
from experiments import comparison


@pytest.fixture
def config(tmp_path):
  # One program for each step, of the size that other tests compile too.
  sizes = tiny.SIZES | {'bucket': tiny.SIZES['slots'], 'narrow': False, 'replicas': 1}
  return tiny.run_config(model=tiny.save(tmp_path / 'model'), **sizes)


def test_episodes_are_played_once_until_what_they_depend_on_changes(config, tmp_path):
  made, config.limits.max_turns = [], 1
  tasks = [types.Task(q, [{'role': 'user', 'content': q}], 'one') for q in ('one', 'two')]
  make_env = lambda: tiny.ClosedOnce(made, [], lambda *_: 1.0)
  methods = {'Base Tool Call': ({'': tasks}, make_env)}

  def play(**options):
    """The numbers, and how many environments were begun; one is only looked at a time."""
    made.clear()
    options = {'workdir': tmp_path, 'summarize': lambda sets: len(sets['']), **options}
    found = comparison.play(config, config.model.path, methods, **options)
    assert found == {'Base Tool Call': len(tasks)}
    assert {env.closings for env in made} == {1}
    return len(made)

  first, again = play(), play()
  assert first == again + 2
  # What a continued run may change does not count, and what it cannot does.
  config.schedule.steps += 1
  assert play() == again
  assert play(made_of='other passages') == first
  config.limits.max_turn_tokens -= 1
  assert play() == first
  tasks.append(types.Task('three', tasks[0].messages, 'one'))
  assert play() == first + 1
  path = pathlib.Path(config.model.path, 'config.json')
  text = path.read_text()
  path.write_text(text + '\n')
  assert play() == first + 1
  # Going back plays nothing: nothing was overwritten.
  tasks.pop()
  path.write_text(text)
  assert play() == again


def test_recall_counts_the_tasks_that_name_their_passages():
  found = bm25.BM25([documents.Document('0', 'Oslo', 'A city.')])
  named = types.Task('0', [], 'x', {'question': 'Oslo?', 'supporting_titles': ['Oslo']})
  bare = types.Task('1', [], 'x', {'question': 'Who?'})
  assert comparison.recall(found, [named, bare]) == {'recall@5': 1.0, 'all in 5': 1.0}
  assert comparison.recall(found, [bare]) == {}


def _run(config, workdir, play):
  methods = {'tools': ({'': []}, lambda: None)}
  algorithm = comparison.make_grpo(config, 0.0)
  given = {'tasks': [], 'evals': {}, 'algorithm': algorithm, 'label': 'GRPO'}
  return comparison.run(config, workdir, play, methods, **given)


def test_nothing_is_played_in_a_workdir_that_is_in_use(config, tmp_path):
  play = mock.Mock()
  with workdir_lib.lock(tmp_path), pytest.raises(ValueError, match='is in use by'):
    _run(config, tmp_path, play)
  assert not play.called


def test_nothing_is_played_in_a_workdir_of_another_configuration(config, tmp_path):
  play = mock.Mock()
  workdir_lib.check_config(tmp_path, {'seed': 7})
  with pytest.raises(ValueError, match='seed: 7 there, 0 now'):
    _run(config, tmp_path, play)
  config.sampling.temperature = 0.0
  with pytest.raises(ValueError, match='sampling.temperature is 0'):
    _run(config, tmp_path, play)
  assert not play.called


def test_what_is_played_holds_the_workdir(config, tmp_path, monkeypatch):
  """And a start that ends there leaves no configuration behind."""
  monkeypatch.setattr(train, 'run', mock.Mock())
  held = []

  def play(*_):
    with pytest.raises(ValueError, match='is in use by'), workdir_lib.lock(tmp_path):
      pass
    held.append(not (tmp_path / 'config.json').exists())
    return {}

  _run(config, pathlib.Path(tmp_path), play)
  assert held == [True, True] and train.run.called


def test_a_recorded_configuration_is_not_written_again(tmp_path):
  workdir_lib.check_config(tmp_path, {'a': 1, 'b': 2})
  workdir_lib.check_config(tmp_path, {'a': 1, 'b': 3}, may_change=['b'], write=False)
  assert json.loads((tmp_path / 'config.json').read_text()) == {'a': 1, 'b': 2}
