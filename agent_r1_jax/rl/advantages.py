"""Advantages of the tokens that are seen, computed on the host in float64.

Every estimator takes the episodes of a whole batch and gives each its Credit. Advantages
are raw; where an algorithm standardises them over the batch, it says whiten(...) itself.
Group statistics count trajectories: a long one has one vote, as a short one.

Letters: n tokens that are seen of an episode, K its turns.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

from jaxtyping import Float
import numpy as np

from agent_r1_jax.rl.episodes import Credit, Episode, tied


def gae(
  episodes: Sequence[Episode],
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  bootstrap: bool = False,
) -> list[Credit]:
  """δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γλ A_{t+1};  returns = A + V.

  Schulman et al. 2015 (arXiv 1506.02438), stepping from action to action (arXiv
  2511.14460's aligned advantages): γ and λ count the policy's tokens only. V after the
  last token is 0, also where a budget ended the episode, as in verl: it has ended and was
  judged.

  Args:
    episodes: With values.
    gamma: Discount a token.
    lam: Trace decay a token.
    bootstrap: Take final_value for V after an episode that a budget ended, as if it went
      on.

  Raises:
    ValueError: An episode has no values.
  """
  credits = []
  for e in episodes:
    values = _values(e)
    advantages = _gae(e.rewards, values, _after(e, bootstrap), gamma, lam)
    credits.append(Credit(advantages, advantages + values))
  return credits


def step_gae(
  episodes: Sequence[Episode],
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  bootstrap: bool = False,
  normalize: bool = True,
) -> list[Credit]:
  """δ_k = R_k + γ V_{k+1} - V_k;  A_k = δ_k + γλ A_{k+1}, the same on a turn's tokens.

  Agent-R1's default: the MDP's step is a turn k, R_k is its reward and V_k the value
  before its first token. As there, A is standardised over the turns of the batch (with
  Bessel's correction, ε = 1e-8) and the returns are not.

  Args:
    episodes: With values.
    gamma: Discount a turn.
    lam: Trace decay a turn.
    bootstrap: Take final_value for V after an episode that a budget ended, as if it went
      on.
    normalize: Standardise the advantages.

  Raises:
    ValueError: An episode has no values.
  """
  steps = []
  for e in episodes:
    values = _values(e)[np.flatnonzero(np.diff(e.turn, prepend=-1))]
    advantages = _gae(e.turn_rewards, values, _after(e, bootstrap), gamma, lam)
    steps.append(Credit(advantages, advantages + values))
  raw = _flat(steps)
  whole = _normalized(raw, divide_by_std=True, eps=1e-8) if normalize else raw
  begins = np.cumsum([0, *(len(s.advantages) for s in steps)])
  return [
    Credit(whole[begin + e.turn], step.returns[e.turn])
    for e, step, begin in zip(episodes, steps, begins[:-1], strict=True)
  ]


def bi_level_gae(
  episodes: Sequence[Episode],
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  high_gamma: float = 0.95,
  bootstrap: bool = False,
) -> list[Credit]:
  """GAE over the turns' ends, then inside each turn towards the return of its end.

  Turns: δ_k = R_k + γ_h V_{k+1} - V_k;  A_k = δ_k + γ_h λ A_{k+1}, V_k at the last token
  of turn k. Tokens: GAE with γ and λ on a turn alone, whose end is rewarded with what is
  left of A_k + V_k after the turn's other rewards.

  RAGEN's code; the method is VAGEN's (arXiv 2510.16907). RAGEN takes for a turn's end
  whatever token has a reward: a turn that is given 0 is joined to the next, and a KL
  penalty makes every token a turn. Ours are the turns. With rewards at the turns' ends,
  none of them 0, the two agree.

  Args:
    episodes: With values.
    gamma: Discount a token inside a turn.
    lam: Trace decay of both levels.
    high_gamma: Discount a turn, γ_h.
    bootstrap: Take final_value for V after an episode that a budget ended, as if it went
      on.

  Raises:
    ValueError: An episode has no values.
  """
  credits = []
  for e in episodes:
    values, ends, of_turns = _values(e), e.turn_ends, e.turn_rewards
    high = _gae(of_turns, values[ends], _after(e, bootstrap), high_gamma, lam)
    rewards = e.rewards.copy()
    rewards[ends] += high + values[ends] - of_turns
    advantages = np.zeros_like(values)
    for start, stop in zip([0, *(ends + 1)], ends + 1, strict=False):
      turn = slice(start, stop)
      advantages[turn] = _gae(rewards[turn], values[turn], 0.0, gamma, lam)
    credits.append(Credit(advantages, advantages + values))
  return credits


def returns_to_go(episodes: Sequence[Episode], *, gamma: float = 1.0) -> list[Credit]:
  """A_t = G_t = r_t + γ G_{t+1}: REINFORCE's return; whitened it is REINFORCE++'s.

  Hu 2025 (arXiv 2501.03262), from action to action as in verl since its #6376: before it,
  and in SkyRL, G was cut to 0 at every token of the environment.

  Args:
    episodes: Any.
    gamma: Discount a token.
  """
  returns = [_discounted(e.rewards, gamma) for e in episodes]
  return [Credit(g, g) for g in returns]


def greedy_baseline(episodes: Sequence[Episode], *, gamma: float = 1.0) -> list[Credit]:
  """A_t = G_t - b, b the reward of the greedy episode of the same task (ReMax).

  Li et al. 2023 (arXiv 2310.10505). Returns are G.

  Args:
    episodes: With baselines.
    gamma: Discount a token.

  Raises:
    ValueError: An episode has no baseline.
  """
  credits = []
  for e in episodes:
    if e.baseline is None:
      raise ValueError(
        f'An episode of group {e.group} has no baseline: set greedy_baseline of the '
        'algorithm, so that a greedy episode of each task is sampled.'
      )
    returns = _discounted(e.rewards, gamma)
    credits.append(Credit(returns - e.baseline, returns))
  return credits


def group_relative(
  episodes: Sequence[Episode], *, divide_by_std: bool = True, eps: float = 1e-6
) -> list[Credit]:
  """A = (R - mean_g R) / (std_g R + ε), the same on every token (GRPO).

  Shao et al. 2024 (arXiv 2402.03300); std with Bessel's correction as verl and TRL take
  it (TRL: ε = 1e-4). Without the division it is Dr.GRPO's (arXiv 2503.20783), and
  whitened REINFORCE++-baseline's. A group whose rewards are all equal, a single
  trajectory included, gets exactly 0: its std is rounding noise. verl leaves a single
  trajectory its raw reward.

  Args:
    episodes: Of all groups.
    divide_by_std: Divide by the group's standard deviation.
    eps: Added to it.
  """
  scores = [e.score for e in episodes]
  measure = lambda s: _normalized(s, divide_by_std=divide_by_std, eps=eps)
  return _spread(episodes, _by_group([e.group for e in episodes], scores, measure))


def leave_one_out(episodes: Sequence[Episode]) -> list[Credit]:
  """A = R - mean of the others = n/(n-1) (R - mean_g R), the same on every token (RLOO).

  Ahmadian et al. 2024 (arXiv 2402.14740). A single trajectory has no others and gets 0,
  as in SkyRL and verl's vectorised form; verl's other form leaves it its raw reward.

  Args:
    episodes: Of all groups.
  """

  def measure(s):
    centred = _normalized(s, divide_by_std=False, eps=0.0)
    return centred * len(s) / max(len(s) - 1, 1)

  scores = [e.score for e in episodes]
  return _spread(episodes, _by_group([e.group for e in episodes], scores, measure))


def gigpo(
  episodes: Sequence[Episode],
  *,
  gamma: float = 0.95,
  step_weight: float = 1.0,
  divide_by_std: bool = False,
  eps: float = 1e-6,
) -> list[Credit]:
  """A = A_E + w A_S: the episode in its group, and the turn among those from one state.

  Feng et al. 2025 (arXiv 2505.10978). A_E is `group_relative`. A_S is the same of the
  turns' returns G_k = R_k + γ G_{k+1}, in the group of the turns of one task that were
  shown the same text before (Episode.anchors); a turn alone there gets 0. The authors'
  code counts a trajectory once a turn in A_E, and leaves a single one its raw reward;
  here each counts once, and a single one gets 0.

  Args:
    episodes: Of all groups, with anchors.
    gamma: Discount a turn.
    step_weight: w.
    divide_by_std: Divide both parts by the standard deviations of their groups.
    eps: Added to them.
  """
  measure = lambda s: _normalized(s, divide_by_std=divide_by_std, eps=eps)
  states, returns = [], []
  for e in episodes:
    for anchor, g in zip(e.anchors, _discounted(e.turn_rewards, gamma), strict=True):
      states.append((e.group, anchor))
      returns.append(g)
  steps = _by_group(states, returns, measure)
  begins = np.cumsum([0, *(len(e.anchors) for e in episodes)])
  whole = group_relative(episodes, divide_by_std=divide_by_std, eps=eps)
  return [
    Credit(credit.advantages + step_weight * steps[begin + e.turn])
    for e, credit, begin in zip(episodes, whole, begins[:-1], strict=True)
  ]


def gdpo(
  episodes: Sequence[Episode],
  *,
  weights: Mapping[str, float] | None = None,
  eps: float = 1e-6,
) -> list[Credit]:
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
    episodes: Of all groups, with parts.
    weights: w_k by name; nothing else counts, and R' = 0. None: every part has weight 1.
    eps: Added to the standard deviations.

  Raises:
    ValueError: No episode has any of the parts.
  """
  told = sorted({name for e in episodes for name in e.parts})
  rest = [_rounded(e.score - sum(e.parts.values()), e.score) for e in episodes]
  named = weights is not None
  weights = weights if named else dict.fromkeys(told, 1.0)
  if not set(told) & set(weights):
    raise ValueError(
      f'gdpo found no part of the reward: weights name {sorted(weights)}, the episodes '
      f'have {told}. Let the environment report "reward/NAME" in Step.metrics.'
    )
  groups = [e.group for e in episodes]
  measure = lambda s: _normalized(s, divide_by_std=True, eps=eps)
  total = np.zeros(len(episodes))
  for name, weight in weights.items():
    part = [e.parts.get(name, 0.0) for e in episodes]
    total += weight * _by_group(groups, part, measure)
  credits = whiten(_spread(episodes, total))
  if named or not any(rest):
    return credits
  centre = lambda s: _normalized(s, divide_by_std=False, eps=0.0)
  added = _by_group(groups, rest, centre)
  return [Credit(c.advantages + a) for c, a in zip(credits, added, strict=True)]


def _rounded(difference: float, of: float) -> float:
  """0 where a difference of sums is but their rounding."""
  return difference if abs(difference) > 1e-9 * max(1.0, abs(of)) else 0.0


def reverse_kl(episodes: Sequence[Episode]) -> list[Credit]:
  """A_t = log π_teacher - log π: on-policy distillation, the reference is the teacher.

  Agarwal et al. 2023 (GKD, arXiv 2306.13649), with the reverse KL and the student's own
  samples; as a policy gradient with the KL of each token as its only reward (γ = 0), not
  differentiated through the distribution. π is the policy before the update, whichever
  policy sampled. 0 at a token that was not sampled.

  Args:
    episodes: With ref_logprobs.

  Raises:
    ValueError: An episode has none.
  """
  credits = []
  for e in episodes:
    if e.ref_logprobs is None:
      raise ValueError(
        'reverse_kl needs Episode.ref_logprobs: set reads_reference of the algorithm, '
        'so that the teacher scores the tokens.'
      )
    chosen = ~np.isnan(e.logprobs)
    credits.append(Credit(np.where(chosen, e.ref_logprobs - e.logprobs, 0.0)))
  return credits


def accepted(episodes: Sequence[Episode], *, threshold: float) -> list[Credit]:
  """A = N / N_accepted where R ≥ threshold, else 0: rejection-sampling fine-tuning.

  Yuan et al. 2023 (RFT, arXiv 2308.01825). N counts tokens, so that A is 1 on average:
  a mean over the tokens of the batch is one over the tokens of what was accepted.

  Args:
    episodes: Any.
    threshold: On the trajectory's reward.
  """
  passed = [e.score >= threshold for e in episodes]
  counts = np.array([len(e.rewards) for e in episodes], int)
  weight = counts.sum() / max(counts @ np.array(passed, int), 1)
  return _spread(episodes, np.where(passed, weight, 0.0))


def whiten(
  credits: Sequence[Credit], *, eps: float = 1e-8, shift_mean: bool = True
) -> list[Credit]:
  """(A - mean) / √(var + ε) over all tokens, with Bessel's correction (verl).

  Args:
    credits: Their returns are kept.
    eps: Added to the variance.
    shift_mean: False adds the mean again.
  """
  flat = _flat(credits)
  if not len(flat):
    return list(credits)
  mean, var = flat.mean(), flat.var(ddof=1) if len(flat) > 1 else 0.0
  back = 0.0 if shift_mean else mean
  return [
    c._replace(advantages=(c.advantages - mean) / np.sqrt(var + eps) + back)
    for c in credits
  ]


def _values(episode: Episode) -> np.ndarray:
  if episode.values is None:
    raise ValueError(
      'The estimator needs Episode.values: set value_loss of the algorithm, so that '
      'there is a critic.'
    )
  return episode.values


def _after(episode: Episode, bootstrap: bool) -> float:
  """V after the last token."""
  return episode.final_value if bootstrap and episode.truncated else 0.0


def _gae(
  rewards: Float[np.ndarray, 'n'],
  values: Float[np.ndarray, 'n'],
  after: float,
  gamma: float,
  lam: float,
) -> Float[np.ndarray, 'n']:
  following = np.append(values, after)[1:]
  return _discounted(rewards + gamma * following - values, gamma * lam)


def _discounted(x: Float[np.ndarray, 'n'], factor: float) -> Float[np.ndarray, 'n']:
  """y_t = x_t + f y_{t+1}, in log₂ n operations on the array.

  After j rounds y_t is the sum of the first 2ʲ terms of x_t + f x_{t+1} + f² x_{t+2} ...
  """
  y, reach = x.copy(), 1
  while reach < len(y):
    y[:-reach] += factor**reach * y[reach:]
    reach *= 2
  return y


def _normalized(
  x: Float[np.ndarray, 'n'], *, divide_by_std: bool, eps: float
) -> Float[np.ndarray, 'n']:
  """(x - mean) / (std + ε) or x - mean; exactly 0 where x is tied."""
  if tied(x):
    return np.zeros_like(x)
  return (x - x.mean()) / (x.std(ddof=1) + eps if divide_by_std else 1.0)


def _by_group(
  groups: Sequence[Hashable],
  scores: Sequence[float],
  measure: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
  """Every score as its group's measure has it."""
  members: dict[Hashable, list[int]] = {}
  for i, group in enumerate(groups):
    members.setdefault(group, []).append(i)
  flat = np.array(scores, np.float64)
  out = np.zeros_like(flat)
  for chosen in members.values():
    out[chosen] = measure(flat[chosen])
  return out


def _spread(episodes: Sequence[Episode], advantages: np.ndarray) -> list[Credit]:
  """Each episode's advantage on all of its tokens."""
  return [
    Credit(np.full(len(e.rewards), a)) for e, a in zip(episodes, advantages, strict=True)
  ]


def _flat(credits: Sequence[Credit]) -> np.ndarray:
  return np.concatenate([np.zeros(0), *(c.advantages for c in credits)])
