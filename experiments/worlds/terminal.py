"""Chores in a terminal: files in a workspace, a real shell, a checked end state.

The environment is agent_r1_jax.tasks.chores, as for a large model; the chores
(terminal_chores.py) replace the data. The prompt is only the chore: the instructions of
chores.agent_task are longer than the chores.

Held out are words of names and contents, each of which belongs to one split
(experiments/miniwiki/world.py), and the kinds in HELD_OUT, whose first commands are
practised only outside of episodes.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import random

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import call_formats, calls, env
from agent_r1_jax.tasks import chores, qa
from agent_r1_jax.tools import shell
from experiments import comparison
from experiments.miniwiki import world as words_lib
from experiments.worlds import terminal_chores as kinds_lib
from experiments.worlds import world as world_lib

TRAINED, HELD_OUT, KINDS = kinds_lib.TRAINED, kinds_lib.HELD_OUT, kinds_lib.KINDS
# The fates of demonstrations. 'look': lists the files and then gives up; 'stop': gives up
# at once. Most only look, so that a greedy policy does too. None guesses an answer: a
# policy that had seen guesses did not learn to copy the shell's output.
MIXTURE = {'right': 0.33, 'look': 0.62, 'stop': 0.05}
# Shares of the practice: demonstrations, first commands of all kinds, and answers found
# in the output.
PRACTICE = {'demonstration': 0.6, 'command': 0.3, 'read': 0.1}
_NOTHING = '(The command printed nothing.)'  # In the shell tool's words.


def tasks(
  seed: int, n: int, split: str = 'train', kinds: Sequence[str] = tuple(TRAINED)
) -> list[types.Task]:
  """Makes chores, with equal shares of the kinds.

  Args:
    seed: The seed of all randomness; equal arguments make equal tasks.
    n: The number of chores.
    split: The split of miniwiki's words for names and contents: 'base' and 'train', 'dev'
      for choosing settings, 'test' for reported numbers.
    kinds: Keys of KINDS; those in HELD_OUT are for tests.

  Returns:
    Tasks for chores.TerminalEnv. `info` also has the kind and the solution: `commands`,
    their output, and the `reply` that ends the episode.
  """
  if unknown := {*kinds} - {*KINDS}:
    raise ValueError(f'kinds: {sorted(unknown)} are none of {", ".join(KINDS)}')
  rng = random.Random(f'terminal {seed} {split} {" ".join(kinds)}')
  return [
    _make_task(rng, f'{split}-{seed}-{number}', split, kinds[number % len(kinds)])
    for number in range(n)
  ]


def _make_task(rng, task_id, split, kind) -> types.Task:
  chore = KINDS[kind](kinds_lib.Scene(rng, words_lib.words(split)))
  known = chore.answer.get('reply')
  info = {
    'kind': kind,
    'question': chore.question,
    'files': chore.files,
    'commands': list(chore.commands),
    'prints': chore.printed,
    'reply': 'Done.' if known is None else f'<answer>{known}</answer>',
  }
  return chores.agent_task(types.Task(task_id, [], chore.answer, info))


def ask(task: types.Task) -> types.Task:
  """Returns the task with only the chore in its prompt."""
  messages = [{'role': 'user', 'content': task.info['question']}]
  return dataclasses.replace(task, messages=messages)


def held_out(seed: int, n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes the held-out sets: of the trained kinds, and of others."""
  sets = {'new_names': TRAINED, 'new_kinds': HELD_OUT}
  return {
    name: [ask(task) for task in tasks(seed, n, split, tuple(kinds))]
    for name, kinds in sets.items()
  }


def make_env_alone() -> env.ToolEnv:
  """Makes an environment without the shell, which rewards right guesses."""
  return env.ToolEnv([], _score_guess)


def _score_guess(task, messages) -> dict[str, float]:
  reply = qa.extract_answer(messages[-1]['content'])
  done = chores.is_done(task, reply, task.info['files']) and 'test' not in task.answer
  return {'done': float(done)}


def methods(sets: comparison.Sets) -> dict[str, comparison.Method]:
  """Returns the methods: with the shell, or without."""
  return {'direct': (sets, make_env_alone), 'tools': (sets, chores.TerminalEnv)}


def examples(seed: int) -> Iterator[world_lib.Example]:
  """Yields practice examples, endlessly, without episodes of held-out kinds."""
  rng = random.Random(f'terminal examples {seed}')
  while True:
    practice = rng.choices([*PRACTICE], [*PRACTICE.values()])[0]
    kinds = [*(TRAINED if practice == 'demonstration' else KINDS)]
    task = _make_task(rng, '', 'base', rng.choice(kinds))
    info = task.info
    if practice == 'demonstration':
      fate = rng.choices([*MIXTURE], [*MIXTURE.values()])[0]
      yield world_lib.Example(demonstrate(task, fate), kind=fate)
    elif practice == 'command':
      asked, reply = f'{info["question"]} First?', call(info['commands'][0])
      yield world_lib.talk(asked, reply, practice)
    elif 'reply' in task.answer:
      yield world_lib.talk(f'Printed:\n{info["prints"][-1]}', info['reply'], practice)


def demonstrate(task: types.Task, fate: str = 'right') -> list[types.Message]:
  """Writes an episode with the shell, right or as `fate` says."""
  messages, info = [*ask(task).messages], task.info
  names = {path.split('/')[0] for path in info['files']}
  steps = {
    'right': zip(info['commands'], info['prints'], strict=True),
    'look': [('ls', ''.join(f'{name}\n' for name in sorted(names)))],
    'stop': [],
  }[fate]
  for command, printed in steps:
    messages.append(world_lib.say(call(command)))
    messages.append({'role': 'tool', 'name': 'shell', 'content': printed or _NOTHING})
  return [*messages, world_lib.say(info['reply'] if fate == 'right' else 'Done.')]


def call(command: str) -> str:
  """Writes the call that runs a command."""
  return call_formats.HERMES.render(calls.ToolCall('shell', {'command': command}))


def text_of(example: world_lib.Example) -> Iterator[str]:
  """Yields an example's texts, and sometimes the numbers that are counted."""
  yield from world_lib.texts_of(example)
  if example.kind == 'stop':
    yield '\n'.join(map(str, range(500)))


def _schemas():
  """Returns the shell tool's schema; fails first if no shell can be confined."""
  session = shell.Shell()
  try:
    return [shell.shell_tool(session).schema]
  finally:
    session.close()


def _is(kind: str, task: types.Task) -> bool:
  return kind == next(k for k in ('test', 'files', 'reply') if k in task.answer)


WORLD = world_lib.World(
  examples=examples,
  text=lambda example: [*text_of(example)],
  schemas=_schemas,
  tasks=lambda seed, n: [ask(task) for task in tasks(seed, n)],
  held_out=held_out,
  methods=methods,
  labels={'direct': 'Without the tool', 'tools': 'Base policy'},
  score='reward/done',
  kinds={
    'questions': lambda task: _is('reply', task),
    'changes': lambda task: _is('files', task),
    'repairs': lambda task: _is('test', task),
  },
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=30, tasks=12, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turns=8, max_turn_tokens=80),
    optimizer=config_lib.Optimizer(learning_rate=2e-4),
    engine=config_lib.Engine(slots=640, decode_steps=16, replicas=2),
  ),
  base=sft.Config(steps=900, rows=4, row_tokens=512, learning_rate=2.5e-3),
  vocab=1400,
  also=('direct',),
)
