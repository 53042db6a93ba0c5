"""Settings of sampling and of the engine."""

import dataclasses

from agent_r1_jax import fields

# Fields of which a 0 means that train/plan/sizes.py chooses the value.
SIZES = (
  'engine.rows',
  'engine.slots',
  'engine.prefill_rows',
  'engine.prefill_tokens',
  'engine.bucket',
  'engine.replicas',
)


@dataclasses.dataclass
class Sampling:
  """How the tokens of replies are chosen: in training, in evaluations, of one request.

  A policy is trained on samples of its own distribution: a training run that truncates it
  or restricts it by a grammar needs an algorithm with a correction.

  Attributes:
    temperature: Divides the logits; 0 is greedy. In training it must be above 0, and the
      log-probs that are trained have it too.
    top_k: Only the k likeliest tokens may be chosen; 0 allows all.
    top_p: Only the smallest set of likeliest tokens that has at least this probability
      may be chosen; 1 allows all.
    min_p: Only tokens may be chosen that are at least this many times as probable as the
      likeliest one; 0 allows all.
    tool_grammar: Whether a grammar restricts tool calls to the schemas of the
      environment's tools, so that none is malformed: the environment's `call_grammar`,
      for the format 'hermes'. A request to the engine has its grammar among `automata`,
      and this is not read.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  tool_grammar: bool = False

  def check(self, part: str = 'sampling') -> None:
    """Raises ValueError for a wrong value; `part` is the name of this part."""
    fields.check(self, part, above_0_to_1=('top_p',), from_0_to_1=('min_p',))

  @property
  def truncated(self) -> bool:
    """Whether top_k, top_p or min_p forbids tokens."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

  @property
  def on_policy(self) -> bool:
    """Whether the tokens follow the distribution whose log-probs are trained."""
    return not (self.truncated or self.tool_grammar)


GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass
class Engine:
  """Sizes of the engine's programs, and of its numbers; a 0 in SIZES is chosen.

  Attributes:
    rows: Rows of the KV cache, so episodes at a time, on each chip (or `mesh.tensor`).
    slots: The most tokens of a row: prompt, replies and tool messages together.
    decode_steps: Calls of the policy in one decode; each samples a token, or with drafts
      several.
    prefill_rows: Rows of one prefill.
    prefill_tokens: Tokens of each row in one prefill.
    bucket: The least slots that a cache read covers; reads double from there to slots.
    width: The most rows that are decoded at a time; 0 is all. With slow tools, take half
      of rows.
    narrow: Whether there are also programs for a quarter of the rows. As the timing of
      tools varies, a run is repeatable bit for bit only without them and with bucket =
      slots.
    drafts: How many tokens are drafted for each call of the policy, from what was said
      before; sampling keeps those that it chooses anyway. 0 drafts none.
    replicas: Replicas that share each chip and its rows; on a CPU, at most one per core.
    weights: The numbers in the kernels of the engine's copy of the policy: 'model', of
      model.dtype; or 'int8' or 'fp8', of 8 bits with a scale for each output. The learner
      never has these: an algorithm without a correction then gets
      losses.token_truncated().
    cache: The numbers of the keys and values in the KV cache: 'model', of model.dtype; or
      'int8', of 8 bits with a scale for each slot of each head. The correction likewise.
  """

  rows: int = 0
  slots: int = 0
  decode_steps: int = 32
  prefill_rows: int = 0
  prefill_tokens: int = 0
  bucket: int = 0
  width: int = 0
  narrow: bool = True
  drafts: int = 0
  replicas: int = 0
  weights: str = 'model'
  cache: str = 'model'

  @property
  def rounds_weights(self) -> bool:
    """Whether it samples with other kernels than the learner's."""
    return self.weights != 'model'

  @property
  def rounds(self) -> bool:
    """Whether it samples with other numbers than the learner's."""
    return self.rounds_weights or self.cache != 'model'

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    chosen = [name.removeprefix('engine.') for name in SIZES]
    choices = {'weights': ('model', 'int8', 'fp8'), 'cache': ('model', 'int8')}
    fields.check(
      self, 'engine', at_least_1=('decode_steps',), chosen_if_0=chosen, choices=choices
    )
