"""The world 'terminal': what is practised is what a real shell does."""

import itertools

import confined
import pytest

from agent_r1_jax.tasks import chores
from experiments.worlds import terminal, world

pytestmark = pytest.mark.usefixtures('needs_shell')
needs_shell = confined.needs_shell
KINDS = tuple(terminal.KINDS)


async def _play(task, messages, make_env):
  env = make_env()
  await env.reset(task)
  replies = [m['content'] for m in messages if m['role'] == 'assistant']
  steps = [await env.step(reply) for reply in replies]
  if isinstance(env, chores.TerminalEnv):
    env.close()
  return steps


@pytest.mark.parametrize('kind', KINDS)
async def test_a_demonstration_has_what_the_shell_prints(kind):
  for task in terminal.tasks(5, 1, 'dev', (kind,)):
    for fate in ('right', 'look'):
      messages = terminal.demonstrate(task, fate)
      steps = await _play(terminal.ask(task), messages, chores.TerminalEnv)
      assert [s.messages[0]['content'] for s in steps[:-1]] == [
        m['content'] for m in messages if m['role'] == 'tool'
      ]
      assert steps[-1].done
      if fate == 'right':
        assert steps[-1].reward == steps[-1].metrics['reward/done'] == 1


async def test_without_the_shell_a_guess_may_be_right_and_nothing_else():
  for task in terminal.tasks(5, 30, 'dev', KINDS):
    reply = {'role': 'assistant', 'content': task.info['reply']}
    (step,) = await _play(task, [reply], terminal.make_env_alone)
    assert step.done and step.reward == ('reply' in task.answer)


def test_no_episode_of_a_held_out_kind_is_practised():
  held_out = {t.info['question'] for t in terminal.tasks(0, 30, 'base', KINDS)}
  assert held_out
  wordings = ('Which file has the most', 'Name the longest', 'sorted lines', 'file that')
  seen = set()
  for example in itertools.islice(terminal.examples(0), 600):
    seen.add(example.kind)
    if example.tools:
      assert not any(w in example.messages[0]['content'] for w in wordings)
  assert seen == {*terminal.MIXTURE, 'command', 'read'}
  assert isinstance(terminal.WORLD, world.World)
  schemas = terminal.WORLD.schemas()
  assert [schema['function']['name'] for schema in schemas] == ['shell']
