"""Settings of learning: rollouts, updates, chips, checkpoints, alarms."""

import dataclasses

from agent_r1_jax import fields


@dataclasses.dataclass
class Schedule(fields.Checked):
  """The number of episodes and updates, their order, and the policies that sample.

  Attributes:
    steps: Number of rollouts, each followed by its updates.
    tasks: Number of tasks per rollout.
    samples: Number of episodes per task: the group size.
    epochs: Passes of the updates over each rollout.
    minibatches: Optimizer steps per epoch.
    max_refills: The most rollouts that a step adds to replace groups whose rewards are
      all equal (DAPO's dynamic sampling).
    sync_every: Steps between two weight syncs to the engine; above 1 the algorithm must
      have a correction.
    ahead: How many rollouts may be played ahead, during updates. With 1, rollout n + 1 is
      played during update n by the policy before it: one step off-policy. Above 0 the
      algorithm must have a correction.
    partial: Whether the engine switches to each new policy in the middle of episodes, so
      that long episodes do not delay updates; several policies may then sample one
      episode, and a run does not repeat bit for bit. Without it, `ahead` is at most 1.
    max_staleness: The most steps by which the policy that sampled a token may be older
      than the policy that learns from it; bounds sync_every and ahead.
    critic_warmup: Steps in which only the critic is updated.
    reference_every: Steps after which the reference becomes the current policy; 0 never.
    eval_every: Steps between evaluations, which are also played before the first step and
      after the last. 0 plays none.
  """

  steps: int = 100
  tasks: int = fields.at_least_1(16)
  samples: int = fields.at_least_1(8)
  epochs: int = fields.at_least_1(1)
  minibatches: int = fields.at_least_1(1)
  max_refills: int = 0
  sync_every: int = fields.at_least_1(1)
  ahead: int = 0
  partial: bool = False
  max_staleness: int = 1_000_000
  critic_warmup: int = 0
  reference_every: int = 0
  eval_every: int = 0

  @property
  def oldest(self) -> int:
    """The most steps by which the sampling policy can be older than the learning one."""
    return self.sync_every - 1 + self.ahead

  def check(self, name: str = '') -> None:
    """Raises ValueError for a wrong value, or for values that contradict each other."""
    super().check(name)
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
class Curriculum(fields.Checked):
  """How tasks are drawn for training; see train/curriculum.py.

  Attributes:
    weight: 'uniform' draws all tasks in shuffled epochs. 'variance' draws a task in
      proportion to the variance of the rewards in its last groups, which is 0 for tasks
      that are always or never solved.
    by: Fields of Task.info, separated by commas. Tasks with equal values share their
      variance; if empty, each task has its own.
    uniform_share: With 'variance', the share of tasks drawn uniformly.
  """

  weight: str = fields.one_of('uniform', 'variance')
  by: str = ''
  uniform_share: float = fields.above_0_to_1(0.25)

  def check(self, name: str = '') -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    super().check(name)
    if self.by and self.weight == 'uniform':
      raise ValueError("curriculum.by is read with curriculum.weight='variance' only.")


@dataclasses.dataclass
class Batch(fields.Checked):
  """Sizes of gradient micro-batches; sizes of 0 are chosen (train/plan/sizes.py).

  Attributes:
    row_tokens: Tokens of a packed training row; at least `engine.slots`.
    microbatch: Packed rows per micro-batch, over all chips: a multiple of data x fsdp.
    trees: Whether shared prefixes are computed once (rl/prefix_trees.py), if attention
      supports it.
    replay: Whether the learner of a mixture of experts routes each token to the same
      experts as the sampler.
  """

  row_tokens: int = fields.chosen_if_0(0)
  microbatch: int = fields.chosen_if_0(0)
  trees: bool = True
  replay: bool = True


@dataclasses.dataclass
class Optimizer(fields.Checked):
  """The optimizer of policy and critic.

  Attributes:
    kind: 'adamw', 'adamw8' (8-bit moments), 'adafactor', or 'muon' (for the layers'
      kernels, with 'adamw' for the rest): rl/optimizers.py.
    learning_rate: Learning rate of the policy, after the warm-up.
    critic_learning_rate: Learning rate of the critic.
    warmup: Optimizer steps of linear warm-up.
    weight_decay: Decoupled weight decay of matrices, as in AdamW.
    decay_all: Whether norm scales and biases decay too.
    adam_b1: Decay rate of Adam's first moment in 'adamw', 'adamw8' and 'muon'.
    adam_b2: Decay rate of the second moment (.999 in PyTorch and verl).
    adam_eps: Added to the root of the second moment.
    clip_norm: The global norm to which the gradients of policy and critic are clipped
      separately; inf does not clip.
    offload: Whether the optimizer's state is kept in host memory between updates.
  """

  kind: str = fields.one_of('adamw', 'adamw8', 'adafactor', 'muon')
  learning_rate: float = 1e-6
  critic_learning_rate: float = 1e-5
  warmup: int = 0
  weight_decay: float = 0.0
  decay_all: bool = False
  adam_b1: float = fields.from_0_below_1(0.9)
  adam_b2: float = fields.from_0_below_1(0.95)
  adam_eps: float = fields.above_0(1e-8)
  clip_norm: float = fields.above_0(1.0)
  offload: bool = False


@dataclasses.dataclass
class Mesh(fields.Checked):
  """How the chips share training and sampling; see models/sharding.py.

  Attributes:
    data: Number of copies of the training state.
    fsdp: Chips over which each copy is sharded; 0 is the number of chips divided by the
      other axes.
    tensor: Chips that share each layer, in training and in sampling.
    context: Chips that share each training row.
    samplers: Chips of each process that only sample, while the others only train; with 0
      every chip does both.
  """

  data: int = fields.at_least_1(1)
  fsdp: int = 0
  tensor: int = fields.at_least_1(1)
  context: int = fields.at_least_1(1)
  samplers: int = 0

  def axes(self, chips: int) -> dict[str, int]:
    """Returns the sizes of the mesh's axes on this number of chips, in order."""
    other_axes = self.data * self.tensor * self.context
    fsdp = self.fsdp or max(1, chips // other_axes)
    axes = {'data': self.data, 'fsdp': fsdp}
    return axes | {'tensor': self.tensor, 'context': self.context}

  def count_groups(self, chips: int) -> int:
    """Returns the number of chip groups that share the rows of a micro-batch."""
    axes = self.axes(chips)
    return axes['data'] * axes['fsdp']


@dataclasses.dataclass
class Checkpoint(fields.Checked):
  """How often the run is saved, so that it can be resumed.

  Attributes:
    every: Steps between checkpoints.
    keep: How many checkpoints to keep.
    keep_rollouts: Whether finished episodes are written to disk and kept until a
      checkpoint covers them, so that a killed run does not play them again.
  """

  every: int = fields.at_least_1(20)
  keep: int = fields.at_least_1(3)
  keep_rollouts: bool = False


@dataclasses.dataclass
class Alarms:
  """Limits of metrics beyond which an alarm is logged.

  Attributes:
    entropy: The lowest mean entropy of the policy, in nats per token.
    kl: The highest mean KL, to the reference and to the sampling policy.
    dead_groups: The highest share of played groups whose rewards are all equal.
    truncated: The highest share of episodes that ran out of tokens or turns.
    invalid_calls: The highest share of tool calls that could not be parsed or run.
    tool_failures: The highest share of tool calls whose tool raised or was late.
    isolated_calls: The highest share of tool calls that are not made because their tool
      keeps failing (agent/breaker.py).
    action_share: The lowest share of a trajectory's tokens that the policy sampled.
    reward_fall: The largest fall of the mean reward of two steps below the best five
      consecutive steps before them, relative to the latter.
    hacking: The largest rise of the reward over the last `window` steps while
      `true_metric` does not rise: the mean of the later half minus the mean of the
      earlier half, in standard errors.
    true_metric: The name in metrics.jsonl of the metric that the reward should improve.
    window: The number of steps over which a rise is measured; at least 4.
  """

  entropy: float = 0.01
  kl: float = 1.0
  dead_groups: float = 0.9
  truncated: float = 0.3
  invalid_calls: float = 0.5
  tool_failures: float = 0.5
  isolated_calls: float = 0.0
  action_share: float = 0.02
  reward_fall: float = 0.4
  hacking: float = 2.0
  true_metric: str = 'rollout/em'
  window: int = 20

  def check(self, name: str = 'alarms') -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    if self.window < 4:
      raise ValueError(f'{name}.window is {self.window}; it must be at least 4.')
