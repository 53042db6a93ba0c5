"""Advantages: what tokens are worth, computed on the host in float64.

Every estimator takes the rows that it is shown, of a whole batch (rl/table.py), and
returns the table with the column `advantages`, and with `returns` where a critic can
learn from them. With the advantage mask on (the default) the rows are the action tokens
alone: what the environment wrote is not there, so no return can be cut or decayed by it
and no reward can fall on a token that is not trained. Advantages are raw; where an
algorithm standardises them over the batch, it says whiten(...) itself. Group statistics
count trajectories: a long one has one vote, as a short one.

Letters: n rows, K turns, N trajectories.
"""

from collections.abc import Mapping
import dataclasses

from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rl.table import TokenTable, discounted_sum, map_by


def gae(
  table: TokenTable, *, gamma: float = 1.0, lam: float = 1.0, bootstrap: bool = False
) -> TokenTable:
  """δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γλ A_{t+1};  returns = A + V.

  Schulman et al. 2015 (arXiv 1506.02438), stepping from action to action (arXiv
  2511.14460's aligned advantages): γ and λ count the policy's tokens only. V after the
  last token is 0, also where a budget ended the episode, as in verl: it has ended and was
  judged.

  Args:
    table: With values.
    gamma: Discount a token.
    lam: Trace decay a token.
    bootstrap: Take final_values for V after an episode that a budget ended, as if it went
      on.

  Raises:
    ValueError: The table has no values.
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
  """δ_k = R_k + γ V_{k+1} - V_k;  A_k = δ_k + γλ A_{k+1}, the same on a turn's tokens.

  Agent-R1's default: the MDP's step is a turn k, R_k is its reward and V_k the value
  before its first token. As there, A is standardised over the turns of the batch (with
  Bessel's correction, ε = 1e-8) and the returns are not.

  Args:
    table: With values.
    gamma: Discount a turn.
    lam: Trace decay a turn.
    bootstrap: Take final_values for V after an episode that a budget ended, as if it went
      on.
    normalize: Standardise the advantages.

  Raises:
    ValueError: The table has no values.
  """
  values, after = (
    table.column('values')[table_lib.starts(table.turn)],
    _after(table, bootstrap),
  )
  raw = _gae(table.turn_trajectory, table.turn_rewards, values, after, gamma, lam)
  whole = _normalized(raw, divide_by_std=True, eps=1e-8) if normalize else raw
  advantages, returns = whole[table.turn], (raw + values)[table.turn]
  return dataclasses.replace(table, advantages=advantages, returns=returns)


def bi_level_gae(
  table: TokenTable,
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  high_gamma: float = 0.95,
  bootstrap: bool = False,
) -> TokenTable:
  """GAE over the turns' ends, then inside each turn towards the return of its end.

  Turns: δ_k = R_k + γ_h V_{k+1} - V_k;  A_k = δ_k + γ_h λ A_{k+1}, V_k at the last token
  of turn k. Tokens: GAE with γ and λ on a turn alone, whose end is rewarded with what is
  left of A_k + V_k after the turn's other rewards.

  RAGEN's code; the method is VAGEN's (arXiv 2510.16907). RAGEN takes for a turn's end
  whatever token has a reward: a turn that is given 0 is joined to the next, and a KL
  penalty makes every token a turn. Ours are the turns. With rewards at the turns' ends,
  none of them 0, the two agree.

  Args:
    table: With values.
    gamma: Discount a token inside a turn.
    lam: Trace decay of both levels.
    high_gamma: Discount a turn, γ_h.
    bootstrap: Take final_values for V after an episode that a budget ended, as if it went
      on.

  Raises:
    ValueError: The table has no values.
  """
  values, ends = table.column('values'), table_lib.ends(table.turn)
  of_turns, at_ends = table.turn_rewards, values[ends]
  after, nothing = _after(table, bootstrap), np.zeros(len(of_turns))
  high = _gae(table.turn_trajectory, of_turns, at_ends, after, high_gamma, lam)
  rewards = table.rewards.copy()
  rewards[ends] += high + at_ends - of_turns
  advantages = _gae(table.turn, rewards, values, nothing, gamma, lam)
  return dataclasses.replace(table, advantages=advantages, returns=advantages + values)


def returns_to_go(table: TokenTable, *, gamma: float = 1.0) -> TokenTable:
  """A_t = G_t = r_t + γ G_{t+1}: REINFORCE's return; whitened it is REINFORCE++'s.

  Hu 2025 (arXiv 2501.03262), from action to action as in verl since its #6376: before it,
  and in SkyRL, G was cut to 0 at every token of the environment.

  Args:
    table: Any.
    gamma: Discount a token.
  """
  returns = discounted_sum(table.trajectory, table.rewards, gamma)
  return dataclasses.replace(table, advantages=returns, returns=returns)


def greedy_baseline(table: TokenTable, *, gamma: float = 1.0) -> TokenTable:
  """A_t = G_t - b, b the reward of the greedy episode of the same task (ReMax).

  Li et al. 2023 (arXiv 2310.10505). Returns are G.

  Args:
    table: With baselines.
    gamma: Discount a token.

  Raises:
    ValueError: The table has no baselines.
  """
  returns = discounted_sum(table.trajectory, table.rewards, gamma)
  advantages = returns - table.column('baselines')[table.trajectory]
  return dataclasses.replace(table, advantages=advantages, returns=returns)


def group_relative(
  table: TokenTable, *, divide_by_std: bool = True, eps: float = 1e-6
) -> TokenTable:
  """A = (R - mean_g R) / (std_g R + ε), the same on every token (GRPO).

  Shao et al. 2024 (arXiv 2402.03300); std with Bessel's correction as verl and TRL take
  it (TRL: ε = 1e-4). Without the division it is Dr.GRPO's (arXiv 2503.20783), and
  whitened REINFORCE++-baseline's. A group whose rewards are all equal, a single
  trajectory included, gets exactly 0: its std is rounding noise. verl leaves a single
  trajectory its raw reward.

  Args:
    table: Whole groups.
    divide_by_std: Divide by the group's standard deviation.
    eps: Added to it.
  """
  measure = lambda s: _normalized(s, divide_by_std=divide_by_std, eps=eps)
  return _on_all_tokens(table, map_by([table.group], table.scores, measure))


def leave_one_out(table: TokenTable) -> TokenTable:
  """A = R - mean of the others = n/(n-1) (R - mean_g R), the same on every token (RLOO).

  Ahmadian et al. 2024 (arXiv 2402.14740). A single trajectory has no others and gets 0,
  as in SkyRL and verl's vectorised form; verl's other form leaves it its raw reward.

  Args:
    table: Whole groups.
  """

  def measure(s):
    centred = _normalized(s, divide_by_std=False, eps=0.0)
    return centred * len(s) / max(len(s) - 1, 1)

  return _on_all_tokens(table, map_by([table.group], table.scores, measure))


def gigpo(
  table: TokenTable,
  *,
  gamma: float = 0.95,
  step_weight: float = 1.0,
  divide_by_std: bool = False,
  eps: float = 1e-6,
) -> TokenTable:
  """A = A_E + w A_S: the episode in its group, and the turn among those from one state.

  Feng et al. 2025 (arXiv 2505.10978). A_E is `group_relative`. A_S is the same of the
  turns' returns G_k = R_k + γ G_{k+1}, in the group of the turns of one task that were
  shown the same text before (TokenTable.states); a turn alone there gets 0. The authors'
  code counts a trajectory once a turn in A_E, and leaves a single one its raw reward;
  here each counts once, and a single one gets 0.

  Args:
    table: Whole groups.
    gamma: Discount a turn.
    step_weight: w.
    divide_by_std: Divide both parts by the standard deviations of their groups.
    eps: Added to them.
  """
  measure = lambda s: _normalized(s, divide_by_std=divide_by_std, eps=eps)
  returns = discounted_sum(table.turn_trajectory, table.turn_rewards, gamma)
  steps = map_by([table.group[table.turn_trajectory], table.states], returns, measure)
  whole = map_by([table.group], table.scores, measure)
  advantages = whole[table.trajectory] + step_weight * steps[table.turn]
  return dataclasses.replace(table, advantages=advantages)


def gdpo(
  table: TokenTable,
  *,
  weights: Mapping[str, float] | None = None,
  eps: float = 1e-6,
) -> TokenTable:
  """A = whiten(Σ_k w_k (R_k - mean_g R_k) / (std_g R_k + ε)) + R' - mean_g R'.

  Liu et al. 2026 (arXiv 2601.05242): a part R_k of the reward that varies little is not
  drowned by another, as it is where GRPO takes the sum of the parts. Whitened over
  tokens, as in verl. A part that is tied in a group adds exactly 0 there; a part that an
  episode lacks is 0.

  R' is what the reward is beyond its named parts, such as a KL penalty. The paper and
  verl have no such rest. It is centred in its group, but neither divided by the group's
  standard deviation nor whitened: somebody chose its size, a KL's by its coefficient, and
  a penalty of 0.0003 must not move an advantage by 1.

  Args:
    table: Whole groups, with parts.
    weights: w_k by name; nothing else counts, and R' = 0. None: every part has weight 1.
    eps: Added to the standard deviations.

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
      total += weight * map_by([table.group], table.parts[name], measure)
  white = whiten(_on_all_tokens(table, total))
  scores = table.scores
  rest = scores - sum(table.parts.values())
  rest[np.abs(rest) <= 1e-9 * np.maximum(1.0, np.abs(scores))] = 0.0  # Only rounding.
  if named or not rest.any():
    return white
  added = map_by([table.group], rest, centre)[table.trajectory]
  return dataclasses.replace(white, advantages=white.advantages + added)


def reverse_kl(table: TokenTable) -> TokenTable:
  """A_t = log π_teacher - log π: on-policy distillation, the reference is the teacher.

  Agarwal et al. 2023 (GKD, arXiv 2306.13649), with the reverse KL and the student's own
  samples; as a policy gradient with the KL of each token as its only reward (γ = 0), not
  differentiated through the distribution. π is the policy before the update, whichever
  policy sampled. 0 at a token that was not sampled.

  Args:
    table: With ref_logprobs.

  Raises:
    ValueError: The table has none.
  """
  difference = table.column('ref_logprobs') - table.logprobs
  advantages = np.where(table.action_mask, difference, 0.0)
  return dataclasses.replace(table, advantages=advantages)


def accepted(table: TokenTable, *, threshold: float) -> TokenTable:
  """A = N / N_accepted where R ≥ threshold, else 0: rejection-sampling fine-tuning.

  Yuan et al. 2023 (RFT, arXiv 2308.01825). N counts tokens, so that A is 1 on average:
  a mean over the tokens of the batch is one over the tokens of what was accepted.

  Args:
    table: Any.
    threshold: On the trajectory's reward.
  """
  passed, counts = table.scores >= threshold, table.lengths
  weight = counts.sum() / max(counts @ passed, 1)
  return _on_all_tokens(table, np.where(passed, weight, 0.0))


def whiten(table: TokenTable, *, eps: float = 1e-8) -> TokenTable:
  """(A - mean) / √(var + ε) over all tokens, with Bessel's correction (verl).

  Args:
    table: With advantages; its returns stay.
    eps: Added to the variance.
  """
  raw = table.column('advantages')
  if not len(raw):
    return table
  var = raw.var(ddof=1) if len(raw) > 1 else 0.0
  advantages = (raw - raw.mean()) / np.sqrt(var + eps)
  return dataclasses.replace(table, advantages=advantages)


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
  """GAE within each run of equal ids, with the value after[id] at its end."""
  deltas = rewards + gamma * table_lib.next_values(ids, values, after) - values
  return discounted_sum(ids, deltas, gamma * lam)


def _normalized(
  x: Float[np.ndarray, 'n'], *, divide_by_std: bool, eps: float
) -> Float[np.ndarray, 'n']:
  """(x - mean) / (std + ε) or x - mean; exactly 0 where x is tied."""
  if table_lib.tied(x):
    return np.zeros_like(x)
  return (x - x.mean()) / (x.std(ddof=1) + eps if divide_by_std else 1.0)


def _on_all_tokens(table: TokenTable, advantages: Float[np.ndarray, 'N']) -> TokenTable:
  """Each trajectory's advantage on all of its tokens."""
  return dataclasses.replace(table, advantages=advantages[table.trajectory])
