"""What people and their tools find at the top of a repository, and what hosts run."""

import os
import pathlib
import re

import pytest
import yaml

import agent_r1_jax
from agent_r1_jax.checks import doctor

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / '.github' / 'workflows').glob('*.yml'))


def _targets():
  """The targets of the Makefile that have a name of their own."""
  return set(re.findall('^([a-z]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))


def test_the_citation_has_what_the_format_asks_for_and_this_version():
  citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
  assert {'cff-version', 'message', 'title', 'authors'} <= citation.keys()
  assert citation['version'] == agent_r1_jax.__version__


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_commands_of_this_repository(path):
  """And actions of GitHub's own alone, of one version, that may only read."""
  workflow = yaml.safe_load(path.read_text())
  assert workflow['permissions'] == {'contents': 'read'}
  steps = [step for job in workflow['jobs'].values() for step in job['steps']]
  assert all('permissions' not in job for job in workflow['jobs'].values())
  for action in (step['uses'] for step in steps if 'uses' in step):
    assert re.fullmatch(r'actions/[\w-]+@v\d+\.\d+\.\d+', action), action
  commands = [step['run'] for step in steps if 'run' in step]
  assert commands
  for command in commands:
    if command.startswith('make '):
      assert command.removeprefix('make ') in _targets(), command
    else:
      assert os.access(ROOT / command, os.X_OK), command


def test_the_suite_runs_on_several_versions_of_python():
  (path,) = WORKFLOWS
  suite = yaml.safe_load(path.read_text())['jobs']['suite']
  assert suite['strategy']['matrix']['python'] == list(doctor.PYTHONS)
  assert [step['run'] for step in suite['steps'] if 'run' in step] == ['.ci/run']


def test_coding_assistants_get_forty_lines_with_commands_that_exist():
  text = (ROOT / 'AGENTS.md').read_text()
  assert len(text.splitlines()) <= 40
  assert set(re.findall('`make ([a-z]+)', text)) <= _targets()
  (rooms,) = re.findall(r'^## Rooms.*?\n(?=## )', text, re.MULTILINE | re.DOTALL)
  for name in re.findall(r'`([\w./]+)`', rooms):
    there = (ROOT / name, ROOT / 'agent_r1_jax' / name)
    assert any(path.exists() for path in there), name
