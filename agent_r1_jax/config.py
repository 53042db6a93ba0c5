"""The configuration of a training run: dataclasses that are absl flags and config.json.

Each part of a run has a dataclass, which checks itself, and a function takes no more of
them than it reads. `Config` nests them: the field `rows` of `engine` is the flag
--config.engine.rows.
"""

import dataclasses
from typing import Any

from agent_r1_jax import fields

# Fields whose value is chosen where they are 0; see train/sizes.py.
SIZES = (
  'engine.rows',
  'engine.slots',
  'batch.row_tokens',
  'batch.microbatch',
  'engine.feed_rows',
  'engine.feed_tokens',
  'engine.bucket',
  'engine.replicas',
)

# Those of agent/call_formats.py, and 'auto'.
TOOL_FORMATS = (
  'auto',
  'hermes',
  'qwen3_coder',
  'llama3',
  'search_r1',
  'retool',
  'react',
)


@dataclasses.dataclass
class Model:
  """The models that are loaded, and how they compute.

  Attributes:
    path: Directory of the policy to start from: weights and tokenizer in HF layout.
    reference: Directory of the reference policy or teacher, which must have the same
      tokenizer; empty takes the policy as it started.
    dtype: Type of activations and KV cache: 'float32' or 'bfloat16'.
    remat: Activations recomputed in the backward pass: 'none', 'dots' or 'full'.
    lora_rank: Rank of the LoRA adapters that are trained in place of all parameters; 0
      trains all.
    lora_targets: The projections with adapters, separated by commas.
    lora_alpha: Adapters are scaled by lora_alpha / lora_rank.
  """

  path: str = ''
  reference: str = ''
  dtype: str = 'float32'
  remat: str = 'none'
  lora_rank: int = 0
  lora_targets: str = 'q,k,v,o,gate,up,down'
  lora_alpha: float = 16.0

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    choices = {'dtype': ('float32', 'bfloat16'), 'remat': ('none', 'dots', 'full')}
    fields.check(self, 'model', above_0=('lora_alpha',), choices=choices)


@dataclasses.dataclass
class Chat:
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
  """

  max_tool_tokens: int = 1024
  tools_in_prompt: str = 'default'
  tool_format: str = 'auto'
  long_prompts: str = 'refuse'
  stop_strings: str = '[]'
  template: str = '{}'

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.parse_json('chat.stop_strings', self.stop_strings, list)
    fields.parse_json('chat.template', self.template, dict)
    choices = {
      'tools_in_prompt': ('default', 'refuse', 'own'),
      'tool_format': TOOL_FORMATS,
      'long_prompts': ('refuse', 'skip'),
    }
    fields.check(self, 'chat', at_least_1=('max_tool_tokens',), choices=choices)


@dataclasses.dataclass
class Limits:
  """What one episode may use.

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

  max_turns: int = 5
  max_turn_tokens: int = 1024
  reset_seconds: float = 60.0
  step_seconds: float = 300.0
  close_seconds: float = 10.0
  episode_seconds: float = 3600.0

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(
      self,
      'limits',
      at_least_1=('max_turns', 'max_turn_tokens'),
      above_0=('reset_seconds', 'step_seconds', 'close_seconds', 'episode_seconds'),
    )


@dataclasses.dataclass
class Sampling:
  """How the tokens of replies are chosen, in training or in evaluations.

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
      environment's tools, so that none is malformed; only for the format 'hermes'.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  tool_grammar: bool = False

  def check(self, part: str = 'sampling') -> None:
    """Raises ValueError for a wrong value; `part` is the name of this part."""
    fields.check(self, part, share=('top_p',), at_most_1=('min_p',))

  @property
  def on_policy(self) -> bool:
    """Whether the tokens follow the distribution whose log-probs are trained."""
    return dataclasses.replace(self, temperature=1.0) == Sampling()


@dataclasses.dataclass
class Engine:
  """Sizes of the engine's programs; those in SIZES are chosen where they are 0.

  Attributes:
    rows: Rows of the KV cache, so episodes at a time, on each chip (or `mesh.tensor`).
    slots: The most tokens of a row: prompt, replies and tool messages together.
    decode_steps: Tokens sampled by one decode.
    feed_rows: Rows of one prefill.
    feed_tokens: Tokens of each row in one prefill.
    bucket: The least slots that a cache read covers; reads double from there to slots.
    width: The most rows that are decoded at a time; 0 is all. With slow tools, take half
      of rows.
    narrow: Whether few rows run in programs for a quarter of rows. A run is repeatable to
      the last bit only without it and with bucket = slots, as the timing of tools varies.
    replicas: Engines that share each chip and its rows; on a CPU, at most one per core.
  """

  rows: int = 0
  slots: int = 0
  decode_steps: int = 32
  feed_rows: int = 0
  feed_tokens: int = 0
  bucket: int = 0
  width: int = 0
  narrow: bool = True
  replicas: int = 0

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    chosen = [name.removeprefix('engine.') for name in SIZES if 'engine.' in name]
    fields.check(self, 'engine', at_least_1=('decode_steps',), chosen=chosen)


@dataclasses.dataclass
class Schedule:
  """How many episodes are played and learned from, in which order, and by which policy.

  Attributes:
    steps: Number of rollouts, each followed by its updates.
    tasks: Tasks of one rollout.
    samples: Episodes of each task: the group size.
    epochs: Passes of the updates over each rollout.
    minibatches: Optimizer steps of an epoch.
    max_refills: The most rollouts that a step adds in place of groups whose rewards are
      all equal (DAPO's dynamic sampling).
    sync_every: Steps between two weight syncs to the engine; above 1 the algorithm must
      have a correction.
    ahead: How many rollouts may be played before their turn, while updates are computed.
      With 1, rollout n + 1 is played during update n by the policy before it: one step
      off-policy. Above 0 the algorithm must have a correction.
    partial: Whether the engine gets each new policy during episodes, so that a long one
      delays no update; several policies then sample it. Such a run is not repeatable to
      the last bit. Without it, `ahead` is at most 1.
    max_staleness: The most steps by which a token's policy may be older than the one that
      learns from it; bounds sync_every and ahead.
    critic_warmup: Steps in which only the critic is updated.
    reference_every: Steps after which the reference becomes the present policy; 0 never.
    eval_every: Steps between evaluations; 0 evaluates at the end only.
  """

  steps: int = 100
  tasks: int = 16
  samples: int = 8
  epochs: int = 1
  minibatches: int = 1
  max_refills: int = 0
  sync_every: int = 1
  ahead: int = 0
  partial: bool = False
  max_staleness: int = 1_000_000
  critic_warmup: int = 0
  reference_every: int = 0
  eval_every: int = 0

  @property
  def oldest(self) -> int:
    """The most steps by which a policy can be older than the one that learns from it."""
    return self.sync_every - 1 + self.ahead

  def check(self) -> None:
    """Raises ValueError for a wrong value, or two that contradict each other."""
    least = ('tasks', 'samples', 'epochs', 'minibatches', 'sync_every')
    fields.check(self, 'schedule', at_least_1=least)
    if self.max_staleness < self.oldest:
      raise ValueError(
        f'schedule.max_staleness is {self.max_staleness}, but with sync_every='
        f'{self.sync_every} and ahead={self.ahead} policies get {self.oldest} steps old.'
      )
    if self.ahead > 1 and not self.partial:
      raise ValueError(
        f'schedule.ahead is {self.ahead}; it must be 0 or 1, or above 1 with '
        'partial=True.'
      )
    if self.partial and not self.ahead:
      raise ValueError(
        'schedule.partial: no episode is played during an update; make ahead 1.'
      )


@dataclasses.dataclass
class Curriculum:
  """Which tasks are drawn for training; see train/curriculum.py.

  Attributes:
    weight: 'uniform' draws all tasks in shuffled epochs. 'variance' draws a task in
      proportion to the variance of the rewards in its last groups, so that tasks that are
      always or never solved rest.
    by: Fields of Task.info, separated by commas. Tasks that agree in them share their
      variance; where it is empty, each task has its own.
    uniform_share: With 'variance', the share of tasks that are drawn uniformly.
  """

  weight: str = 'uniform'
  by: str = ''
  uniform_share: float = 0.25

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    choices = {'weight': ('uniform', 'variance')}
    fields.check(self, 'curriculum', share=('uniform_share',), choices=choices)
    if self.by and self.weight == 'uniform':
      raise ValueError("curriculum.by is read with curriculum.weight='variance' only.")


@dataclasses.dataclass
class Batch:
  """Sizes of the batches that gradients are computed of; chosen where they are 0.

  Attributes:
    row_tokens: Tokens of a packed training row; at least `engine.slots`.
    microbatch: Packed rows of one micro-batch, over all chips: a multiple of data x fsdp.
  """

  row_tokens: int = 0
  microbatch: int = 0

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(self, 'batch', chosen=('row_tokens', 'microbatch'))


@dataclasses.dataclass
class Optimizer:
  """The optimizer of policy and critic.

  Attributes:
    kind: 'adamw', 'adamw8' (moments of 8 bits) or 'adafactor': rl/optimizers.py.
    learning_rate: Learning rate of the policy, after the warm-up.
    critic_learning_rate: Learning rate of the critic.
    warmup: Optimizer steps of linear warm-up.
    weight_decay: Decoupled weight decay, as in AdamW.
    adam_b1: Decay rate of the first moment of 'adamw' and 'adamw8'.
    adam_b2: Decay rate of the second moment; PyTorch and verl have .999.
    adam_eps: Added to the root of the second moment.
    clip_norm: The global norm that gradients are clipped to, of policy and critic each;
      inf does not clip.
    offload: Whether the optimizer's state is in the host's memory between updates.
  """

  kind: str = 'adamw'
  learning_rate: float = 1e-6
  critic_learning_rate: float = 1e-5
  warmup: int = 0
  weight_decay: float = 0.0
  adam_b1: float = 0.9
  adam_b2: float = 0.95
  adam_eps: float = 1e-8
  clip_norm: float = 1.0
  offload: bool = False

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(
      self,
      'optimizer',
      above_0=('clip_norm', 'adam_eps'),
      below_1=('adam_b1', 'adam_b2'),
      choices={'kind': ('adamw', 'adamw8', 'adafactor')},
    )


@dataclasses.dataclass
class Mesh:
  """Over which chips training and sampling are split; see host/sharding.py.

  Attributes:
    data: How many copies of the training state there are.
    fsdp: Chips that each copy is split over; 0 is all that the other axes leave.
    tensor: Chips that share each layer, in training and in sampling.
    context: Chips that share each training row.
    samplers: Chips of each process that only sample, while the others only train; with 0
      all do both in turn.
  """

  data: int = 1
  fsdp: int = 0
  tensor: int = 1
  context: int = 1
  samplers: int = 0

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(self, 'mesh', at_least_1=('data', 'tensor', 'context'))


@dataclasses.dataclass
class Checkpoint:
  """What a run writes to disk to be resumed from.

  Attributes:
    every: Steps between checkpoints.
    keep: How many checkpoints are kept.
    keep_rollouts: Whether finished episodes are written, until a checkpoint has learned
      from them: after a kill they are not played again.
  """

  every: int = 20
  keep: int = 3
  keep_rollouts: bool = False

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(self, 'checkpoint', at_least_1=('every', 'keep'))


@dataclasses.dataclass
class Alarms:
  """Limits of metrics beyond which an alarm is logged.

  Attributes:
    entropy: The least mean entropy of the policy, in nats per token.
    kl: The greatest mean KL, to the reference and to the policy that sampled.
    dead_groups: The greatest share of played groups whose rewards are all equal.
    truncated: The greatest share of episodes that ran out of tokens or turns.
    invalid_calls: The greatest share of tool calls that could not be parsed or run.
    isolated_calls: The greatest share of tool calls that are not made because their tool
      keeps failing (agent.tool.Isolation).
    action_share: The least share of a trajectory's tokens that the policy sampled.
    hacking: The greatest rise of the reward over the last `window` steps while
      `true_metric` does not rise, in standard errors: the mean of the later half less
      that of the earlier one.
    true_metric: What the reward stands for, as metrics.jsonl calls it.
    window: Number of steps that a rise is measured over; at least 4.
  """

  entropy: float = 0.01
  kl: float = 1.0
  dead_groups: float = 0.9
  truncated: float = 0.3
  invalid_calls: float = 0.5
  isolated_calls: float = 0.0
  action_share: float = 0.02
  hacking: float = 2.0
  true_metric: str = 'rollout/em'
  window: int = 20

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    if self.window < 4:
      raise ValueError(f'alarms.window is {self.window}; it must be at least 4.')


def _default(kind: Any) -> Any:
  return dataclasses.field(default_factory=kind)


@dataclasses.dataclass
class Config:
  """All numbers and names of a run; the defaults are the paper's where it has them.

  Attributes:
    model: The models that are loaded, and how they compute.
    chat: How tasks and tools become text.
    limits: What one episode may use.
    sampling: How the tokens of training rollouts are chosen.
    evaluation: How the tokens of evaluations are chosen; greedy by default.
    engine: Sizes of the engine's programs.
    schedule: How much is played and learned from, and in which order.
    curriculum: Which tasks are drawn for training.
    batch: Sizes of the batches that gradients are computed of.
    optimizer: The optimizer of policy and critic.
    mesh: Over which chips the work is split.
    checkpoint: What is written to disk to be resumed from.
    alarms: Limits of metrics beyond which an alarm is logged.
    seed: Seed of the order of tasks and of all sampling.
    max_error_rate: The share of a rollout's episodes whose environment may raise or be
      late before the run ends.
    log_episodes: How many episodes of each rollout are written to trajectories/, and how
      many of these and of each evaluation set with the numbers of their tokens.
  """

  model: Model = _default(Model)
  chat: Chat = _default(Chat)
  limits: Limits = _default(Limits)
  sampling: Sampling = _default(Sampling)
  evaluation: Sampling = _default(lambda: Sampling(temperature=0.0))
  engine: Engine = _default(Engine)
  schedule: Schedule = _default(Schedule)
  curriculum: Curriculum = _default(Curriculum)
  batch: Batch = _default(Batch)
  optimizer: Optimizer = _default(Optimizer)
  mesh: Mesh = _default(Mesh)
  checkpoint: Checkpoint = _default(Checkpoint)
  alarms: Alarms = _default(Alarms)
  seed: int = 0
  max_error_rate: float = 0.1
  log_episodes: int = 8

  def check(self) -> None:
    """Refuses a value of a wrong type or out of its range.

    Raises:
      ValueError: Names the field, the value and what it may be.
    """
    fields.check(self, at_most_1=('max_error_rate',))
    for field in dataclasses.fields(self):
      room = getattr(self, field.name)
      if isinstance(room, Sampling):
        room.check(field.name)
      elif hasattr(room, 'check'):
        room.check()
