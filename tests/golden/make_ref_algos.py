"""Makes tests/golden/ref_algos.npz: what the peers' own functions give, in float64.

Command: python tests/golden/make_ref_algos.py SOURCE.npz

SOURCE.npz holds inputs of 12 multi-turn episodes of 24 tokens ('in/...') and the outputs
of the peers' own functions on them ('<peer>/<function>/<variant>/<output>'): verl
1dda039b, Agent-R1 6dc8f67, Search-R1 a14dc3a4, RAGEN 20daedc4, a verl-agent fork e2ef5b0a
(GiGPO), TRL 1.16.0, AReaL 4aef98d8, SkyRL a9564572. This leaves out what no test
compares, and says why; tests/test_golden.py counts.
"""

import fnmatch
import itertools
import pathlib
import sys

import numpy as np

# What is left out, by reason. tests/test_golden.py makes sure that the rest is compared.
_DROPPED = {
  'It follows from other inputs: mask, rewards, and the order of the rows.': (
    'in/n_turns',
    'in/last',
    'in/score',
    'in/turn_end',
    'in/step',
  ),
  'It is a step towards a number that is kept.': ('verl/masked_mean*', 'verl/masked_var'),
  'It is the returns, which are kept, less the values, whitened.': (
    'searchr1/gae_unmasked/*/adv',
  ),
  'Two γ and λ of four are enough where only the mask differs.': (
    'searchr1/gae_unmasked/*/g1.0_l0.95/ret',
    'searchr1/gae_unmasked/*/g0.9_l0.0/ret',
  ),
  'What is kept of another function, or of verl, tests the same formula.': (
    'verl/grpo_vectorized/*',
    'skyrl/kl/*',
    'skyrl/reduction/token_mean',
    'skyrl/reduction/seq_mean_token_sum_norm',
    'trl/bnpo/*',
  ),
  'No estimator here computes it.': (
    'verl/sum_pi_squared',
    'verl/masked_whiten_noshift',
    'verl/grpo_passk_first11rows/*',
    'verl/opo/*',
    'verl/gpg/rewards_*',
    'verl/otb/*',
    'verl/tir_otb/*',
    'trl/adv/batch',
  ),
  'No loss, KL or metric here computes it.': (
    'verl/kl/abs/*',
    'verl/gpg/loss',
    'verl/gpg/grad',
    'verl/geo_mean/*',
    'verl/dppo_kl/*',
    'verl/kl_cov/*',
    'verl/dro_beta0.1/*',
    'verl/ppo_vanilla/metrics/pg_clipfrac_lower',
    'verl/value_loss/*/clipfrac',
    'trl/vespo/*',
    'trl/two_sided_delta1.5/*',
    'trl/top_entropy_0.2/*',
    'trl/opsm_0.1/*',
  ),
  # Every one here is a mean, over the tokens or the episodes of the batch itself.
  'No aggregation here computes it.': (
    'verl/agg_loss*/token-sum',
    'verl/agg_loss/token-mean/global',
    'skyrl/reduction/prompt_mean',
  ),
  # The only one is token_truncated: it has an upper bound only, and rejects nothing.
  'No correction here computes it.': (
    'verl/rollout_is/*/bn1/w',
    'verl/rollout_is/*/th0.5_5.0/*',
    'verl/rollout_is/sequence/th2.0/bn0/w',
    'verl/rollout_rs/*',
    'areal/decoupled/*',
  ),
  'No statistic of a correction here is it.': (
    'verl/rollout_is/*/rollout_is_min',
    'verl/rollout_is/*/rollout_is_std',
    'verl/rollout_is/*/rollout_is_seq_*',
    'verl/rollout_is/sequence/th2.0/metrics/rollout_is_mean',
    'verl/rollout_is/sequence/th2.0/metrics/rollout_is_eff_sample_size',
  ),
}
# Of these, two episodes are enough.
_CUT = ('in/logits',)


def main(source: str):
  with np.load(source) as file:
    arrays = dict(file)
  left_out = set()
  for pattern in itertools.chain.from_iterable(_DROPPED.values()):
    names = set(fnmatch.filter(arrays, pattern))
    if not names:
      raise ValueError(f'{source} has no array {pattern}; take it out of _DROPPED.')
    left_out |= names
  kept = {k: x[:2] if k in _CUT else x for k, x in arrays.items() if k not in left_out}
  np.savez_compressed(pathlib.Path(__file__).parent / 'ref_algos.npz', **kept)
  print(f'{len(arrays)} arrays: {len(kept)} kept, {len(left_out)} left out')


if __name__ == '__main__':
  main(sys.argv[1])
