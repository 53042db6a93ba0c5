"""Writes the quickstart's questions and passages as JSON, for tinker_recipe.py.

python -m experiments.doors.tinker_data --out=runs/tinker/miniwiki.json
"""

import dataclasses
import json
import pathlib

from absl import app, flags

from agent_r1_jax.host import runtime
from agent_r1_jax.tools import search
from experiments.miniwiki import tasks as miniwiki

_SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')
_OUT = flags.DEFINE_string('out', 'runs/tinker/miniwiki.json', 'The file.')
_WORLD = flags.DEFINE_integer('world', 0, 'Seed of the worlds and the questions.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Questions of each test set.')


def main(_):
  runtime.quiet_logging()
  world = _WORLD.value
  ask = lambda tasks: [{'messages': t.messages, 'answers': t.answer} for t in tasks]
  splits = ('train', 'dev', 'test')
  passages = [d for split in splits for d in miniwiki.corpus(world, split)]
  content = {
    'tool': search.search_tool(miniwiki.make_index(passages), k=1).schema,
    'train': ask(miniwiki.train_tasks(world, 4096)),
    'test': {
      name: ask(miniwiki.test_set(name, _QUESTIONS.value, world)) for name in _SETS
    },
    'passages': [dataclasses.asdict(passage) for passage in passages],
  }
  path = pathlib.Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(content))
  print(f'{path}: {len(content["train"])} questions, {len(passages)} passages')


if __name__ == '__main__':
  app.run(main)
