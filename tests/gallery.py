"""A tiny policy that sees, and an environment that shows it pictures."""

import pathlib

import pytest
import test_pictures
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import pictures, tokenizer
from agent_r1_jax.models.files import weights
from experiments import train_tokenizer

READER = pictures.Reader(8, 64, 8 * 8 * 9)
PART = pictures.make_part


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return save(tmp_path_factory.mktemp('sees'))


def save(folder: pathlib.Path) -> pathlib.Path:
  """Writes the directory of a tiny policy that sees, and returns it."""
  train_tokenizer.train(
    tiny.TEXTS,
    vocab_size=tiny.VOCAB,
    directory=folder / 'tokenizer',
    more_tokens=pictures.CONTROL_TOKENS,
  )
  pictures.save(READER, folder / 'tokenizer', 4)
  shape = tiny.config('qwen2_5_vl', layers=1)
  ends = tokenizer.load(folder / 'tokenizer').eos_token_id
  params = tiny.params(shape, {ends: 2.5})
  weights.save(folder / 'model', shape, params, tokenizer_from=folder / 'tokenizer')
  return folder / 'model'


class Gallery:
  """Shows a picture after each reply, three in all; the first of them is the task's."""

  def reset(self, task):
    self._shown = 1
    return task.messages

  def step(self, reply):
    self._shown += 1
    seed = len(reply) % 4
    shown = {
      'role': 'user',
      'content': [
        {'type': 'text', 'text': 'And this?'},
        PART(test_pictures.image(seed, 16, 8 * self._shown)),
      ],
    }
    done = self._shown > 3
    return types.Step([] if done else [shown], float(len(reply) % 2), done)


def tasks(n=2):
  ask = lambda i: test_pictures.user('What is it?', PART(test_pictures.image(i)))
  return [types.Task(f't{i}', [ask(i)]) for i in range(n)]


def config(model, **kwargs) -> config_lib.Config:
  sizes = {'rows': 4, 'slots': 128, 'decode_steps': 4, 'prefill_rows': 4, 'bucket': 128}
  small = {'tasks': 2, 'samples': 3, 'max_turns': 3, 'max_turn_tokens': 6}
  small |= {'prefill_tokens': 16, 'microbatch': 2, 'checkpoint_every': 1}
  small |= {'narrow': False}  # For the sake of the last bit.
  return tiny.run_config(model=str(model), **sizes | small | kwargs)
