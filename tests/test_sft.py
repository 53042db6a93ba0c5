"""Supervised fine-tuning: conversations become segments, segments become batches."""

import dataclasses
import itertools

from absl import flags
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script
import tiny

from agent_r1_jax import sft, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import learner, optimizers
from experiments import small_policy, train_tokenizer
from experiments.miniwiki import induction

_SEARCH = {'type': 'function', 'function': {'name': 'search', 'parameters': {}}}
_MESSAGES = (
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': 'Which city?'},
  {'role': 'assistant', 'content': '<tool_call>city</tool_call>'},
  {'role': 'tool', 'content': 'Doc 1 <|im_end|> of Rome'},
  {'role': 'tool', 'content': 'Doc 2'},
  {'role': 'assistant', 'content': 'Rome'},
  {'role': 'user', 'content': 'Sure?'},
  {'role': 'assistant', 'content': ''},
)


@pytest.fixture(scope='module')
def chat(tmp_path_factory):
  directory = tmp_path_factory.mktemp('tokenizer')
  train_tokenizer.train(['Which city? Rome.'], vocab_size=280, directory=directory)
  return chat_lib.Chat(tokenizer_lib.load(directory))


# Segments.


def test_a_segment_is_the_templates_text_and_its_actions_are_the_replies(chat):
  s = sft.segment(chat, sft.Conversation(_MESSAGES, [_SEARCH]))
  whole = chat.tokenizer.apply_chat_template(
    list(_MESSAGES), tools=[_SEARCH], tokenize=False
  )
  assert chat.decode_exactly(s.tokens) == whole.removesuffix('\n')
  edges = np.flatnonzero(np.diff(np.concatenate([[0], s.action_mask, [0]])))
  replies = [chat.decode_exactly(s.tokens[a:b]) for a, b in edges.reshape(-1, 2)]
  said = [m['content'] for m in _MESSAGES if m['role'] == 'assistant']
  assert replies == [text + '<|im_end|>' for text in said]
  assert s.behaviour_logprobs.shape == s.tokens.shape and not s.behaviour_logprobs.any()
  # The tool's '<|im_end|>' is plain text, each reply's is the control token.
  ends = s.tokens == chat.stop_ids[0]
  assert ends[s.action_mask].sum() == 3


def test_a_conversation_that_waits_for_a_reply_is_the_beginning_of_it(chat):
  s = sft.segment(chat, sft.Conversation(_MESSAGES, [_SEARCH]))
  replies = np.flatnonzero(np.diff(s.action_mask.astype(int)) == 1) + 1
  for n, start in zip((2, 5, 7), replies, strict=True):
    waiting = sft.encode(chat, sft.Conversation(_MESSAGES[:n], [_SEARCH]))
    np.testing.assert_array_equal(waiting.tokens, s.tokens[:start])
    np.testing.assert_array_equal(waiting.action_mask, s.action_mask[:start])


@pytest.mark.parametrize('messages', [[], _MESSAGES[:2], _MESSAGES[:5]])
def test_a_conversation_ends_with_a_reply(chat, messages):
  with pytest.raises(ValueError, match='must end with a message of the assistant'):
    sft.segment(chat, sft.Conversation(messages))


@pytest.mark.parametrize(
  'message', [{'content': 'x'}, {'role': 'usr', 'content': 'x'}, 3]
)
def test_a_message_without_a_role_is_refused(chat, message):
  for messages in ([message], [*_MESSAGES[:3], message], [message, _MESSAGES[2]]):
    with pytest.raises(ValueError, match='has the role|is no message'):
      sft.encode(chat, sft.Conversation(messages))
  with pytest.raises(ValueError, match='has the role|is no message'):
    sft.segment(chat, sft.Conversation([message]))


def test_repeats_are_strings_whose_repetition_alone_is_learnt():
  made = list(induction.repeats(0, 64, 2000))
  sizes = [len(s.tokens) for s in made]
  assert sum(sizes[:-1]) < 2000 <= sum(sizes)
  for s in made:
    # The second copy's first token is not to be known: the string might have gone on.
    period = int(np.argmax(s.action_mask)) - 1
    assert s.action_mask[period + 1 :].all() and len(s.tokens) / period in (2, 3, 4)
    np.testing.assert_array_equal(s.tokens[period:], s.tokens[:-period])
    assert s.tokens.dtype == np.int32 and not s.behaviour_logprobs.any()
  assert {len(s.tokens) for s in induction.repeats(1, 64, 2000)} != set(sizes)
  again = induction.repeats(0, 64, 2000)
  assert all((a.tokens == b.tokens).all() for a, b in zip(made, again, strict=True))


@pytest.mark.parametrize('name', ['gpt_oss', 'qwen3_5', 'gemma4'])
@pytest.mark.usefixtures('init_at_once')
def test_a_small_policy_of_another_family_is_made(name):
  """With sinks, YaRN and experts, too, the circuit copies what is repeated."""
  path = script.ROOT / f'experiments/miniwiki/families/{name}.json'
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(shape=str(path)):
    config = small_policy.make_config(300)
  assert config.family.startswith(name) and config.vocab_size == 300
  if config.family not in induction.FAMILIES:
    return
  text = np.tile(np.random.default_rng(0).permutation(300)[:24], 2)[None]
  params, rows = induction.init(config, 0), tiny.rows(jnp.asarray(text))
  predict = lambda p: decoder.logits(p, config, decoder.hidden(p, config, rows))[0]
  found = np.asarray(jax.jit(predict)(params).argmax(-1))[24:-1]
  assert (found == text[0, 25:]).mean() > 0.8


# Batches.


def _segments(lengths):
  """Segments of tokens that are all different; the second half are actions."""
  ends = np.cumsum(lengths).tolist()
  for n, end in zip(lengths, ends):
    tokens = np.arange(end - n, end, dtype=np.int32) + 1
    yield types.Segment(tokens, np.arange(n) >= n // 2, np.zeros(n, np.float32))


def _seen(batch):
  """The first and last token of each segment, in the order of the stream."""
  used = batch.segment_ids > 0
  starts = used & (batch.rows.positions == 0)
  nexts = np.pad(starts[:, 1:] | ~used[:, 1:], ((0, 0), (0, 1)), constant_values=True)
  firsts, lasts = (np.sort(batch.rows.tokens[x]) for x in (starts, used & nexts))
  return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


@pytest.mark.parametrize('rows', [1, 3])
@pytest.mark.parametrize('seed', range(4))
def test_batches_lose_and_repeat_nothing(rows, seed):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(2, 26, 60)
  config = sft.Config(rows=rows, row_tokens=20)
  made = list(sft.batches(_segments(lengths), config))
  assert {b.weights.shape for b in made} == {(rows, 20)}
  expected = [
    (s.tokens[0], s.tokens[-1]) for s in _segments(lengths) if len(s.tokens) <= 20
  ]
  assert 0 < len(expected) < 60
  # In order: a batch is filled from the front of the stream.
  assert list(itertools.chain(*map(_seen, made))) == expected
  tokens = np.concatenate([b.rows.tokens[b.segment_ids > 0] for b in made])
  assert len(set(tokens)) == len(tokens) == sum(n for n in lengths if n <= 20)


def test_a_batch_without_weights_has_none():
  segments = [dataclasses.replace(s, action_mask=s.tokens < 0) for s in _segments([5, 9])]
  config = sft.Config(rows=1, row_tokens=20, other_weight=0.0)
  (batch,) = sft.batches(segments, config)
  assert (batch.weights == 0).all()


def test_a_batch_takes_what_fits():
  config = sft.Config(rows=2, row_tokens=10)
  # 8 + 2 and 10 fill two rows; of three sevens two fit; the last is alone.
  made = list(sft.batches(_segments([8, 10, 2, 7, 7, 7]), config))
  assert [len(_seen(b)) for b in made] == [3, 2, 1]
  assert [(b.segment_ids > 0).sum() for b in made] == [20, 14, 7]


def test_batches_read_no_further_than_they_must():
  """So that a stream without an end serves, too."""
  endless = _segments([5] * 1000)
  drawn = []

  def watched():
    for s in endless:
      drawn.append(s)
      yield s

  next(sft.batches(watched(), sft.Config(rows=2, row_tokens=10)))
  assert len(drawn) == 4


def test_a_stream_of_what_never_fits_is_said():
  long = types.Segment(np.zeros(33, np.int32), np.ones(33, bool), np.zeros(33))
  config = sft.Config(steps=1, rows=2, row_tokens=32, learning_rate=1e-3)
  with pytest.raises(ValueError, match='1000 consecutive segments.*, 32 .*has 33'):
    next(sft.batches(itertools.repeat(long), config))


@pytest.mark.parametrize('other_weight', [0.0, 0.25])
def test_tokens_of_replies_share_the_weight_with_others_by_their_part(other_weight):
  config = sft.Config(rows=2, row_tokens=10, other_weight=other_weight)
  (batch,) = sft.batches(_segments([8, 6, 2]), config)
  # What likelihood multiplies: w A, whose sum over the batch is 1.
  share = batch.weights * batch.advantages
  np.testing.assert_allclose(share.sum(), 1, rtol=1e-6)
  first, used = batch.rows.positions == 0, batch.segment_ids > 0
  assert (share[first] == 0).all() and (share[~used] == 0).all()
  # Of 4 + 3 + 1 replies' tokens each weighs 1, of the 3 + 2 + 0 others a part of it.
  each = 1 / (8 + 5 * other_weight)
  np.testing.assert_allclose(share[batch.action_mask], each, rtol=1e-6)
  others = used & ~batch.action_mask & ~first
  assert others.sum() == 5
  np.testing.assert_allclose(share[others], each * other_weight, rtol=1e-6)


# A run.

_MODEL = decoder.DecoderConfig(
  family='llama',
  vocab_size=64,
  embed_dim=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=24,
)


def _counting(n):
  """Rows that count upwards from anywhere: easy to learn."""
  rng = np.random.default_rng(0)
  for start in rng.integers(0, 64, n):
    tokens = (start + np.arange(12, dtype=np.int32)) % 64
    yield types.Segment(tokens, np.arange(12) >= 4, np.zeros(12, np.float32))


def _params():
  shapes = tiny.init_shapes(_MODEL)
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), x.dtype), shapes
  )


_CONFIG = sft.Config(steps=15, rows=2, row_tokens=32, learning_rate=3e-2, warmup=3)


def test_run_lowers_the_loss():
  history = []

  def on_step(step, metrics, params):
    # The parameters are alive here.
    history.append((step, metrics, float(jnp.sum(params['final_norm']['scale']))))

  first = next(sft.batches(_counting(100), _CONFIG))
  logprobs = np.asarray(learner.logprobs(_params(), first, config=_MODEL))
  params = sft.run(_MODEL, _params(), _counting(100), _CONFIG, on_step=on_step)
  steps, metrics, sums = zip(*history)
  assert steps == tuple(range(1, 16))
  expected = -(logprobs * first.weights * first.advantages).sum()
  np.testing.assert_allclose(metrics[0]['loss'], expected, rtol=1e-5)
  assert metrics[-1]['loss'] < 0.85 * metrics[0]['loss']
  assert sums[-1] == float(jnp.sum(params['final_norm']['scale'])) != sums[1]


def test_adam_is_the_configured_one(monkeypatch):
  made, adamw = [], optimizers.adamw

  def spy(rate, decay, adam, **options):
    made.append((*adam, decay, options))
    return adamw(rate, decay, adam, **options)

  monkeypatch.setattr(optimizers, 'adamw', spy)
  changed = {'adam_b1': 0.8, 'adam_b2': 0.9, 'adam_eps': 1e-3, 'weight_decay': 0.2}
  changed['decay_all'] = True
  for config in (_CONFIG, dataclasses.replace(_CONFIG, **changed)):
    with pytest.raises(ValueError, match='segments ended after 0'):
      sft.run(_MODEL, _params(), [], config)
  assert made == [
    (0.9, 0.98, 1e-8, 0.1, {'decay_all': False}),
    (0.8, 0.9, 1e-3, 0.2, {'decay_all': True}),
  ]


def test_a_stream_that_is_too_short_is_said():
  with pytest.raises(ValueError, match='segments ended after 3 of 15 steps: give more'):
    # Four segments a batch.
    sft.run(_MODEL, _params(), _counting(10), _CONFIG)


def test_a_warm_up_longer_than_the_run_is_refused():
  with pytest.raises(ValueError, match='warmup: 15 steps of warm-up leave nothing of 15'):
    sft.run(_MODEL, _params(), [], dataclasses.replace(_CONFIG, warmup=15))
