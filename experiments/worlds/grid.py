r"""Numbers in a picture: too small to read in it, large under the zoom.

A picture has 3 x 3 cells with a two-digit number each. The policy sees so few pixels of
it that a cell is one token and its digits are 4 pixels wide; the tool `zoom` answers with
a picture of one cell, nine times as large. A question asks for one number, or for the
larger of two. The judge is agent_r1_jax.tasks.mathematics.

Held out are grids (each is new), and questions about three cells.
"""

from collections.abc import Iterator, Mapping
import functools
import random
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import call_formats, calls, env, pictures, tool
from agent_r1_jax.tasks import mathematics
from experiments import comparison
from experiments.worlds import world as world_lib

_NAMES = [f'{row}{column}' for row in 'abc' for column in '123']
_CELL = 16  # The side of a cell in pixels, before the picture is reduced.
_NUMBERS = range(10)
# A token has 16 x 16 pixels, and each picture is one token.
READER = pictures.Reader(_CELL, _CELL**2, _CELL**2)
# The fates of demonstrations. 'guess': answers without a look; 'stop': looks only at the
# first cell; 'wrong': looks at another cell. Most guess, so that a greedy policy does
# too, while some of the samples are right: RL has to find these.
MIXTURE = {'right': 0.25, 'guess': 0.6, 'stop': 0.1, 'wrong': 0.05}
# Shares of the practice.
PRACTICE = {'demonstration': 0.3, 'read': 0.6, 'compare': 0.1}


def draw_cell(number: int, look: random.Random) -> Any:
  """Draws a number as a PIL image, with random position, size and colours."""
  from PIL import Image, ImageDraw, ImageFont

  paper, ink = [look.randint(95, 135) for _ in 'rgb'], look.randint(225, 255)
  made = Image.new('RGB', (_CELL, _CELL), tuple(paper))
  font = ImageFont.load_default(look.randint(14, 16))
  place = _CELL / 2 + look.randint(-1, 1), _CELL / 2 + look.randint(-1, 1)
  ImageDraw.Draw(made).text(place, str(number), (ink, ink, ink), font, anchor='mm')
  return made


def draw(info: Mapping[str, Any]) -> dict[str, Any]:
  """Draws a task's cells as PIL images, by name."""
  look = random.Random(info['look'])
  return {
    name: draw_cell(n, look) for name, n in zip(_NAMES, info['numbers'], strict=True)
  }


def join(cells: Mapping[str, Any]) -> Any:
  """Joins the cells into the picture of the complete grid."""
  from PIL import Image

  made = Image.new('RGB', (3 * _CELL, 3 * _CELL))
  for i, cell in enumerate(cells.values()):
    made.paste(cell, (i % 3 * _CELL, i // 3 * _CELL))
  return made


class GridEnv(env.CloneableToolEnv):
  """Gives the zoom the picture of its task; the reward is 1 for a right answer."""

  def __init__(self, zooms: bool = True):
    """Offers the zoom, or no tool."""
    judge = grader()
    tools = [make_zoom(lambda cell: draw(self.task.info)[cell])] if zooms else []
    super().__init__(tools, judge.reward, metrics=judge.metrics)


def make_zoom(look) -> tool.Tool:
  """Makes the tool; `look` returns the picture of a cell."""

  @tool.tool
  def zoom(cell: str) -> Any:
    """Shows a cell.

    Args:
      cell: Its name.
    """
    return look(cell)

  return zoom


@functools.cache
def grader() -> mathematics.Grader:
  return mathematics.Grader()


def make_tasks(seed: int, n: int, split: str, asked: tuple[int, ...]) -> list[types.Task]:
  """Makes tasks that ask for the given numbers of cells; equal arguments, equal tasks."""
  rng = random.Random(f'grid {seed} {split} {asked}')
  return [make_task(f'grid-{split}-{seed}-{i}', rng, asked) for i in range(n)]


def make_task(name: str, rng: random.Random, asked: tuple[int, ...]) -> types.Task:
  """Draws a grid and a question about it."""
  cells = rng.sample(_NAMES, rng.choice(asked))
  info = {
    'numbers': rng.sample(_NUMBERS, len(_NAMES)),
    'look': rng.getrandbits(31),
    'cells': cells,
  }
  question = f'{"Largest" if len(cells) > 1 else "Number"} of {" ".join(cells)}?'
  message = ask(join(draw(info)), question)
  answer = max(_find(info, cell) for cell in cells)
  return types.Task(name, [message], str(answer), {**info, 'question': question})


def ask(picture: Any, text: str) -> types.Message:
  """Makes a message of a picture and a text."""
  parts = [pictures.make_part(picture), {'type': 'text', 'text': text}]
  return {'role': 'user', 'content': parts}


def _find(info: Mapping[str, Any], cell: str) -> int:
  return info['numbers'][_NAMES.index(cell)]


def held_out(seed: int, n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes new grids, with the questions of training and with longer ones."""
  return {
    'new_grids': make_tasks(seed, n, split, (1, 2)),
    'three_cells': make_tasks(seed, n, split, (3,)),
  }


def methods(sets: comparison.Sets) -> dict[str, comparison.Method]:
  """Returns the methods: with the zoom, or by the small picture alone."""
  return {
    'direct': (sets, functools.partial(GridEnv, zooms=False)),
    'tools': (sets, GridEnv),
  }


def examples(seed: int) -> Iterator[world_lib.Example]:
  """Yields practice examples, endlessly."""
  rng = random.Random(f'grid examples {seed}')
  while True:
    kind = rng.choices([*PRACTICE], [*PRACTICE.values()])[0]
    if kind == 'read':
      number = rng.choice(_NUMBERS)
      asked = ask(draw_cell(number, rng), 'Read.')
      yield world_lib.Example([asked, world_lib.say(f' {number}')], False, kind)
    elif kind == 'compare':
      numbers = rng.sample(_NUMBERS, rng.choice((2, 2, 3)))
      text = 'Largest of' + ''.join(f' {n}' for n in numbers) + '?'
      yield world_lib.talk(text, f' {max(numbers)}', kind)
    else:
      fate = rng.choices([*MIXTURE], [*MIXTURE.values()])[0]
      yield world_lib.Example(
        demonstrate(make_task('', rng, (1, 2)), rng, fate), kind=fate
      )


def demonstrate(
  task: types.Task, rng: random.Random, fate: str = 'right'
) -> list[types.Message]:
  """Writes an episode, right or as `fate` says."""
  messages, drawn, info = [*task.messages], draw(task.info), task.info
  cells = [*info['cells']][: {'guess': 0, 'stop': 1}.get(fate)]
  if fate == 'wrong':
    cells[0] = rng.choice(_NAMES)
  said, seen = '', []
  for cell in cells:
    call = call_formats.HERMES.render(calls.ToolCall('zoom', {'cell': cell}))
    messages.append(world_lib.say(f'{said}{call}'))
    content = [pictures.make_part(drawn[cell])]
    messages.append({'role': 'tool', 'name': 'zoom', 'content': content})
    seen.append(_find(info, cell))
    said = f' {seen[-1]}\n'
  answer = max(seen) if seen else rng.choice(_NUMBERS)
  return [*messages, world_lib.say(f'{said}\\boxed{{ {answer}}}')]


def text_of(example: world_lib.Example) -> Iterator[str]:
  """Yields an example's texts, and all numbers, so that each is a token."""
  for message in example.messages:
    content = message['content']
    parts = content if isinstance(content, list) else [{'text': content}]
    yield from (f'{message["role"]}\n{p["text"]}' for p in parts if 'text' in p)
  if example.kind == 'compare':
    yield 'system\nTools: zoom'
    yield ''.join(f' {n}' for n in _NUMBERS) + ' '.join(_NAMES)


WORLD = world_lib.World(
  examples=examples,
  text=lambda example: [*text_of(example)],
  schemas=lambda: [make_zoom(None).schema],
  tasks=functools.partial(make_tasks, split='train', asked=(1, 2)),
  held_out=held_out,
  methods=methods,
  labels={'direct': 'Without the tool', 'tools': 'Base policy'},
  score='accuracy',
  kinds={f'{n} cells': lambda task, n=n: len(task.info['cells']) == n for n in (1, 2, 3)},
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=40, tasks=16, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turns=6, max_turn_tokens=48),
    optimizer=config_lib.Optimizer(learning_rate=2e-4),
    engine=config_lib.Engine(slots=384, decode_steps=16, replicas=2),
  ),
  base=sft.Config(steps=1200, rows=4, row_tokens=256, learning_rate=1e-3),
  vocab=512,
  more_tokens=pictures.CONTROL_TOKENS,
  also=('direct',),
  reader=READER,
)
