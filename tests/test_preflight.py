"""First contact: what is refused or said before anything is compiled."""

import contextlib
import dataclasses
import re
import threading

import grain
import pytest
import templates
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.tasks import context
from agent_r1_jax.train import preflight, task_checks
from experiments import train_tokenizer


@tool_lib.tool
def look(place: str) -> str:
  """Looks at a place.

  Args:
    place: Its name.
  """
  return place


_LIMITS = config_lib.Limits()


def _env(tools=()):
  return env_lib.ToolEnv(tools, lambda *_: 0.0)


def _tasks(*contents):
  return [
    types.Task(f't{i}', [{'role': 'user', 'content': content}])
    for i, content in enumerate(contents)
  ]


def _fit(tasks, env=None, slots=128, **options):
  env = env or _env()
  return preflight.select_fitting_tasks(tiny.chat(), env, tasks, slots=slots, **options)


def _ignorant(directory, **options):
  """A chat whose template writes no tools."""
  template = tokenizer_lib.CHATML.replace('{%- if tools %}', '{%- if false %}')
  train_tokenizer.train(
    tiny.TEXTS, vocab_size=tiny.VOCAB, directory=directory, chat_template=template
  )
  return chat_lib.Chat(tokenizer_lib.load(directory), **options)


def test_a_data_set_on_a_disk_is_not_read_whole():
  read = []
  lazy = grain.MapDataset.source(range(50_000)).map(
    lambda i: read.append(i) or _tasks('word ' * (99 if i < 40 else 1))[0]
  )
  task_checks.check_sets(lazy, {'held_out': lazy})
  tasks, line = _fit(lazy, slots=64, long_prompts='skip')
  # One that does not fit is not learned from; the set stays as it is.
  assert tasks is lazy and line.startswith('1 of 1000 tasks leave no room')
  assert len(read) <= 3 * 1000 + 1 and max(read) > 49_000


@pytest.mark.parametrize(
  'tasks, evals, field',
  [
    (_tasks('x')[0], None, 'tasks is Task('),
    (_tasks('x'), {'dev': ['y']}, "evals['dev'][0]"),
  ],
)
def test_what_is_no_list_or_no_dict_of_sets_is_named(refused, tasks, evals, field):
  with refused(field):
    task_checks.check_sets(tasks, evals)
  task_checks.check_sets(_tasks('x'), {'dev': _tasks('y')})


_USER = {'role': 'user', 'content': 'x'}
_THOUGHT = {'role': 'assistant', 'content': 'x', 'reasoning_content': 7}


@pytest.mark.parametrize(
  'changes',
  [
    {'messages': [{'role': 'usr', 'content': 'x'}]},
    {'messages': [{'role': 'user', 'content': 7}]},
    {'messages': [_USER, {'role': 'user'}]},
    {'messages': ['x']},
    {'messages': [_USER, _THOUGHT]},
    {'id': 7},
    {'id': ' '},
    {'id': ['a']},
    {'id': 't0', 'messages': [{'role': 'user', 'content': 'z'}]},
    {'answer': object()},
    {'answer': {'x': [len]}},
  ],
)
def test_the_fields_of_every_task_are_checked(refused, changes):
  good = _tasks('x', 'y')
  wrong = [*good, dataclasses.replace(types.Task('9', [_USER], 'z'), **changes)]
  with refused('tasks[2] ('):
    task_checks.check_sets(wrong, {'dev': good})
  with refused("evals['dev'][2] ("):
    task_checks.check_sets(good, {'dev': wrong})


def test_a_task_may_be_listed_twice_and_have_no_messages():
  tasks = [*_tasks('x'), *_tasks('x'), types.Task('9', [], ({1, 2}, (3.5, None)))]
  task_checks.check_sets(tasks, {'dev': tasks})


def _equal(task, messages):
  return float(messages[-1]['content'] == task.answer)


async def _boxed(task, messages):
  return {'right': float(messages[-1]['content'] == f'\\boxed{{{task.answer}}}')}


def _in_tags(task, messages):
  return float(
    task.answer in re.findall('<answer>(.*)</answer>', messages[-1]['content'])
  )


def _number(task, messages):
  return float(float(messages[-1]['content']) == float(task.answer))


def _broken(task, messages):
  raise KeyError('not of an answer')


@pytest.mark.parametrize(
  'wrap', [lambda env: env, lambda env: context.SlidingWindow(env, turns=2)]
)
@pytest.mark.parametrize(
  ('reward', 'answer', 'compares'),
  [
    *((_equal, 42, True), (_equal, 2.5, True), (_equal, '42', False)),
    *((_in_tags, 42, True), (_in_tags, '42', False), (_equal, None, False)),
    *((_boxed, 42, False), (_number, 42, False), (_broken, 42, False)),
  ],
)
def test_a_number_is_refused_where_the_reward_compares_text(
  reward, answer, compares, wrap
):
  tasks = [types.Task('a', [_USER], '1'), types.Task('b', [_USER], answer)]
  env = wrap(env_lib.ToolEnv([], reward))
  named = pytest.raises(ValueError, match=f"answer of 'b' is {answer}, ")
  with named if compares else contextlib.nullcontext():
    task_checks.check_answers(env, tasks, config_lib.Limits())


def test_a_reward_that_hangs_is_not_waited_for_before_a_run():
  over = threading.Event()
  env = env_lib.ToolEnv([], lambda task, messages: float(over.wait()))
  limits = config_lib.Limits(step_seconds=0.2)
  try:
    task_checks.check_answers(env, [types.Task('a', [_USER], 42)], limits)
  finally:
    over.set()


@pytest.mark.parametrize('messages', [[{'role': 'user'}], [{'content': 'x'}], []])
def test_a_broken_message_is_named_with_its_task(refused, messages):
  with refused("tasks[1] ('broken'): "):
    _fit([*_tasks('x'), types.Task('broken', messages)])


class TestFitting:
  def _length(self, task, tools=()):
    schemas = [tool.schema for tool in tools]
    return len(tiny.chat().encode_prompt(task.messages, schemas))

  @pytest.mark.parametrize('tools', [[], [look]])
  def test_a_prompt_fits_if_a_token_of_a_reply_does(self, tools):
    tasks = _tasks('one two three ' * 20, 'x')
    length = self._length(tasks[0], tools)
    for slots, fits in ((length + 1, True), (length, False)):
      kept, said = _fit(tasks, _env(tools), slots, long_prompts='skip')
      assert list(kept) == (tasks if fits else tasks[1:])
      assert (said is None) == fits

  def test_a_prompt_that_fits_no_row_is_refused_with_its_length(self, refused):
    tasks = _tasks('x', 'one two three ' * 100, 'one two three ' * 200)
    lengths = [self._length(task) for task in tasks]
    with refused(f"'t1' with a prompt of {lengths[1]}") as error:
      _fit(tasks)
    assert str(lengths[2]) in str(error.value)

  def test_where_none_fits_none_can_be_left_out(self, refused):
    with refused('1 of 1 tasks'):
      _fit(_tasks('one two three ' * 100), long_prompts='skip')

  def test_other_environments_begin_as_they_like(self, refused):
    class Own(env_lib.ToolEnv):
      async def reset(self, task):
        return [{'role': 'user', 'content': 'short'}]

    long = _tasks('one two three ' * 100)
    rebuilt = context.Rebuilt(_env(), lambda env: [{'role': 'user', 'content': 'x'}])
    for env in (Own([], lambda *_: 0.0), rebuilt):
      assert _fit(long, env) == (long, None)
    with refused('1 of 1 tasks'):
      _fit(long, context.SlidingWindow(_env(), turns=2))

  def test_evaluations_keep_their_tasks(self):
    short, long = _tasks('x', 'one two three ' * 100)
    config = tiny.run_config(slots=128, long_prompts='skip')
    look = lambda tasks, evals: preflight.check_prompts(
      tiny.chat(), _env(), tasks, evals, config
    )
    assert look([short], {'dev': [short]}) == ([short], [])
    kept, (first, second) = look([short, long], {'dev': [short, long]})
    assert list(kept) == [short]
    assert first.startswith('1 of 2 tasks leave') and first.endswith('are left out.')
    assert second.startswith("1 of 2 tasks of evals['dev'] leave")
    assert second.endswith('They count as unanswered.')


@pytest.mark.parametrize(
  ('env', 'limits', 'said'),
  [
    ('plain', {'step_seconds': 99}, r'step_seconds is 99, and dev\[1\] .* needs 100'),
    ('wrapped', {'step_seconds': 99}, 'needs 100: raise it'),
    ('plain', {'episode_seconds': 9.5}, r'episode_seconds is 9.5, and tasks\[0\]'),
    ('plain', {'step_seconds': 100, 'episode_seconds': 10}, ''),
    ('wrapped', {'step_seconds': 100, 'episode_seconds': 10}, ''),
    ('other', {'step_seconds': 1}, ''),
    ('wrapped other', {'step_seconds': 1}, ''),
  ],
)
def test_limits_below_the_times_of_a_task_are_refused(env, limits, said):
  class Slow(env_lib.ToolEnv):
    def least_limits(self, task):
      return {'episode_seconds': 10} | ({'step_seconds': 100} if task.id == 't1' else {})

  inner = _env() if 'other' in env else Slow([], lambda *_: 0.0)
  played = context.SlidingWindow(inner, turns=2) if 'wrapped' in env else inner
  tasks = _tasks('x', 'y')
  check = lambda: task_checks.check_times(
    played, {'tasks': tasks[:1], 'dev': tasks}, config_lib.Limits(**limits)
  )
  with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
    check()


class TestTools:
  @pytest.mark.parametrize(
    ('who', 'said'),
    [
      ('default', 'system message tells of them (look)'),
      ('own', "Only the tasks' own messages tell of the tools (look)"),
    ],
  )
  def test_where_a_template_writes_no_tools_it_is_said_who_does(
    self, tmp_path, who, said
  ):
    chat = _ignorant(tmp_path, tools_in_prompt=who)
    assert said in str(preflight.describe_tool_prompt(chat, _env([look])))
    for other, tools in ((chat, []), (tiny.chat(), []), (tiny.chat(), [look])):
      assert preflight.describe_tool_prompt(other, _env(tools)) is None

  def test_tools_that_no_template_writes_are_refused(self, tmp_path, refused):
    chat = _ignorant(tmp_path, tools_in_prompt='refuse')
    assert preflight.describe_tool_prompt(chat, _env()) is None
    with refused('tools_in_prompt'):
      preflight.describe_tool_prompt(chat, _env([look]))

  @pytest.mark.parametrize('name', ['gemma2', 'phi4', 'olmo3'])
  def test_the_form_of_answers_is_said_where_a_template_has_none(self, name, tmp_path):
    chat = chat_lib.Chat(templates.load(name, tmp_path))
    said = str(preflight.describe_tool_prompt(chat, _env([look])))
    assert 'tells of them (look)' in said
    assert ('between <tool_response> and' in said) is (name != 'olmo3')

  def test_a_template_that_writes_no_answer_is_refused(self, tmp_path, refused):
    template = """{%- for m in messages %}{% if loop.index < 3 %}
      {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
      {%- endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""
    train_tokenizer.train(
      tiny.TEXTS, vocab_size=tiny.VOCAB, directory=tmp_path, chat_template=template
    )
    chat = chat_lib.Chat(tokenizer_lib.load(tmp_path))
    with refused(str(tmp_path)):
      preflight.describe_tool_prompt(chat, _env([look]))

  def test_roles_that_a_template_refuses_are_found_in_short_prompts_too(
    self, tmp_path, refused
  ):
    chat = chat_lib.Chat(templates.load('gemma2', tmp_path))
    tasks = _tasks('x', 'y')
    tasks[1].messages.insert(0, {'role': 'system', 'content': 'z'})
    with refused('tasks[1]'):
      preflight.select_fitting_tasks(chat, _env([]), tasks, slots=128)


class TestOpenEnvironment:
  @pytest.mark.parametrize('error', [KeyError('page 7'), TimeoutError('theirs')])
  def test_what_make_env_raises_is_raised(self, error):
    def make_env():
      raise error

    with pytest.raises(type(error), match=error.args[0]):
      preflight.open_environment(make_env, _LIMITS).__enter__()

  def test_an_environment_that_is_made_too_late_is_closed(self, gate, refused):
    closed = threading.Event()

    class Closes(env_lib.ToolEnv):
      async def close(self):
        closed.set()

    def make_env() -> env_lib.Env:
      gate.wait()
      return Closes([], lambda *_: 0.0)

    limits = config_lib.Limits(reset_seconds=0.1)
    with refused('limits.reset_seconds'):
      preflight.open_environment(make_env, limits).__enter__()
    assert not closed.is_set()
    gate.set()
    assert closed.wait(600)

  def test_it_is_closed_once_whatever_the_look_raises(self):
    made = []
    make_env = lambda: tiny.ClosedOnce(made, [], lambda *_: 0.0)
    with pytest.raises(KeyError), preflight.open_environment(make_env, _LIMITS) as env:
      assert not env.closings
      raise KeyError('found')
    assert [env.closings for env in made] == [1]

  @pytest.mark.parametrize('error', [KeyError('socket'), SystemExit(1), None])
  def test_a_close_that_raises_or_hangs_is_logged(self, gate, caplog, error):
    env = _env()

    def close():
      if error:
        raise error
      gate.wait()

    env.close = close
    limits = config_lib.Limits(close_seconds=60 if error else 0.1)
    with preflight.open_environment(lambda: env, limits):
      pass
    expected = type(error).__name__ if error else 'within 0.1 seconds .close_seconds'
    assert re.search(f'close failed: .*{expected}', caplog.text)
