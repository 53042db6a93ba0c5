"""Several candidates of each turn: which is taken, by which values, at which cost."""

import functools
import json
import math

import jax
import numpy as np
import pytest
import rollouts
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.guided import choice as choice_lib
from agent_r1_jax.guided import critic as critic_lib
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import advantages, algorithms, learner, packing, table
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.train import fingerprint

LONG = 'What is {}? one two three four five six seven eight nine ten one two three four'


@functools.cache
def _critic():
  """The policy with a value head, whose values depend on the whole text."""
  kernel = np.random.default_rng(0).normal(size=(tiny.config().embed_dim, 1))
  head = {'kernel': np.float32(kernel), 'bias': np.ones(1, np.float32)}
  return rollouts.params() | {'value_head': jax.device_put(head)}


def _learned_values(segment):
  """The learner's values of the state after each token of a segment."""
  lengths = [len(segment.tokens)]
  where = packing.plan_layout(lengths, row_tokens=256, row_multiple=1)
  (batch,) = packing.split_microbatches(
    packing.pack(table.from_segments([segment]), where), 1
  )
  return where.extract(learner.values(_critic(), batch, config=tiny.config()))


def _play(choice, n=3, engine=None, forever=False, **decoding):
  return rollouts.collect(
    functools.partial(rollouts.Env, forever=forever),
    rollouts.make_tasks(n, LONG),
    engine=engine or rollouts.make_engine(),
    decoding=decoding_lib.Decoding(choice=choice, **decoding),
  )


def _ends(trajectory):
  """The texts at the ends of the turns, and the turns."""
  (segment,) = trajectory.segments
  return [segment.tokens[: turn.stop] for turn in trajectory.turns]


class TestValues:
  @pytest.mark.parametrize('own_head', [False, True])
  def test_values_are_the_learners_and_decide_the_choice(self, own_head):
    """By a critic in the engine, or by the value head of the policy itself."""
    seen = []

    def score(candidate):
      seen.append(candidate)
      return candidate.value

    engine = rollouts.make_engine(_critic() if own_head else None)
    critic = None if own_head else engine.make_policy(_critic(), 0)
    played = _play(choice_lib.ReplyChoice(2, score, critic=critic), engine=engine)
    assert max(len(t.turns) for t in played) > 1
    worse = 0
    for trajectory in played:
      (segment,) = trajectory.segments
      learned = _learned_values(segment)
      for end in _ends(trajectory):
        found = [(i, c) for i, c in enumerate(seen) if np.array_equal(c.tokens, end)]
        (index, taken), *_ = found
        # The state in which the last token is chosen, after the one before it.
        np.testing.assert_allclose(taken.value, learned[len(end) - 2], atol=1e-5)
        other = seen[index ^ 1]
        assert taken.value >= other.value
        worse += taken.value > other.value
    assert worse > 2

  def test_no_token_is_prefilled_twice(self):
    engine = rollouts.make_engine()
    (t,) = _play(choice_lib.ReplyChoice(2, choice_lib.mean_logprob), 1, engine, True)
    (segment,) = t.segments
    given = int((~segment.action_mask).sum())
    # The decode computes the last token of each prompt; here it was a prompt's once.
    assert len(t.turns) > 1 and engine.stats.prefilled == given - 1

    engine = rollouts.make_engine()
    critic = engine.make_policy(_critic(), 0)
    (t,) = _play(choice_lib.ReplyChoice(2, critic=critic), 1, engine, True)
    (segment,) = t.segments
    given, sampled = int((~segment.action_mask).sum()), t.metrics['sampled_tokens']
    # The policy's part, and of the critic's each token of every candidate once.
    assert len(t.turns) > 1 and engine.stats.prefilled < 2 * given + sampled

  def test_too_few_rows_are_refused(self):
    engine = rollouts.make_engine()
    critic = engine.make_policy(_critic(), 0)
    with pytest.raises(ValueError, match='rows: 8 sequences .* fit the 6 rows'):
      _play(choice_lib.ReplyChoice(4, critic=critic), engine=engine)


class TestChoice:
  def test_a_choice_of_one_is_plain_sampling(self):
    plain = _play(None)
    for choice in (choice_lib.ReplyChoice(1), choice_lib.ReplyChoice(1, beta=math.inf)):
      for a, b in zip(plain, _play(choice), strict=True):
        rollouts.assert_same(a, b)
        assert b.metrics['sampled_tokens'] == sum(
          turn.stop - turn.start for turn in b.turns
        )

  def test_a_perfect_value_takes_the_best_of_all(self):
    """Env's reward is the reply's length; that of its candidates is known here."""
    lengths = []

    def score(candidate):
      said = tiny.chat().decode(candidate.reply.tokens)
      lengths.append(len(said) if candidate.reply.stopped else 0)
      return lengths[-1]

    played = _play(choice_lib.ReplyChoice(4, score), 4)
    best = [max(lengths[i : i + 4]) / 8 for i in range(0, len(lengths), 4)]
    taken = [turn.reward for t in played for turn in t.turns if turn.reward]
    assert sorted(taken) == sorted(b for b in best if b) and len({*lengths}) > 4
    # Whoever was chosen, text and log-probs are those of the plain episode's rules.
    for trajectory in played:
      rollouts.assert_exact(trajectory)
    tiny.assert_on_policy(rollouts.params(), [t.segments[0] for t in played])
    many = sum(t.metrics['sampled_tokens'] for t in played)
    assert many > 2 * sum(turn.stop - turn.start for t in played for turn in t.turns)

  def test_beta_is_between_the_best_and_any(self):
    """Greedy candidates are all alike, so that only the draw differs."""
    first = lambda candidate: float(candidate.reply.tokens[0] % 7)
    taken = {}
    for beta in (0.0, 1.0, math.inf):
      played = _play(choice_lib.ReplyChoice(4, first, beta), 12)
      taken[beta] = np.mean([t.segments[0].tokens[t.turns[0].start] % 7 for t in played])
    assert taken[0.0] > taken[1.0] > taken[math.inf]
    greedy = _play(choice_lib.ReplyChoice(3), 1, sampling=config_lib.GREEDY)
    rollouts.assert_same(greedy[0], _play(None, 1, sampling=config_lib.GREEDY)[0])

  def test_rejected_candidates_are_closed(self, monkeypatch):
    """Else their rows are kept until they are the oldest, and the cache fills."""
    submit, reply = replica_lib.Replica.submit, choice_lib.ReplyChooser.reply
    sampled, turns = [], []

    def note_submit(self, request):
      sampled.append(submit(self, request))
      return sampled[-1]

    async def note_reply(self, request):
      start = len(sampled)
      chosen = await reply(self, request)
      turns.append([g is chosen for g in sampled[start:]])
      assert [not g.sequence.closed for g in sampled[start:]] == turns[-1]
      return chosen

    monkeypatch.setattr(replica_lib.Replica, 'submit', note_submit)
    monkeypatch.setattr(choice_lib.ReplyChooser, 'reply', note_reply)
    (t,) = _play(choice_lib.ReplyChoice(3, choice_lib.mean_logprob), 1, forever=True)
    assert [sorted(taken) for taken in turns] == [[False, False, True]] * len(t.turns)
    assert t.status != 'error' and all(g.sequence.closed for g in sampled)


class TestSavedCritic:
  @pytest.fixture
  def policy(self, tmp_path):
    weights.save(
      tmp_path / 'model',
      tiny.config(),
      rollouts.params(),
      tokenizer_from=tiny.tokenizer_dir(),
    )
    return tmp_path / 'model'

  def _save(self, policy, algorithm=None, privileged=False, **changes):
    algorithm = algorithm or algorithms.ppo(kl_coef=0.0)
    how = fingerprint.describe_critic(algorithm, policy, privileged=privileged)
    assert how is not None
    target = policy.parent / 'critic'
    weights.save(
      target, tiny.config(), _critic(), tokenizer_from=policy, value_head=how | changes
    )
    return target

  def test_critic_is_read_at_the_state_it_was_trained_at(self, policy):
    engine = rollouts.make_engine()
    target = self._save(policy, algorithms.ppo(kl_coef=0.0, gamma=0.5))
    discounted = choice_lib.by_value(engine, target, policy, candidates=2, gamma=0.5)
    turn = algorithms.ppo(estimator=advantages.step_gae, gamma=0.5)
    target = self._save(policy, turn)
    whole = choice_lib.by_value(engine, target, policy, candidates=2, step='turn')
    made = choice_lib.by_value(engine, policy.parent / 'critic', policy, candidates=1)
    assert made.rows == 2 and made.critic is not None
    shared = choice_lib.by_value(engine, target, target, candidates=2)
    assert shared.critic is None and shared.rows == 2
    tokens = np.arange(3)
    reply = request_lib.Chunk(tokens, *[tokens] * 2, False, *[tokens] * 4)
    candidate = choice_lib.Candidate(tokens, reply, 8.0)
    assert [c.score(candidate) for c in (discounted, whole)] == [1.0, 8.0]

  @pytest.mark.parametrize(
    'how, expected, message',
    [
      ({}, {'gamma': 0.9}, 'gamma: .* trained with 1.0, and 0.9 is expected'),
      ({}, {'lam': 0.9}, 'lam: '),
      ({}, {'step': 'turn'}, "step: .* 'token', and 'turn'"),
      ({}, {'rewards': ['overlong']}, 'rewards: '),
      ({}, {'horizon': 3}, 'horizon: a critic is described by estimator, gamma'),
      ({'privileged': True}, {}, 'privileged: .* True, and False'),
      ({'gamma': None}, {}, 'gamma: the algorithm .* did not say'),
      ({'tokenizer': 'another'}, {}, 'tokenizer: '),
    ],
  )
  def test_a_mismatch_is_refused_by_name(self, policy, how, expected, message):
    target = self._save(policy, **how)
    with pytest.raises(ValueError, match=message):
      critic_lib.load(target, policy, **expected)

  def test_another_shape_or_no_description_is_refused(self, policy):
    with pytest.raises(ValueError, match='config.json does not say in value_head'):
      critic_lib.load(policy, policy)
    target = self._save(policy)
    file = target / 'config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {'rope_theta': 7.0}))
    with pytest.raises(ValueError, match='rope_theta: the critic .* has 7.0'):
      critic_lib.load(target, policy)

  def test_description_says_what_the_reward_was(self, policy):
    overlong = functools.partial(advantages.overlong, limit=9, buffer=2)
    bi_level = functools.partial(advantages.bi_level_gae, high_gamma=0.9)
    algorithm = algorithms.ppo(estimator=bi_level, kl_coef=0.1, rewards=(overlong,))
    how = fingerprint.describe_critic(algorithm, policy, privileged=True)
    assert how is not None and len(how.pop('tokenizer')) == 64
    assert how == {
      'estimator': 'bi_level_gae high_gamma=0.9',
      'gamma': 1.0,
      'lam': 1.0,
      'step': 'token',
      'rewards': ['overlong(limit=9, buffer=2)'],
      'kl_coef': 0.1,
      'privileged': True,
    }
    how = fingerprint.describe_critic(algorithms.grpo(), policy, privileged=False)
    assert how is None
