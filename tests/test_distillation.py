"""Distillation, which has no reward: the student moves to the teacher."""

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, updates
from agent_r1_jax.rl import train_state as train_state_lib

_PROMPTS = np.array([[3], [17], [40], [61]], np.int32)


@jax.jit
def _replies(params):
  """log π of the replies of one token to each of the prompts, [4, V]."""
  x = decoder.hidden(params, plain.CONFIG, tiny.rows(jnp.asarray(_PROMPTS)))[:, 0]
  return jax.nn.log_softmax(x @ params['lm_head']['kernel'] / plain.TEMPERATURE)


def _played(params, n, seed):
  """n replies to each prompt, sampled from the policy."""
  rng, out = np.random.default_rng(seed), []
  for number, log_p in enumerate(np.asarray(_replies(params), np.float64)):
    p = np.exp(log_p)
    for token in rng.choice(64, n, p=p / p.sum()).tolist():
      t = episodes.trajectory('.0', rewards=[0.0], group=number)
      tokens = np.array([_PROMPTS[number, 0], token], np.int32)
      logprobs = np.array([0.0, log_p[token]], np.float32)
      t.segments = [types.Segment(tokens, np.array([False, True]), logprobs)]
      out.append(t)
  return out


def test_distillation_moves_the_student_to_the_teacher():
  teacher = plain.reference()
  update_config = train_state_lib.UpdateConfig(
    plain.CONFIG,
    algorithms.distillation(),
    plain.SHAPE,
    optimizers={'policy': optax.adam(1e-2)},
    temperature=plain.TEMPERATURE,
  )
  start = plain.copy_tree(plain.policy())
  train_state = train_state_lib.init(start, update_config, teacher)

  def divergence():
    """KL(student ‖ teacher) of the replies, exact."""
    student, taught = (np.asarray(_replies(p)) for p in (train_state.sampler, teacher))
    return float((np.exp(student) * (student - taught)).sum(axis=1).mean())

  history = [divergence()]
  for step in range(15):
    rollout = _played(train_state.sampler, 64, step)
    train_state, metrics, _ = updates.learn(train_state, rollout, update_config)
    history.append(divergence())
  assert history[5] < history[0] and history[10] < history[5]
  assert history[-1] < 0.5 * history[0]
  assert metrics['grad_norm'] > 0
  plain.equal(train_state.reference, teacher)
