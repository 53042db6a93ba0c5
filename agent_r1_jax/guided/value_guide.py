"""A guide that weighs tokens by their values in the jitted loop.

Letters as in engine/guide.py, and: K candidate tokens, R dimensions of the head.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax.engine.guide import Guide


def make_value_guide(k: int) -> Guide:
  """Makes the guide that samples by p(a) ∝ π(a) exp(Q(s, a) / β) among the top k tokens.

  A head reads Q(s, a) = (h W) · u_a from the policy's last hidden state h, so that the
  candidates' values cost a product of small matrices. The k tokens keep their total
  probability, and all other tokens keep theirs: if all Q are equal, sampling is plain.

  Args:
    k: How many of the likeliest tokens to weigh.

  Returns:
    The guide. Its parameters are {'state': W [D, R], 'token': u [V, R]}, and its state in
    a request is {'inverse_beta': np.float32}.
  """

  def weigh(params, state, logits_MV, hidden_MD):
    top_MK, tokens_MK = jax.lax.top_k(logits_MV, k)
    u_MKR, h_MR = params['token'][tokens_MK], hidden_MD @ params['state']
    change_MK = jnp.einsum('mr,mkr->mk', h_MR, u_MKR) * state['inverse_beta'][:, None]
    total = functools.partial(jax.nn.logsumexp, axis=-1, keepdims=True)
    change_MK += total(top_MK) - total(top_MK + change_MK)
    rows_M1 = jnp.arange(len(logits_MV))[:, None]
    return logits_MV.at[rows_M1, tokens_MK].add(change_MK)

  return Guide(off={'inverse_beta': np.float32(0)}, logits=weigh)
