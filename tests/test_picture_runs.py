"""A policy that sees, in a training run, in a log, behind the server and an endpoint."""

import contextlib
import copy

import gallery
import httpx2
import jax
import numpy as np
import openai
import pytest
import serving
import test_pictures

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.guided import choice, implicit_value, reward_model, search
from agent_r1_jax.rl import learner, packing, table
from agent_r1_jax.rollout import decoding, evaluate
from agent_r1_jax.train.plan import setup

pytestmark = pytest.mark.usefixtures('no_curves')


model = gallery.model


class Copied(gallery.Gallery):
  def clone(self):
    return copy.copy(self)


def _read_directly(params, shape, texts):
  """Yields values and log-probs of each text's tokens, [n] each, by the learner."""
  segments = [types.Segment.read(text) for text in texts]
  rows = packing.MicrobatchShape(1, 128, False, shape.vision)
  batches, layout = packing.pack_microbatches(table.from_segments(segments), rows)
  stops = np.cumsum([len(text) for text in texts])[:-1]
  columns = []
  for read in (learner.values, learner.logprobs):
    packed = [read(params, batch, config=shape) for batch in batches]
    columns.append(np.split(layout.extract(np.concatenate(packed)), stops))
  return zip(*columns, strict=True)


@pytest.mark.parametrize('kind', ['choice', 'beams'])
@pytest.mark.parametrize('implicit', [None, implicit_value.Odds(0.0, 1.0)])
def test_a_critic_sees_what_the_policy_saw(model, monkeypatch, kind, implicit):
  config = gallery.config(model, rows=8)
  shape, params, chat = setup.load(config.model, config.chat)
  guides = (guide_lib.FORCED,) if implicit else ()
  engine = setup.make_engine(config, shape, params, guides=guides)
  critic = jax.tree.map(lambda x: np.float32(1.1) * x, jax.device_get(params))
  kernel = np.random.default_rng(0).standard_normal((shape.embed_dim, 1), np.float32)
  critic['value_head'] = {'kernel': kernel, 'bias': np.zeros(1, np.float32)}
  critic = jax.device_put(critic)
  policy, found = engine.make_policy(critic, 0), []
  name = 'read_replies' if implicit else 'read'
  read = getattr(choice.StateValues, name)

  async def record(self, texts, *replies):
    values = await read(self, texts, *replies)
    replies = replies[0] if replies else [None] * len(texts)
    found.extend(zip(texts, replies, values.tolist(), strict=True))
    return values

  monkeypatch.setattr(choice.StateValues, name, record)
  decides = {
    # One that ends is taken, so that there is another turn.
    'choice': choice.ReplyChoice(
      4, lambda c: c.value + 99 * c.reply.stopped, critic=policy, implicit=implicit
    ),
    'beams': search.BeamSearch(1, 2, policy, implicit=implicit),
  }[kind]
  played = evaluate.run(
    engine,
    chat,
    {'pictures': gallery.tasks()},
    Copied,
    limits=config.limits,
    decoding=decoding.Decoding(choice=decides),
  )['pictures']
  assert all(t.error is None and t.turns for t in played)
  # Those of beams end with their first turn, which shows one.
  assert any(len(text.pictures) > (kind == 'choice') for text, _, _ in found)
  texts = [text for text, *_ in found]
  read = _read_directly(critic, shape, texts)
  for (_, reply, value), (values, logprobs) in zip(found, read, strict=True):
    expected = logprobs[-len(reply.tokens) :].sum() if reply else values[-1]
    assert value == pytest.approx(expected, abs=1e-4)


def test_a_reward_model_refuses_pictures(model):
  config = gallery.config(model)
  chat = setup.load(config.model, config.chat)[2]
  with pytest.raises(ValueError, match='reads text only'):
    reward_model.encode(chat, gallery.tasks(1)[0].messages, [])


@contextlib.contextmanager
def serve(model, **options):
  shape, params, chat = setup.load(config_lib.Model(path=str(model)), config_lib.Chat())
  engine = setup.make_engine(gallery.config(model), shape, params)
  with serving.serve(engine, chat, **options) as url:
    yield url


@pytest.fixture(scope='module')
def served(model):
  with serve(model) as url:
    yield url


def _ask(url, *parts, **options):
  with openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0) as client:
    messages = [test_pictures.user(*parts)]
    return client.chat.completions.create(
      model='policy', messages=messages, seed=0, max_tokens=8, **options
    )


def test_openais_client_sends_pictures(served):
  asked = {'logprobs': True}
  texts = [
    _ask(served, 'What is it?', gallery.PART(test_pictures.image(seed)), **asked)
    for seed in (0, 0, 1)
  ]
  logprobs = [x.choices[0].logprobs.content[0].logprob for x in texts]
  assert logprobs[0] == logprobs[1] != logprobs[2]
  alone = _ask(served, 'What is it?')
  # Six tokens of a picture, and two around it.
  assert texts[0].usage.prompt_tokens == alone.usage.prompt_tokens + 8


def test_a_picture_of_the_assistant_is_refused(served):
  said = {**test_pictures.user(gallery.PART(test_pictures.image(0))), 'role': 'assistant'}
  call = {'id': '1', 'function': {'name': 'f', 'arguments': '{}'}}
  for message in (said, {**said, 'tool_calls': [call]}):
    messages = [message, test_pictures.user('Go on.')]
    answer = httpx2.post(f'{served}/v1/chat/completions', json={'messages': messages})
    assert answer.status_code == 400 and 'a policy writes none' in answer.text


@pytest.mark.parametrize(
  ('address', 'message'),
  [
    ('http://127.0.0.1:1/a.png', 'no address is fetched'),
    ('data:image/png;base64,AAAA', 'send PNG, JPEG or WebP'),
    (f'data:image/png;base64,{"A" * (5 << 20)}', 'bytes'),
  ],
)
def test_other_pictures_are_refused(served, address, message):
  part = {'type': 'image_url', 'image_url': {'url': address}}
  with pytest.raises(openai.APIStatusError, match=message) as error:
    _ask(served, 'x', part)
  assert error.value.status_code in (400, 413)


def test_a_policy_that_sees_none_says_so():
  with serving.serve() as url:
    with pytest.raises(openai.BadRequestError, match='sees none'):
      _ask(url, 'x', gallery.PART(test_pictures.image()))
