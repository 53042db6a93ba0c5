"""Settings of a policy and of how it plays: models, chat, episodes, sampling, engine."""

from collections.abc import Sequence
import dataclasses
import datetime
from typing import Any

from agent_r1_jax import fields

# Those of agent/call_formats.py, and 'auto'.
TOOL_FORMATS = (
  'auto',
  'hermes',
  'qwen3_coder',
  'mistral',
  'llama3',
  'search_r1',
  'retool',
  'react',
)


class _Formats:
  """What belongs to a configuration of models, and is no field of it.

  Attributes:
    formats: Formats of models other than HF's (models/files/tensor_files.Format), such as
      contrib.gguf.FORMAT. As Python objects they are neither flags nor in config.json.
  """

  formats: Sequence[Any] = ()


@dataclasses.dataclass
class Model(_Formats, fields.Checked):
  """The models that are loaded, and how they compute.

  Attributes:
    path: Directory of the policy to start from: weights and tokenizer in HF layout. Or
      what one of `formats` reads, beside which the tokenizer's files lie.
    reference: Directory of the reference policy or teacher, which must have the same
      tokenizer; if it is empty, the reference is the initial policy.
    dtype: Type of activations and KV cache: 'float32' or 'bfloat16'.
    batch_invariant: Whether the sampler's log-probs and the learner's are equal to the
      last bit, whatever is computed beside a token (batch, chunks of a prefill, shared
      prefixes, packing): the importance ratio of the first update is exactly 1. On one
      CPU only; docs/models.md has its price.
    remat: Activations recomputed in the backward pass: 'none', 'dots' or 'full'. If it is
      empty it is 'none', or 'full' where that does not fit the memory.
    lora_rank: Rank of the LoRA adapters that are trained in place of all parameters; 0
      trains all.
    lora_targets: The projections with adapters, separated by commas.
    lora_alpha: Adapters are scaled by lora_alpha / lora_rank.
    frozen: The numbers in the kernels under adapters: 'float32'; or 'int8' or 'fp8', of 8
      bits with a scale for each output, in learner and sampler alike (QLoRA). Embeddings
      and the head are then stored in `dtype`.
  """

  path: str = ''
  reference: str = ''
  dtype: str = fields.one_of('float32', 'bfloat16')
  batch_invariant: bool = False
  remat: str = fields.one_of('none', 'dots', 'full', default='')
  lora_rank: int = 0
  lora_targets: str = 'q,k,v,o,gate,up,down'
  lora_alpha: float = fields.above_0(16.0)
  frozen: str = fields.one_of('float32', 'int8', 'fp8')

  @property
  def adapter_targets(self) -> tuple[str, ...]:
    """The names in `lora_targets`."""
    return tuple(name.strip() for name in self.lora_targets.split(','))

  def check(self, name: str = '') -> None:
    """Raises ValueError for a wrong value, or two that contradict each other."""
    super().check(name)
    if self.batch_invariant and self.lora_rank:
      raise ValueError(
        f'model.batch_invariant: with model.lora_rank={self.lora_rank} the bits of the '
        'sampler and the learner are not known to be equal; leave out one of them.'
      )


@dataclasses.dataclass
class Chat(fields.Checked):
  """How tasks and tools become the text that the policy reads.

  Attributes:
    max_tool_tokens: The most tokens of a tool's message; longer ones are cut.
    tools_in_prompt: What describes the tools to the model: with 'default' its chat
      template, or if that supports none in the format, a text in the system message;
      'refuse' refuses such a template; with 'own' the tasks' own messages do.
    tool_format: How the model writes tool calls: 'auto' is as its chat template does, or
      'hermes' if that shows no known format. The others are in docs/tools.md.
    long_prompts: What happens to tasks whose prompt leaves no room for a reply: 'refuse'
      ends the run before it begins; 'skip' leaves them out of training, and evaluations
      count them as unanswered.
    stop_strings: Strings that end a reply, like the template's end of turn, as a JSON
      list: '["Observation:"]'.
    template: Options of the chat template, as a JSON object:
      '{"enable_thinking": false}'.
    date: The day that templates write, such as '2026-11-27'; '' is the day on which the
      run begins, and stays that when it is resumed.
  """

  max_tool_tokens: int = fields.at_least_1(1024)
  tools_in_prompt: str = fields.one_of('default', 'refuse', 'own')
  tool_format: str = fields.one_of(*TOOL_FORMATS)
  long_prompts: str = fields.one_of('refuse', 'skip')
  stop_strings: str = '[]'
  template: str = '{}'
  date: str = ''

  def check(self, name: str = '') -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.parse_json('chat.stop_strings', self.stop_strings, list)
    fields.parse_json('chat.template', self.template, dict)
    super().check(name)
    try:
      datetime.date.fromisoformat(self.date or '2026-11-27')
    except ValueError:
      text = f"chat.date is {self.date!r}; give a day such as '2026-11-27', or ''."
      raise ValueError(text) from None


@dataclasses.dataclass
class Limits(fields.Checked):
  """The budgets of one episode.

  Attributes:
    max_turns: The most replies of an episode.
    max_turn_tokens: The most tokens of a reply.
    reset_seconds: The most seconds of the environment's reset, and of make_env.
    step_seconds: The most seconds of each step of the environment, tools and rewards
      included.
    close_seconds: The most seconds of the environment's close.
    episode_seconds: The most seconds of an episode, its time in the engine included. Late
      episodes are masked as errors.
  """

  max_turns: int = fields.at_least_1(5)
  max_turn_tokens: int = fields.at_least_1(1024)
  reset_seconds: float = fields.above_0(60.0)
  step_seconds: float = fields.above_0(300.0)
  close_seconds: float = fields.above_0(10.0)
  episode_seconds: float = fields.above_0(3600.0)


@dataclasses.dataclass
class Sampling(fields.Checked):
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
  top_p: float = fields.above_0_to_1(1.0)
  min_p: float = fields.from_0_to_1(0.0)
  tool_grammar: bool = False

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
class Engine(fields.Checked):
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

  rows: int = fields.chosen_if_0(0)
  slots: int = fields.chosen_if_0(0)
  decode_steps: int = fields.at_least_1(32)
  prefill_rows: int = fields.chosen_if_0(0)
  prefill_tokens: int = fields.chosen_if_0(0)
  bucket: int = fields.chosen_if_0(0)
  width: int = 0
  narrow: bool = True
  drafts: int = 0
  replicas: int = fields.chosen_if_0(0)
  weights: str = fields.one_of('model', 'int8', 'fp8')
  cache: str = fields.one_of('model', 'int8')

  @property
  def rounds_weights(self) -> bool:
    """Whether it samples with other kernels than the learner's."""
    return self.weights != 'model'

  @property
  def rounds(self) -> bool:
    """Whether it samples with other numbers than the learner's."""
    return self.rounds_weights or self.cache != 'model'
