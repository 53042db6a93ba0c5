"""A script that compares methods refuses what training would, before it plays them."""

import json
import pathlib
from unittest import mock

import pytest
import tiny

from agent_r1_jax import train
from agent_r1_jax.host import workdir as workdir_lib
from experiments import comparison


@pytest.fixture
def config(tmp_path):
  return tiny.run_config(model=tiny.save(tmp_path / 'model'), rows=2, slots=64)


def _run(config, workdir, play):
  methods = {'tools': ({'': []}, lambda: None)}
  given = {'tasks': [], 'evals': {}, 'kl_coef': 0.0, 'label': 'GRPO'}
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
