"""Advantage estimators and reward transforms, on the host in float64.

An estimator takes the visible tokens of a batch (rl/table.py), and returns the table with
the column `advantages`, and with `returns` if a critic can learn from them. With the
advantage mask on (the default), the visible tokens are the action tokens: the
environment's tokens neither cut nor discount returns, and every reward is on a trained
token. Advantages are raw; an algorithm that standardises them over the batch calls
`whiten`. Group statistics are over trajectories, so that long and short ones count alike.
In a group without variance, advantages are exactly 0, because its std is rounding noise.
A missing column raises a ValueError that says what computes it.

Options: `gamma` is the discount γ and `lam` the trace decay λ per step of the estimator,
a token or a turn. `bootstrap` uses final_values as V after an episode that a budget
ended; otherwise V is 0 there, as in verl. `eps` is ε, added to denominators.

A reward transform runs before the estimator: it takes the same tokens and returns the
table with a new column `rewards`. A transform that changes the unit of the rewards
(`by_reward_to_go`) also rescales their named `parts`; one that adds to the rewards leaves
the parts alone.

Letters: n tokens, K turns, N trajectories.
"""

from collections.abc import Callable, Mapping
import dataclasses

from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax.rl import spans
from agent_r1_jax.rl.table import TokenTable

Transform = Callable[[TokenTable], TokenTable]


def gae(
  table: TokenTable, *, gamma: float = 1.0, lam: float = 1.0, bootstrap: bool = False
) -> TokenTable:
  """δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γλ A_{t+1};  returns = A + V.

  Schulman et al. 2015 (arXiv 1506.02438), stepping from action to action (the aligned
  advantages of arXiv 2511.14460): γ and λ count the policy's tokens only. V after the
  last token is 0.
  """
  values, after = table.column('values'), _after(table, bootstrap)
  advantages = _gae(table.trajectory, table.rewards, values, after, gamma, lam)
  return dataclasses.replace(table, advantages=advantages, returns=advantages + values)


def step_gae(
  table: TokenTable,
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  bootstrap: bool = False,
  normalize: bool = True,
) -> TokenTable:
  """δ_k = R_k + γ V_{k+1} - V_k;  A_k = δ_k + γλ A_{k+1} on all tokens of turn k.

  Agent-R1's default: a step of the MDP is a turn k, R_k is its reward and V_k the value
  before its first token. As there, A is standardised over the turns of the batch (with
  Bessel's correction, ε = 1e-8), and the returns are not.
  """
  values = table.column('values')[spans.starts(table.turn)]
  after = _after(table, bootstrap)
  raw = _gae(table.turn_trajectory, table.turn_rewards, values, after, gamma, lam)
  scaled = _normalized(raw, divide_by_std=True, eps=1e-8) if normalize else raw
  advantages, returns = scaled[table.turn], (raw + values)[table.turn]
  return dataclasses.replace(table, advantages=advantages, returns=returns)


def bi_level_gae(
  table: TokenTable,
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  high_gamma: float = 0.95,
  bootstrap: bool = False,
) -> TokenTable:
  """GAE over the ends of turns, then within each turn towards the return at its end.

  Turns: δ_k = R_k + γ_h V_{k+1} - V_k;  A_k = δ_k + γ_h λ A_{k+1}, V_k at the last token
  of turn k. Tokens: GAE with γ and λ within a turn; its last reward is A_k + V_k minus
  the turn's other rewards.

  This is VAGEN's method (arXiv 2510.16907), as in RAGEN's code. RAGEN ends a turn at
  every token that has a reward: it joins a turn with reward 0 to the next, and with a KL
  penalty every token is a turn. The two agree if every turn ends with a nonzero reward.
  """
  values, ends = table.column('values'), spans.ends(table.turn)
  turn_rewards, turn_values = table.turn_rewards, values[ends]
  after = _after(table, bootstrap)
  high = _gae(table.turn_trajectory, turn_rewards, turn_values, after, high_gamma, lam)
  rewards, zeros = table.rewards.copy(), np.zeros(len(turn_rewards))
  rewards[ends] += high + turn_values - turn_rewards
  advantages = _gae(table.turn, rewards, values, zeros, gamma, lam)
  return dataclasses.replace(table, advantages=advantages, returns=advantages + values)


def returns_to_go(table: TokenTable, *, gamma: float = 1.0) -> TokenTable:
  """A_t = G_t = r_t + γ G_{t+1}: REINFORCE's return; whitened, REINFORCE++'s.

  Hu 2025 (arXiv 2501.03262), from action to action as in verl since its #6376. Before
  that, and in SkyRL, G restarts at 0 at every environment token.
  """
  returns = spans.discounted_sum(table.trajectory, table.rewards, gamma)
  return dataclasses.replace(table, advantages=returns, returns=returns)


def greedy_baseline(table: TokenTable, *, gamma: float = 1.0) -> TokenTable:
  """A_t = G_t - b, where b is the reward of the task's greedy episode (ReMax).

  Li et al. 2023 (arXiv 2310.10505). Returns are G.
  """
  returns = spans.discounted_sum(table.trajectory, table.rewards, gamma)
  advantages = returns - table.column('baselines')[table.trajectory]
  return dataclasses.replace(table, advantages=advantages, returns=returns)


def group_relative(
  table: TokenTable, *, divide_by_std: bool = True, eps: float = 1e-6
) -> TokenTable:
  """A = (R - mean_g R) / (std_g R + ε), the same on every token (GRPO).

  Shao et al. 2024 (arXiv 2402.03300); std with Bessel's correction as in verl and TRL
  (TRL: ε = 1e-4). Without the division it is Dr.GRPO's (arXiv 2503.20783), and that
  whitened is REINFORCE++-baseline's. A group with equal rewards, or of one trajectory,
  gets exactly 0, because its std is rounding noise. verl gives a single trajectory its
  raw reward.
  """
  measure = lambda s: _normalized(s, divide_by_std=divide_by_std, eps=eps)
  return _broadcast(table, spans.map_by([table.group], table.scores, measure))


def leave_one_out(table: TokenTable) -> TokenTable:
  """A = R - mean of the others = n/(n-1) (R - mean_g R), the same on every token (RLOO).

  Ahmadian et al. 2024 (arXiv 2402.14740). A single trajectory gets 0, as in SkyRL and
  verl's vectorised form; verl's other form gives it its raw reward.
  """

  def measure(s):
    centred = _normalized(s, divide_by_std=False, eps=0.0)
    return centred * len(s) / max(len(s) - 1, 1)

  return _broadcast(table, spans.map_by([table.group], table.scores, measure))


def gigpo(
  table: TokenTable,
  *,
  gamma: float = 0.95,
  step_weight: float = 1.0,
  divide_by_std: bool = False,
  eps: float = 1e-6,
) -> TokenTable:
  """A = A_E + w A_S: an episode relative to its group, a turn to turns from its state.

  Feng et al. 2025 (arXiv 2505.10978). A_E is `group_relative`. A_S is the same for the
  returns of turns, G_k = R_k + γ G_{k+1}, grouped by task and by the text that the policy
  was shown before the turn (TokenTable.states); a turn alone in its group gets 0. In A_E
  the authors' code counts a trajectory once per turn, and gives a single trajectory its
  raw reward; here each trajectory counts once, and a single one gets 0.
  """
  measure = lambda s: _normalized(s, divide_by_std=divide_by_std, eps=eps)
  returns = spans.discounted_sum(table.turn_trajectory, table.turn_rewards, gamma)
  steps = spans.map_by(
    [table.group[table.turn_trajectory], table.states], returns, measure
  )
  episodes = spans.map_by([table.group], table.scores, measure)
  advantages = episodes[table.trajectory] + step_weight * steps[table.turn]
  return dataclasses.replace(table, advantages=advantages)


def gdpo(
  table: TokenTable,
  *,
  weights: Mapping[str, float] | None = None,
  eps: float = 1e-6,
) -> TokenTable:
  """A = whiten(Σ_k w_k (R_k - mean_g R_k) / (std_g R_k + ε)) + R' - mean_g R'.

  Liu et al. 2026 (arXiv 2601.05242): a part R_k of the reward that varies little keeps
  its influence, which it would lose in GRPO's sum of the parts. Whitened over tokens, as
  in verl. A part that is equal across a group adds exactly 0 there; a part that an
  episode lacks counts as 0.

  R' is the reward without its named parts, such as a KL penalty; 0 if `weights` is given.
  The paper and verl have no such term. It is centred in its group, but neither divided by
  the group's standard deviation nor whitened, so that it keeps the scale that the user
  chose (a KL coefficient): a penalty of 0.0003 must not move an advantage by 1.

  Raises:
    ValueError: No episode has any of the parts.
  """
  named = weights is not None
  weights = weights if named else dict.fromkeys(table.parts, 1.0)
  if not set(table.parts) & set(weights):
    raise ValueError(
      f'gdpo found no part of the reward: weights name {sorted(weights)}, the episodes '
      f'have {sorted(table.parts)}. Let the environment report "reward/NAME" in '
      'Step.metrics.'
    )
  measure = lambda s: _normalized(s, divide_by_std=True, eps=eps)
  centre = lambda s: _normalized(s, divide_by_std=False, eps=0.0)
  total = np.zeros(len(table.group))
  for name, weight in weights.items():
    if name in table.parts:
      total += weight * spans.map_by([table.group], table.parts[name], measure)
  white = whiten(_broadcast(table, total))
  scores = table.scores
  rest = scores - sum(table.parts.values())
  rest[np.abs(rest) <= 1e-9 * np.maximum(1.0, np.abs(scores))] = 0.0  # Only rounding.
  if named or not rest.any():
    return white
  added = spans.map_by([table.group], rest, centre)[table.trajectory]
  return dataclasses.replace(white, advantages=white.advantages + added)


def reverse_kl(table: TokenTable) -> TokenTable:
  """A_t = log π_teacher - log π: on-policy distillation, with the reference as teacher.

  Agarwal et al. 2023 (GKD, arXiv 2306.13649), with the reverse KL on the student's own
  samples, as a policy gradient whose only reward is the token's negative KL (γ = 0). π is
  the policy before the update, even if another policy sampled. A is 0 off the action
  mask.
  """
  difference = table.column('ref_logprobs') - table.old_logprobs
  advantages = np.where(table.action_mask, difference, 0.0)
  return dataclasses.replace(table, advantages=advantages)


def accepted(table: TokenTable, *, threshold: float) -> TokenTable:
  """A = N / N_accepted where R ≥ threshold, else 0: rejection-sampling fine-tuning.

  Yuan et al. 2023 (RFT, arXiv 2308.01825). N counts tokens, so that a mean over the
  tokens of the batch is a mean over the tokens of the accepted trajectories.
  """
  passed, counts = table.scores >= threshold, table.lengths
  weight = counts.sum() / max(counts @ passed, 1)
  return _broadcast(table, np.where(passed, weight, 0.0))


def whiten(table: TokenTable, *, eps: float = 1e-8) -> TokenTable:
  """(A - mean) / √(var + ε) over all tokens, with Bessel's correction (verl)."""
  raw = table.column('advantages')
  if not len(raw):
    return table
  var = raw.var(ddof=1) if len(raw) > 1 else 0.0
  advantages = (raw - raw.mean()) / np.sqrt(var + eps)
  return dataclasses.replace(table, advantages=advantages)


def by_reward_to_go(table: TokenTable, *, eps: float = 1e-6) -> TokenTable:
  """r' = r / (max over the batch of |Σ_{u≥t} r_u| + ε): returns are within ±1.

  The normalisation of process rewards in Agent-R1's paper-era code (arXiv 2511.14460).
  """
  to_go = spans.discounted_sum(table.trajectory, table.rewards, 1.0)
  scale = np.abs(to_go).max(initial=0.0) + eps
  parts = {name: part / scale for name, part in table.parts.items()}
  return dataclasses.replace(table, rewards=table.rewards / scale, parts=parts)


def overlong(
  table: TokenTable,
  *,
  limit: int,
  buffer: int,
  factor: float = 1.0,
  floor: float | None = None,
) -> TokenTable:
  """r' = r + min(-(len - (limit - buffer)) / buffer · factor, 0) at the last action.

  DAPO's soft over-long penalty (arXiv 2503.14476). As in verl it has no lower bound; the
  paper and TRL have floor = -1. The length of an episode counts its action tokens only,
  because the policy does not control the length of tool outputs.

  `limit` and `buffer` are numbers of tokens, `factor` is the penalty at the limit, and
  `floor` its lower bound.

  Raises:
    ValueError: The buffer is not in 1 ... limit.
  """
  if not 0 < buffer <= limit:
    raise ValueError(f'buffer={buffer} must be positive and no more than limit={limit}.')
  actions = np.flatnonzero(table.action_mask)
  last = actions[spans.ends(table.trajectory[actions])]
  lengths = np.bincount(table.trajectory[actions], minlength=len(table.group))
  penalty = np.minimum((limit - buffer - lengths) / buffer * factor, 0.0)
  penalty = penalty if floor is None else np.maximum(penalty, floor)
  rewards = table.rewards.copy()
  rewards[last] += penalty[table.trajectory[last]]
  return dataclasses.replace(table, rewards=rewards)


def _after(table: TokenTable, bootstrap: bool) -> Float[np.ndarray, 'N']:
  """V after the last token of each trajectory."""
  if not bootstrap or table.final_values is None:
    return np.zeros(len(table.group))
  return np.where(table.truncated, table.final_values, 0.0)


def _gae(
  ids: Int[np.ndarray, 'n'],
  rewards: Float[np.ndarray, 'n'],
  values: Float[np.ndarray, 'n'],
  after: Float[np.ndarray, 'm'],
  gamma: float,
  lam: float,
) -> Float[np.ndarray, 'n']:
  """GAE within each run of equal ids; V after the run is after[id]."""
  deltas = rewards + gamma * spans.next_values(ids, values, after) - values
  return spans.discounted_sum(ids, deltas, gamma * lam)


def _normalized(
  x: Float[np.ndarray, 'n'], *, divide_by_std: bool, eps: float
) -> Float[np.ndarray, 'n']:
  """(x - mean) / (std + ε) or x - mean; exactly 0 if all x are equal."""
  if spans.tied(x):
    return np.zeros_like(x)
  return (x - x.mean()) / (x.std(ddof=1) + eps if divide_by_std else 1.0)


def _broadcast(table: TokenTable, advantages: Float[np.ndarray, 'N']) -> TokenTable:
  """Gives all tokens of a trajectory its advantage."""
  return dataclasses.replace(table, advantages=advantages[table.trajectory])
