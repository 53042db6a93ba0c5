r"""Is a picture authentic? The tools are detectors, none of them reliable.

The pictures come from forged_pictures.py. `metadata` gives ISO and JPEG quality;
`detector` asks one of eight detectors, which names the cells it suspects; `crop` shows a
cell and the ISO and quality that its pixels look like. Each call is a look; an episode
has six. The reward is 1 for the right verdict, minus a small cost per look.

  python -m experiments.worlds.forensics SEED

prints what players without a policy reach on that seed's held-out pictures. Held out are
pictures, two kinds of forgeries, and a pair of kinds.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import functools
import json
import random
import re
import sys
from typing import Any

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import call_formats, calls, env, pictures, tool
from experiments import comparison
from experiments.worlds import forged_pictures as forged
from experiments.worlds import grid
from experiments.worlds import world as world_lib

LOOKS, COST = 6, 0.02
VERDICTS = ('authentic', 'manipulated')
# The forgeries of each held-out set; the first is as in training.
KINDS = {
  'new_pictures': (('copy',), ('resample',), ('recompress',), ('metadata',)),
  'unseen_splice': (('splice',),),
  'unseen_noise': (('noise',),),
  'unseen_pair': (('copy', 'recompress'),),
}
TRAINED = KINDS['new_pictures']
# The fates of demonstrations: an investigation, random looks, or a guess. Most guess, so
# that a greedy policy does too, and RL has to find which looks pay.
MIXTURE = {'right': 0.2, 'wander': 0.3, 'guess': 0.5}
# The shares of examples that only judge a crop, and that only look where told.
_READ, _TOLD = 0.25, 0.35


@functools.lru_cache(1024)
def draw(seed: int, kinds: tuple[str, ...]) -> forged.Photo:
  """Takes a photograph, and forges one of its plain cells in the given ways."""
  rng = np.random.default_rng(seed)
  photo = forged.photograph(rng)
  cell = str(rng.choice(photo.plain()))
  for kind in kinds:
    photo = forged.FORGERIES[kind](photo, cell, rng)
  return photo


def photo_of(task: types.Task) -> forged.Photo:
  return draw(task.info['seed'], tuple(task.info['kinds']))


def make_tasks(
  seed: int, n: int, split: str, kinds: Sequence[tuple[str, ...]]
) -> list[types.Task]:
  """Makes tasks; equal arguments make equal tasks."""
  rng = random.Random(f'forensics {seed} {split} {kinds}')
  return [make_task(f'forensics-{split}-{seed}-{i}', rng, kinds) for i in range(n)]


def make_task(name: str, rng: random.Random, kinds) -> types.Task:
  """Makes a picture, authentic in one of two cases, and asks about it."""
  done = rng.choice(kinds) if rng.random() < 0.5 else ()
  info = {'seed': rng.getrandbits(31), 'kinds': [*done], 'question': 'Authentic?'}
  message = grid.ask(to_picture(draw(info['seed'], done).pixels), info['question'])
  return types.Task(name, [message], VERDICTS[bool(done)], info)


def to_picture(pixels: np.ndarray) -> Any:
  return forged.to_picture(pixels).convert('RGB')


def report(iso: int, jpeg: int) -> str:
  return f'iso {iso} jpeg {jpeg}'


def list_cells(names: Sequence[str]) -> str:
  """Writes cells as calls name them, so that a small policy can copy one into a call."""
  return '\n'.join(json.dumps({'cell': name}) for name in names)


def make_tools(photo) -> list[tool.Tool]:
  """Makes the tools; `photo` returns the episode's photograph."""

  @tool.tool
  def metadata() -> str:
    """Reads the metadata."""
    return report(photo().iso, photo().jpeg)

  @tool.tool
  def detector(name: str) -> str:
    """Asks a detector.

    Args:
      name: Its name.
    """
    return list_cells(forged.suspects(photo(), name)) or 'clean'

  @tool.tool
  def crop(cell: str) -> list:
    """Shows and measures a cell.

    Args:
      cell: Its name.
    """
    pixels = photo().cell(cell)
    return [report(*forged.read(pixels)), to_picture(pixels)]

  return [metadata, detector, crop]


class ForensicsEnv(env.CloneableToolEnv):
  """Offers tools for a number of looks, or none."""

  def __init__(self, looks: int = LOOKS):
    """Begins with all looks left."""
    tools = make_tools(lambda: photo_of(self.task)) if looks else []
    super().__init__(tools, score, metrics=judge)
    self._left = looks

  async def _answer(self, call: env.Call) -> tool.ToolResult:
    self._left -= 1
    if self._left < 0:
      return tool.ToolResult('Error: no looks are left.', ok=False)
    return await super()._answer(call)


def judge(task: types.Task, messages: Sequence[types.Message]) -> dict[str, float]:
  """Returns whether the last reply ends with the right verdict, and the looks."""
  found = re.search(r'Verdict: (\w+)\s*$', str(messages[-1]['content']))
  looks = min(LOOKS, sum(m['role'] == 'tool' for m in messages))
  return {'accuracy': float(bool(found) and found[1] == task.answer), 'looks': looks}


def score(task: types.Task, messages: Sequence[types.Message]) -> dict[str, float]:
  judged = judge(task, messages)
  return {'verdict': judged['accuracy'], 'cost': -COST * judged['looks']}


def held_out(seed: int, n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes new pictures, with the forgeries of training and with others."""
  return {name: make_tasks(seed, n, split, kinds) for name, kinds in KINDS.items()}


def methods(sets: comparison.Sets) -> dict[str, comparison.Method]:
  """Returns the methods: with the tools, or by the picture alone."""
  return {
    'direct': (sets, functools.partial(ForensicsEnv, looks=0)),
    'tools': (sets, ForensicsEnv),
  }


def describe(photo: forged.Photo, cell: str) -> str:
  """Describes a crop, and compares ISO and quality: of the metadata, then as read.

  The numbers are repeated next to each other, so that a small policy can compare them.
  """
  iso, jpeg = forged.read(photo.cell(cell))
  same = 'same' if (iso, jpeg) == (photo.iso, photo.jpeg) else 'other'
  return f' {photo.looks[cell]} iso {photo.iso} {iso} jpeg {photo.jpeg} {jpeg} {same}'


def contradicts(note: str) -> bool:
  """Whether a crop's description has what neither glare nor texture explains."""
  return 'plain' in note and 'other' in note


# A player returns its looks, each a tool and any argument, and a verdict.
Played = tuple[list[tuple[str, str]], str]


def investigate(photo: forged.Photo, rng: random.Random) -> Played:
  """Plays like an expert.

  The metadata determines which detectors can see anything: the grid's, unless compression
  left no grid. Glare or a texture explains a suspect; a plain cell must match the
  metadata.
  """
  looks, notes = [('metadata', '')], dict[str, str]()

  def crop(cell: str) -> str:
    if cell not in notes:
      looks.append(('crop', cell))
      notes[cell] = describe(photo, cell)
    return notes[cell]

  for name in ('grid',) if photo.jpeg < 95 else ('grain', 'twin'):
    looks.append(('detector', name))
    for note in map(crop, forged.suspects(photo, name)):
      # Nothing explains why two plain cells are alike.
      if contradicts(note) or ('plain' in note and name == 'twin'):
        return looks, 'manipulated'
  while not any('plain' in x for x in notes.values()) and len(looks) < LOOKS:
    if contradicts(crop(rng.choice(forged.CELLS))):
      return looks, 'manipulated'
  return looks[:LOOKS], 'authentic'


def wander(photo: forged.Photo, rng: random.Random) -> Played:
  """Asks detectors at random, and looks at the first suspected cell.

  If none is suspected it looks anywhere. The verdict follows from the last crop.
  """
  looks = [('metadata', '')]
  for name in rng.sample([*forged.DETECTORS], rng.randint(0, 2)):
    suspected = forged.suspects(photo, name)
    looks += [('detector', name), *(('crop', cell) for cell in suspected[:1])]
  if looks[-1][0] != 'crop':
    looks.append(('crop', rng.choice(forged.CELLS)))
  return looks, VERDICTS[contradicts(describe(photo, looks[-1][1]))]


def demonstrate(task: types.Task, rng: random.Random, fate: str) -> list[types.Message]:
  """Writes an episode; after each crop it says what the crop shows."""
  photo = photo_of(task)
  play = {'right': investigate, 'wander': wander}.get(fate)
  looks, verdict = play(photo, rng) if play else ([], rng.choice(VERDICTS))
  messages, said = [*task.messages], ''
  tools = {made.name: made for made in make_tools(lambda: photo)}
  for name, argument in looks:
    names = tools[name].schema['function']['parameters']['properties']
    arguments = dict.fromkeys(names, argument)
    call = call_formats.HERMES.render(calls.ToolCall(name, arguments))
    answer = tools[name](**arguments)
    content = answer if isinstance(answer, str) else _to_parts(*answer)
    messages += [
      world_lib.say(f'{said}{call}'),
      {'role': 'tool', 'name': name, 'content': content},
    ]
    said = f'{describe(photo, argument)}\n' if name == 'crop' else ''
  return [*messages, world_lib.say(f'{said}Verdict: {verdict}')]


def _to_parts(text: str, picture: Any) -> list[dict[str, Any]]:
  return [{'type': 'text', 'text': text}, pictures.make_part(picture)]


def examples(seed: int) -> Iterator[world_lib.Example]:
  """Yields practice examples, endlessly."""
  rng = random.Random(f'forensics examples {seed}')
  while True:
    kind = rng.random()
    if kind < _TOLD:
      named = rng.sample(forged.CELLS, 2)
      look = call_formats.HERMES.render(calls.ToolCall('crop', {'cell': named[0]}))
      yield world_lib.talk(list_cells(named), look, 'told')
      continue
    task = make_task('', rng, TRAINED)
    photo, cell = photo_of(task), rng.choice(forged.CELLS)
    if kind < _TOLD + _READ:
      text = f'{report(photo.iso, photo.jpeg)}\n{report(*forged.read(photo.cell(cell)))}'
      content = _to_parts(text, to_picture(photo.cell(cell)))
      asked = {'role': 'user', 'content': content}
      note = describe(photo, cell)
      said = world_lib.say(f'{note}\nVerdict: {VERDICTS[contradicts(note)]}')
      yield world_lib.Example([asked, said], False, 'read')
    else:
      fate = rng.choices([*MIXTURE], [*MIXTURE.values()])[0]
      tools = fate != 'guess' or rng.random() < 0.8
      yield world_lib.Example(demonstrate(task, rng, fate), tools, fate)


WORLD = world_lib.World(
  examples=examples,
  text=lambda example: [*grid.text_of(example)],
  schemas=lambda: [made.schema for made in make_tools(None)],
  tasks=functools.partial(make_tasks, split='train', kinds=TRAINED),
  held_out=held_out,
  methods=methods,
  labels={'direct': 'Without tools', 'tools': 'Base policy'},
  score='accuracy',
  kinds={
    name: lambda task, kind=kind: tuple(task.info['kinds']) == kind
    for name, kind in {'authentic': (), **{kind[0]: kind for kind in TRAINED}}.items()
  },
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=140, tasks=16, samples=8, eval_every=20),
    limits=config_lib.Limits(max_turns=LOOKS + 2, max_turn_tokens=40),
    # At temperature 1 long episodes fail by chance, and RL learns to look less.
    sampling=config_lib.Sampling(temperature=0.7),
    optimizer=config_lib.Optimizer(learning_rate=5e-5),
    engine=config_lib.Engine(slots=384, decode_steps=16, replicas=2),
  ),
  base=sft.Config(steps=800, rows=3, row_tokens=320, learning_rate=1e-3),
  vocab=512,
  more_tokens=pictures.CONTROL_TOKENS,
  also=('direct',),
  reader=grid.READER,
)


def _ask_all(tasks: Sequence[types.Task]) -> tuple[np.ndarray, np.ndarray]:
  """Returns which are forged, and which detectors report suspects, [tasks, detectors]."""
  ask = lambda task, name: bool(forged.suspects(photo_of(task), name))
  said = [[ask(task, name) for name in forged.DETECTORS] for task in tasks]
  return np.array([bool(task.info['kinds']) for task in tasks]), np.array(said)


def play_without_policy(
  sets: comparison.Sets, train: Sequence[types.Task]
) -> Mapping[str, Mapping[str, tuple[float, ...]]]:
  """Returns players' accuracy and looks on each set, tuned on training pictures."""
  is_forged, trained = _ask_all(train)
  n = len(forged.DETECTORS)
  order = np.argsort(-(trained == is_forged[:, None]).mean(0))

  def first_to(k: int, said: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Asks the best detector first; the first verdict that k of them give counts."""
    ayes, noes = said[:, order].cumsum(1) >= k, (~said[:, order]).cumsum(1) >= k
    last = (ayes | noes).argmax(1)
    return ayes[np.arange(len(said)), last], last + 1

  vote = lambda k, said: (said.sum(1) >= k, np.full(len(said), n))
  best = lambda rule, ks: max(ks, key=lambda k: (rule(k, trained)[0] == is_forged).mean())
  rules = {
    f'best detector ({[*forged.DETECTORS][order[0]]})': (first_to, 1),
    'all detectors voting': (vote, best(vote, range(1, n + 1))),
    'fixed order, stops early': (first_to, best(first_to, range(2, n // 2 + 1))),
  }
  made = collections.defaultdict[str, dict[str, tuple[float, ...]]](dict)
  means = lambda *columns: tuple(float(np.mean(x)) for x in columns)
  for name, tasks in sets.items():
    is_forged, said = _ask_all(tasks)
    for player, (rule, k) in rules.items():
      verdicts, looks = rule(k, said)
      made[player][name] = means(verdicts == is_forged, looks)
    alone = (said == is_forged[:, None]).mean(0)
    made['the detector that is best on the set'][name] = float(alone.max()), 1.0
    played = [investigate(photo_of(task), random.Random(task.id)) for task in tasks]
    right = [verdict == t.answer for (_, verdict), t in zip(played, tasks, strict=True)]
    made['who knows the world'][name] = means(right, [len(looks) for looks, _ in played])
  return made


def main(seed: str):
  sets = held_out(int(seed), 300, 'test')
  print('| player |', ' | '.join(sets), '|\n|---|' + '---|' * len(sets))
  players = play_without_policy(sets, WORLD.tasks(1_000_000, 600))
  for player, cells in players.items():
    shown = (f'{right:.3f}, {looks:.1f} looks' for right, looks in cells.values())
    print(f'| {player} |', ' | '.join(shown), '|')


if __name__ == '__main__':
  main(*sys.argv[1:])
