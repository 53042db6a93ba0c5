"""Settings of models, chat, episodes, sampling and the engine."""

from collections.abc import Sequence
import dataclasses
import datetime
from typing import Any

from agent_r1_jax import fields

# The formats of agent/call_formats.py, and 'auto'.
TOOL_FORMATS = (
  'auto',
  'hermes',
  'qwen3_coder',
  'mistral',
  'llama3',
  'search_r1',
  'retool',
  'react',
  'harmony',
  'gemma4',
)


class _Formats:
  """Attributes of a model configuration that are not fields.

  Attributes:
    formats: Formats besides HF's (models/files/tensor_files.Format), such as
      contrib.gguf.FORMAT. Python objects, so neither flags nor in config.json.
  """

  formats: Sequence[Any] = ()


@dataclasses.dataclass
class Model(_Formats, fields.Checked):
  """The models to load, and how they compute.

  Attributes:
    path: Directory of the policy to start from: weights and tokenizer in HF layout. Or
      a file that one of `formats` reads, with the tokenizer's files next to it.
    reference: Directory of the reference policy or teacher, which must have the same
      tokenizer; if it is empty, the reference is the initial policy.
    dtype: Dtype of activations and KV cache: 'float32' or 'bfloat16'.
    batch_invariant: Whether the sampler's and the learner's log-probs are equal bit for
      bit, whatever the rest of the batch (prefill chunks, shared prefixes, packing): the
      importance ratio of the first update is exactly 1. On one CPU only; docs/models.md
      has its price.
    remat: Activations recomputed in the backward pass (gradient checkpointing): 'none',
      'dots' or 'full'. If empty, 'none', or 'full' if that does not fit in memory.
    lora_rank: Rank of LoRA adapters, which train instead of all parameters; 0 trains
      all.
    lora_targets: The projections with adapters, separated by commas.
    lora_alpha: Adapters are scaled by lora_alpha / lora_rank.
    frozen: Number format of the frozen kernels under adapters: 'float32'; or 'int8' or
      'fp8' with a scale for each output channel, in learner and sampler alike (QLoRA);
      or 'mxfp4', which keeps experts of gpt-oss in the 4 bits of their files, also
      without training. Embeddings and the head are then stored in `dtype`.
  """

  path: str = ''
  reference: str = ''
  dtype: str = fields.one_of('float32', 'bfloat16')
  batch_invariant: bool = False
  remat: str = fields.one_of('none', 'dots', 'full', default='')
  lora_rank: int = 0
  lora_targets: str = 'q,k,v,o,gate,up,down'
  lora_alpha: float = fields.above_0(16.0)
  frozen: str = fields.one_of('float32', 'int8', 'fp8', 'mxfp4')

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
    max_tool_tokens: The most tokens of a tool's message; longer messages are truncated.
    tools_in_prompt: Where tools are described to the model: 'default' in the chat
      template, or in the system message if the template cannot; 'refuse' refuses such a
      template; 'own' in the tasks' own messages.
    tool_format: How the model writes tool calls: 'auto' detects it from the chat
      template, with 'hermes' as the fallback. docs/tools.md lists the others.
    long_prompts: What happens to tasks whose prompt leaves no room for a reply: 'refuse'
      ends the run before it begins; 'skip' leaves them out of training, and evaluations
      count them as unanswered.
    stop_strings: Strings that end a reply, like the template's end of turn, as a JSON
      list: '["Observation:"]'.
    template: Options of the chat template, as a JSON object:
      '{"enable_thinking": false}'.
    date: The date that templates show, such as '2026-11-27'; '' is the day on which the
      run started, also after it resumes.
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
    episode_seconds: The most seconds of an episode, including its time in the engine.
      Late episodes are masked as errors.
  """

  max_turns: int = fields.at_least_1(5)
  max_turn_tokens: int = fields.at_least_1(1024)
  reset_seconds: float = fields.above_0(60.0)
  step_seconds: float = fields.above_0(300.0)
  close_seconds: float = fields.above_0(10.0)
  episode_seconds: float = fields.above_0(3600.0)


@dataclasses.dataclass
class Sampling(fields.Checked):
  """How the tokens of replies are sampled: in training, in evaluations, or per request.

  Training expects samples of the policy's own distribution: a run that truncates it, or
  restricts it with a grammar, needs an algorithm with a correction.

  Attributes:
    temperature: Divides the logits; 0 is greedy. In training it must be above 0, and
      applies to the trained log-probs too.
    top_k: Samples only from the k likeliest tokens; 0 allows all.
    top_p: Samples only from the smallest set of likeliest tokens with at least this
      probability; 1 allows all.
    min_p: Samples only from tokens with at least this fraction of the likeliest token's
      probability; 0 allows all.
    tool_grammar: Whether a grammar (the environment's `call_grammar`, for the format
      'hermes') constrains tool calls to their schemas, so that none is malformed.
      Requests to the engine do not read it; their grammars are among `automata`.
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
    """Whether tokens are sampled from the distribution whose log-probs are trained."""
    return not (self.truncated or self.tool_grammar)


GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass
class Engine(fields.Checked):
  """Sizes and number formats of the engine; the run chooses sizes that are 0.

  Attributes:
    rows: Rows of the KV cache per chip (or per `mesh.tensor` chips): how many sequences
      are sampled at a time.
    slots: The most tokens of a row: prompt, replies and tool messages together.
    decode_steps: Calls of the policy in one decode; each samples a token, or several with
      drafts.
    prefill_rows: Rows of one prefill.
    prefill_tokens: Tokens per row in one prefill.
    bucket: The fewest slots that a cache read covers; reads double from there to slots.
    width: The most rows that are decoded at a time; 0 is all. With slow tools, half of
      rows is a good choice.
    narrow: Whether a program for a quarter of the rows decodes the last episodes. A run
      repeats bit for bit only without it and with bucket = slots, because the timing of
      tools varies.
    drafts: How many tokens are drafted for each call of the policy, from earlier text;
      sampling keeps the drafts that it would choose anyway. 0 drafts none.
    replicas: Replicas that share each chip and its rows; on a CPU, at most one per core.
    weights: Number format of the kernels in the engine's copy of the policy: 'model' is
      model.dtype; 'unpacked' is that too where model.frozen is 'mxfp4', which 'model'
      keeps: the same numbers, in more memory and half the time of a decode. 'int8' and
      'fp8' have a scale for each output channel; the learner does not round, so an
      algorithm without a correction then gets losses.token_truncated().
    cache: Number format of the KV cache: 'model' is model.dtype; 'int8' has a scale for
      each slot of each head. An algorithm without a correction gets one, as above.
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
  weights: str = fields.one_of('model', 'unpacked', 'int8', 'fp8')
  cache: str = fields.one_of('model', 'int8')

  @property
  def rounds_weights(self) -> bool:
    """Whether the sampler's kernels differ from the learner's."""
    return self.weights in ('int8', 'fp8')

  @property
  def rounds(self) -> bool:
    """Whether the sampler's kernels or cache are rounded."""
    return self.rounds_weights or self.cache != 'model'
