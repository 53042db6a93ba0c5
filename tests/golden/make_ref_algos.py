"""Makes tests/golden/ref_algos.npz: what the peers' own functions give, in float64.

Command: python tests/golden/make_ref_algos.py SOURCE.npz

SOURCE.npz holds inputs of 12 multi-turn episodes of 24 tokens ('in/...') and the outputs
of the peers' own functions on them ('<peer>/<function>/<variant>/<output>'): verl
1dda039b, Agent-R1 6dc8f67, Search-R1 a14dc3a4, RAGEN 20daedc4, a verl-agent fork e2ef5b0a
(GiGPO), TRL 1.16.0, AReaL 4aef98d8, SkyRL a9564572. This keeps what the tests read.
"""

import fnmatch
import pathlib
import sys

import numpy as np

_KEPT = (
  'in/mask',
  'in/index',
  'in/traj',
  'in/uid',
  'in/perm',
  'in/step',
  'in/obs',
  'in/turn_end',
  'in/rewards_*',
  'in/remax_baseline',
  'in/adv',
  'in/trl_adv',
  'in/trl_completion_mask',
  'in/logp',
  'in/old_logp',
  'in/ref_logp',
  'in/rollout_logp',
  'in/logp_far_offset30',
  'in/values',
  'in/vpreds',
  'verl/masked_whiten*',
  'verl/gae/*',
  'searchr1/gae_unmasked/*/g1.0_l1.0/ret',
  'searchr1/gae_unmasked/*/g0.99_l0.95/ret',
  'verl/grpo/*',
  'verl/rloo*',
  'verl/reinforce_pp*',
  'verl/remax/*',
  'verl/gdpo_single/*',
  'agentr1/grpo/*',
  'agentr1/token_gae/*',
  'agentr1/step_gae/*',
  'ragen/bi_level_gae/*',
  'gigpo/*',
  'trl/adv/*',
  'verl/agg_loss*',
  'skyrl/reduction/sequence_mean',
  'agentr1/ppo_vanilla/*',
  'verl/ppo_vanilla/*',
  'verl/ppo_plus_klloss0.001/*',
  'verl/gspo*',
  'verl/cispo*',
  'verl/sapo/*',
  'verl/dppo_*',
  'verl/reinforce/*',
  'verl/entropy_*',
  'searchr1/ppo_0.2/*',
  'areal/*',
  'trl/gspo/*',
  'trl/cispo_epsmax5/*',
  'trl/sapo/*',
  'trl/dr_grpo/*',
  'trl/grpo/*',
  'trl/dapo*',
  'trl/entropy_bonus_0.01/*',
  'verl/value_loss/clip0.?/[lg]*',
  'verl/kl/*',
  'verl/kl_in_reward/*',
  'verl/adaptive_kl/*',
  'in/adaptive*',
  'verl/rollout_is/*/w',
  'verl/rollout_is/*/th2.0/metrics/rollout_is_max',
  'verl/rollout_is/*/th2.0/metrics/rollout_is_ratio_fraction_*',
  'verl/rollout_is/token/th2.0/metrics/rollout_is_mean',
  'verl/rollout_is/token/th2.0/metrics/rollout_is_eff_sample_size',
  'verl/rollout_rs/*',
)
# Of these, two episodes are enough.
_CUT = ('in/logits',)


def main(source: str):
  with np.load(source) as file:
    kept = {k: file[k] for k in file if any(fnmatch.fnmatch(k, p) for p in _KEPT)}
    kept |= {k: file[k][:2] for k in _CUT}
  np.savez_compressed(pathlib.Path(__file__).parent / 'ref_algos.npz', **kept)


if __name__ == '__main__':
  main(sys.argv[1])
