"""Makes tests/golden/ref_algos.npz: what verl, Agent-R1 and Search-R1 give, in float64.

Command: python tests/golden/make_ref_algos.py SOURCE.npz

SOURCE.npz holds inputs of 12 multi-turn episodes of 24 tokens ('in/...') and the outputs
of the peers' own functions on them ('<peer>/<function>/<variant>/<output>'): verl
1dda039b, Agent-R1 6dc8f67, Search-R1 a14dc3a4. This keeps what the tests read.
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
  'in/rewards_*',
  'in/adv',
  'in/logp',
  'in/old_logp',
  'in/ref_logp',
  'in/logp_far_offset30',
  'in/values',
  'in/vpreds',
  'verl/masked_whiten',
  'verl/gae/*',
  'verl/grpo/*',
  'agentr1/grpo/*',
  'agentr1/token_gae/*',
  'verl/agg_loss*/token-mean',
  'verl/agg_loss*/seq-mean-token-mean',
  'verl/ppo_vanilla/token-mean/*',
  'verl/ppo_vanilla/seq-mean-token-mean/*',
  'verl/ppo_vanilla/clip_higher_0.2_0.28/*',
  'verl/ppo_vanilla/dual_clip_c1.5/*',
  'verl/ppo_vanilla/metrics/p*_[ck]l*',
  'verl/ppo_plus_klloss0.001/*',
  'searchr1/ppo_0.2/*',
  'verl/value_loss/clip0.?/[lg]*',
  'verl/kl/k1/*',
  'verl/kl/low_var_kl/*',
  'verl/kl/low_var_kl_far*',
  'verl/kl_in_reward/beta0.05_kl',
)
# Of these, two episodes are enough.
_CUT = ('in/logits', 'verl/entropy_from_logits')


def main(source: str):
  with np.load(source) as file:
    kept = {k: file[k] for k in file if any(fnmatch.fnmatch(k, p) for p in _KEPT)}
    kept |= {k: file[k][:2] for k in _CUT}
  np.savez_compressed(pathlib.Path(__file__).parent / 'ref_algos.npz', **kept)


if __name__ == '__main__':
  main(sys.argv[1])
