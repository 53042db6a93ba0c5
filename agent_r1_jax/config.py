"""The configuration of a training run; absl flags and config.json are made of it.

Each part of the house has a dataclass of its own here, which checks itself, and a
function is given no more of them than it reads. `Config` nests them: the field `rows` of
`engine` is the flag --config.engine.rows.
"""

from collections.abc import Collection, Mapping
import dataclasses
from typing import Any, Self

from agent_r1_jax import fields

# The fields for which 0 is "chosen": train/sizes.py.
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


@dataclasses.dataclass
class Model:
  """What is loaded, and how it computes.

  Attributes:
    path: Directory of the policy to start from: weights and tokenizer in HF layout.
    reference: Directory of the reference policy or teacher, of the same tokenizer; empty
      is the policy as it started.
    dtype: Type of activations and cache: 'float32' or 'bfloat16'.
    remat: Activations recomputed in the backward pass: 'none', 'dots' or 'full'.
    lora_rank: Rank of the adapters that are trained in place of all parameters; 0 is
      without.
    lora_targets: Projections that get one, with commas between them.
    lora_alpha: Adapters count lora_alpha / lora_rank times.
  """

  path: str = ''
  reference: str = ''
  dtype: str = 'float32'
  remat: str = 'none'
  lora_rank: int = 0
  lora_targets: str = 'q,k,v,o,gate,up,down'
  lora_alpha: float = 16.0

  def check(self) -> None:
    """Raises ValueError for a field that cannot be."""
    choices = {'dtype': ('float32', 'bfloat16'), 'remat': ('none', 'dots', 'full')}
    fields.check(self, 'model', above_0=('lora_alpha',), choices=choices)


@dataclasses.dataclass
class Chat:
  """How tasks and tools become the text that the policy reads.

  Attributes:
    max_tool_tokens: Tokens of a tool's message; what is longer is cut.
    tools_in_prompt: Who tells the model of its tools: 'default' is its chat template, or
      where that knows none, a text in the system message (chat.TOOLS); 'refuse' refuses
      such a template; 'own' leaves it to the tasks' own messages.
    long_prompts: What happens to tasks whose prompt leaves no room for a reply in a row:
      'refuse' ends the run before it begins; 'skip' leaves them out of training, and in
      evaluations they stay, unanswered.
    stop_strings: Strings that end a reply, beside the template's end of turn, as a JSON
      list: '["Observation:"]'.
    template: Options of the chat template, as a JSON object:
      '{"enable_thinking": false}'.
  """

  max_tool_tokens: int = 1024
  tools_in_prompt: str = 'default'
  long_prompts: str = 'refuse'
  stop_strings: str = '[]'
  template: str = '{}'

  def check(self) -> None:
    """Raises ValueError for a field that cannot be."""
    fields.parse_json('chat.stop_strings', self.stop_strings, list)
    fields.parse_json('chat.template', self.template, dict)
    choices = {
      'tools_in_prompt': ('default', 'refuse', 'own'),
      'long_prompts': ('refuse', 'skip'),
    }
    fields.check(self, 'chat', at_least_1=('max_tool_tokens',), choices=choices)


@dataclasses.dataclass
class Limits:
  """What one episode may use.

  Attributes:
    max_turns: Replies of an episode.
    max_turn_tokens: Tokens of a reply.
    reset_seconds: Seconds that the environment's reset may take, and before it make_env.
    step_seconds: Seconds that each step of the environment may take, tools and rewards
      included.
    episode_seconds: Seconds from when the episode gets its row to its end. Its time in
      the engine counts, where it shares the device with others. What is late is masked
      as an error.
  """

  max_turns: int = 5
  max_turn_tokens: int = 1024
  reset_seconds: float = 60.0
  step_seconds: float = 300.0
  episode_seconds: float = 3600.0

  def check(self) -> None:
    """Raises ValueError for a field that cannot be."""
    fields.check(
      self,
      'limits',
      at_least_1=('max_turns', 'max_turn_tokens'),
      above_0=('reset_seconds', 'step_seconds', 'episode_seconds'),
    )


@dataclasses.dataclass
class Sampling:
  """How the tokens of replies are chosen, in training or in evaluations.

  A policy is trained on samples of its own distribution: a training run that truncates it
  or holds it to a grammar needs an algorithm with a correction.

  Attributes:
    temperature: Divides the logits; 0 is greedy. In training it also divides those of the
      log-probs that are trained, and must be above 0.
    top_k: Only the k likeliest tokens may be chosen; 0 allows all.
    top_p: Only the smallest set of likeliest tokens that has at least this probability
      may be chosen; 1 allows all.
    min_p: Only tokens may be chosen that are at least this many times as probable as the
      likeliest one; 0 allows all.
    tool_grammar: Whether tool calls are held to the schemas of the environment's tools,
      so that none is malformed.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  tool_grammar: bool = False

  def check(self, part: str = 'sampling') -> None:
    """Raises ValueError for a field that cannot be; `part` is where it lies."""
    fields.check(self, part, share=('top_p',), at_most_1=('min_p',))

  @property
  def on_policy(self) -> bool:
    """Whether the tokens follow the distribution whose log-probs are trained."""
    free = self.top_k == 0 and self.top_p == 1 and self.min_p == 0
    return free and not self.tool_grammar


@dataclasses.dataclass
class Engine:
  """Sizes of the engine's programs; of some of them 0 is chosen (SIZES).

  Attributes:
    rows: Episodes at a time, on each chip (or `mesh.tensor` of them).
    slots: Tokens of a row, at most: prompt, replies and tools together.
    decode_steps: Tokens a decode segment.
    feed_rows: Rows a feed.
    feed_tokens: Tokens of a row a feed.
    bucket: Least slots that a cache read covers; it doubles up to slots.
    width: Most rows that are decoded at a time; 0 is all. With slow tools, half of rows.
    narrow: Whether few rows run in programs for a quarter of rows. A run repeats to the
      last bit only without it and with bucket = slots: environments and tools take their
      time.
    replicas: Engines that share each chip and its rows; as many as cores is best on a
      CPU.
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
    """Raises ValueError for a field that cannot be."""
    chosen = [name.removeprefix('engine.') for name in SIZES if 'engine.' in name]
    fields.check(self, 'engine', at_least_1=('decode_steps',), chosen=chosen)


@dataclasses.dataclass
class Schedule:
  """How much is played and learned, in which order, and by which policy.

  Attributes:
    steps: Rollouts, each followed by its updates.
    tasks: Tasks of one rollout.
    samples: Episodes of a task: the group.
    epochs: Times that the updates go over each rollout.
    minibatches: Optimizer steps an epoch.
    max_refills: Rollouts that a step may add to take the place of groups whose rewards
      are all equal (DAPO's dynamic sampling).
    sync_every: Steps between two hand-overs of the policy to the engine; above 1 the
      algorithm must have a correction.
    ahead: Rollouts that may be played before their turn, while updates are computed.
      With 1, rollout n + 1 is played during update n by the policy before it: one step
      off-policy. Above 0 the algorithm must have a correction.
    partial: Whether the engine takes over each new policy in the midst of episodes, so
      that a long one holds nobody up; it is then of several policies. Such a run does not
      repeat to the last bit. Without it, `ahead` is at most 1.
    max_staleness: Steps by which a token's policy may be older than the one that learns
      from it; bounds sync_every and ahead.
    critic_warmup: Steps in which the critic alone is updated.
    reference_every: Steps after which the reference becomes the present policy; 0 never.
    eval_every: Rollouts between evaluations; 0 evaluates at the end only.
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
    """The most steps by which a policy may be older than the one that learns from it."""
    return self.sync_every - 1 + self.ahead

  def check(self) -> None:
    """Raises ValueError for a field that cannot be, or two that do not go together."""
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
class Batch:
  """Sizes of what a gradient is computed of; 0 is chosen (SIZES).

  Attributes:
    row_tokens: Tokens of a packed training row; at least `engine.slots`.
    microbatch: Packed rows of one gradient, over all chips: a multiple of data x fsdp.
  """

  row_tokens: int = 0
  microbatch: int = 0

  def check(self) -> None:
    """Raises ValueError for a field that cannot be."""
    fields.check(self, 'batch', chosen=('row_tokens', 'microbatch'))


@dataclasses.dataclass
class Optimizer:
  """The optimizer of policy and critic.

  Attributes:
    kind: 'adamw', 'adamw8' (moments of 8 bits) or 'adafactor': rl/optimizers.py.
    learning_rate: Of the policy, after the warm-up.
    critic_learning_rate: Of the critic.
    warmup: Optimizer steps of linear warm-up.
    weight_decay: Decoupled, as AdamW's.
    adam_b1: Decay of Adam's first moment, of 'adamw' and 'adamw8'.
    adam_b2: Of its second. The default forgets sooner than the .999 of PyTorch and verl.
    adam_eps: Added to the root of the second moment.
    clip_norm: The most that the gradient of policy and critic each may have as its norm,
      over all leaves; inf is without.
    offload: Keep the optimizer's state in the host's memory between updates.
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
    """Raises ValueError for a field that cannot be."""
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
    data: Chips, or groups of them, that hold the training state each.
    fsdp: Chips that it is split over; 0 is all that the other axes leave.
    tensor: Chips that share each layer, in training and in sampling.
    context: Chips that share each training row.
    samplers: Chips of each process that only sample, while the others only train; 0: all
      do both in turn.
  """

  data: int = 1
  fsdp: int = 0
  tensor: int = 1
  context: int = 1
  samplers: int = 0

  def check(self) -> None:
    """Raises ValueError for a field that cannot be."""
    fields.check(self, 'mesh', at_least_1=('data', 'tensor', 'context'))


@dataclasses.dataclass
class Checkpoint:
  """What a run keeps on disk to go on from.

  Attributes:
    every: Rollouts between checkpoints.
    keep: Checkpoints kept.
    keep_rollouts: Whether finished episodes are on disk until a checkpoint has learned
      from them: after a kill they are not played again.
  """

  every: int = 20
  keep: int = 3
  keep_rollouts: bool = False

  def check(self) -> None:
    """Raises ValueError for a field that cannot be."""
    fields.check(self, 'checkpoint', at_least_1=('every', 'keep'))


@dataclasses.dataclass
class Alarms:
  """Numbers beyond which an alarm is logged.

  Attributes:
    entropy: The least mean entropy of the policy, in nats a token.
    kl: The greatest mean KL, to the reference and of the update to its rollout.
    dead_groups: The greatest share of groups whose rewards are all equal, of those that
      were played.
    truncated: The greatest share of episodes that a budget ended.
    invalid_calls: The greatest share of calls that could not be read or run.
    action_share: The least share of a trajectory's tokens that the policy chose.
  """

  entropy: float = 0.01
  kl: float = 1.0
  dead_groups: float = 0.9
  truncated: float = 0.3
  invalid_calls: float = 0.5
  action_share: float = 0.02


def _default(kind: Any) -> Any:
  return dataclasses.field(default_factory=kind)


@dataclasses.dataclass
class Config:
  """Everything of a run that is a number or a name; the paper's values where it has them.

  Attributes:
    model: What is loaded, and how it computes.
    chat: How tasks and tools become text.
    limits: What one episode may use.
    sampling: How the tokens of training rollouts are chosen.
    evaluation: How those of evaluations are; greedy unless said otherwise.
    engine: Sizes of the engine.
    schedule: How much is played and learned, and in which order.
    batch: Sizes of what a gradient is computed of.
    optimizer: The optimizer of policy and critic.
    mesh: Over which chips the work is split.
    checkpoint: What is kept on disk to go on from.
    alarms: Numbers beyond which an alarm is logged.
    seed: Seed of the order of tasks and of all sampling.
    max_error_rate: Share of episodes of a rollout whose environment may raise or be late.
    log_episodes: Episodes of each rollout that are written to trajectories/, with the
      numbers of their tokens; 0 writes none.
  """

  model: Model = _default(Model)
  chat: Chat = _default(Chat)
  limits: Limits = _default(Limits)
  sampling: Sampling = _default(Sampling)
  evaluation: Sampling = _default(lambda: Sampling(temperature=0.0))
  engine: Engine = _default(Engine)
  schedule: Schedule = _default(Schedule)
  batch: Batch = _default(Batch)
  optimizer: Optimizer = _default(Optimizer)
  mesh: Mesh = _default(Mesh)
  checkpoint: Checkpoint = _default(Checkpoint)
  alarms: Alarms = _default(Alarms)
  seed: int = 0
  max_error_rate: float = 0.1
  log_episodes: int = 8

  def __new__(cls, **given: Any) -> Self:
    """Refuses the flat fields of earlier versions, which nest now."""
    cls.refuse_old_names(
      [name for name, value in given.items() if not dataclasses.is_dataclass(value)]
    )
    return super().__new__(cls)

  @classmethod
  def refuse_old_names(cls, given: Collection[str]) -> None:
    """Refuses names that fields had when all of them lay side by side.

    Args:
      given: Names of fields whose values are numbers or texts, not dataclasses.

    Raises:
      ValueError: Says what they are called now.
    """
    new = {name: new_name(name) for name in given}
    moved = [
      f'{old} is now {name}' for old, name in new.items() if name not in (None, old)
    ]
    if moved:
      raise ValueError(', '.join(moved) + '.')

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


# Fields of earlier versions that did not only move into a dataclass of their own.
_RENAMED = {
  'model': 'model.path',
  'optimizer': 'optimizer.kind',
  'checkpoint_every': 'checkpoint.every',
}


def new_name(old: str) -> str | None:
  """The dotted name of a field of an earlier version; None if there was none."""
  return _RENAMED.get(old) or fields.locate(Config, old)


def refuse_old_file(found: Mapping[str, Any], path: Any) -> None:
  """Refuses a config.json of a version whose fields lay side by side.

  Raises:
    ValueError: Names the file, and what the fields are called now.
  """
  flat = [name for name, value in found.items() if not isinstance(value, Mapping)]
  try:
    Config.refuse_old_names(flat)
  except ValueError as error:
    raise ValueError(
      f'{path} is of an earlier version: {error} Give another workdir.'
    ) from None
