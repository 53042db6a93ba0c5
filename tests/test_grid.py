"""The world of numbers in a picture: its tasks, its zoom, and what its base practises."""

import itertools
import random

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from agent_r1_jax import sft
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import pictures, tokenizer
from agent_r1_jax.models.files import weights
from experiments import small_policy, train_tokenizer
from experiments.worlds import grid

if not flags.FLAGS.is_parsed():
  flags.FLAGS(['test'])


def read(part):
  return grid.READER.read(part['image_url']['url'])


def test_equal_seeds_make_equal_tasks_and_splits_differ():
  make = lambda split: grid.make_tasks(3, 4, split, (1, 2))
  assert make('train') == make('train') != make('test')
  for task in make('train'):
    numbers = dict(zip(grid._NAMES, task.info['numbers'], strict=True))
    asked = [numbers[cell] for cell in task.info['cells']]
    assert task.answer == str(max(asked))
    # The grid is made so small that it is one token.
    assert read(task.messages[0]['content'][0]).shape == (16, 16, 3)


async def test_the_zoom_shows_the_cell_of_its_task():
  task = grid.make_tasks(0, 1, 'train', (1,))[0]
  environment = grid.GridEnv()
  await environment.reset(task)
  cell = task.info['cells'][0]
  call = (
    f'<tool_call>\n{{"name": "zoom", "arguments": {{"cell": "{cell}"}}}}\n</tool_call>'
  )
  (message,) = (await environment.step(call)).messages
  want = grid.READER.resize(grid.draw(task.info)[cell])
  np.testing.assert_array_equal(read(message['content'][0]), want)
  wrong = (await environment.step(call.replace(f'"{cell}"', '"z9"'))).messages[0]
  assert wrong['content'].startswith('Error: zoom: KeyError')
  step = await environment.step(f'\\boxed{{ {task.answer}}}')
  assert step.done and step.reward == 1.0


def test_demonstrations_are_right_or_wrong_as_they_say():
  rng = random.Random(0)
  for fate, share in (('right', 1.0), ('guess', 0.5), ('wrong', 0.5)):
    right = []
    for _ in range(60):
      task = grid.make_task('', rng, (1, 2))
      said = grid.demonstrate(task, rng, fate)[-1]['content']
      right.append(said.endswith(f'\\boxed{{ {task.answer}}}'))
    assert np.mean(right) == 1.0 if share == 1.0 else np.mean(right) < share


@pytest.mark.usefixtures('init_at_once')
def test_a_base_that_sees_is_made(tmp_path):
  """A few steps; it is saved with the sizes of its pictures, and learns from them."""
  some = itertools.islice(grid.examples(1), 60)
  with flagsaver.flagsaver(layers=2):
    small_policy.train(
      tmp_path,
      (text for e in some for text in grid.WORLD.text(e)),
      grid.examples(0),
      grid.WORLD.schemas(),
      sft.Config(steps=2, rows=2, row_tokens=128, warmup=1, learning_rate=1e-3),
      seed=0,
      vocab=512,
      more_tokens=grid.WORLD.more_tokens,
      reader=grid.READER,
    )
  config, params = weights.load(tmp_path / 'model', dtype='float32')
  assert config.family == 'qwen2_5_vl' and config.vision is not None
  assert np.isfinite(params['vision']['merger']['out']['kernel']).all()
  reader = pictures.load(tmp_path / 'model', config.vision.token_size)
  chat = chat_lib.Chat(tokenizer.load(tmp_path / 'model'), pictures=reader)
  task = grid.make_tasks(0, 1, 'train', (1,))[0]
  assert len(chat.list_pictures(task.messages)) == 1


def test_numbers_are_tokens_of_their_own(tmp_path):
  texts = [t for e in itertools.islice(grid.examples(0), 400) for t in grid.text_of(e)]
  train_tokenizer.train(
    texts, vocab_size=512, directory=tmp_path, more_tokens=pictures.CONTROL_TOKENS
  )
  made = tokenizer.load(tmp_path)
  encode = lambda text: made.encode(text, add_special_tokens=False)
  assert all(len(encode(f' {n}')) == 1 for n in range(10))


@pytest.mark.parametrize('n', [1, 2, 3])
def test_questions_name_their_cells(n):
  task = grid.make_task('', random.Random(n), (n,))
  text = task.messages[0]['content'][1]['text']
  assert text.startswith('Number of' if n == 1 else 'Largest of')
  assert all(cell in text for cell in task.info['cells'])
