"""Settings of rollouts and updates."""

import dataclasses

from agent_r1_jax import fields

# Fields of which a 0 means that train/plan/sizes.py chooses the value.
SIZES = ('batch.row_tokens', 'batch.microbatch')


@dataclasses.dataclass
class Schedule:
  """The number of episodes and updates, their order, and the policies that sample.

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
    ahead: How many rollouts may be played ahead, while updates are computed. With 1,
      rollout n + 1 is played during update n by the policy before it: one step
      off-policy. Above 0 the algorithm must have a correction.
    partial: Whether the engine gets each new policy during episodes, so that a long one
      delays no update; several policies then sample it. Such a run is not repeatable bit
      for bit. Without it, `ahead` is at most 1.
    max_staleness: The most steps by which a token's policy may be older than the one that
      learns from it; bounds sync_every and ahead.
    critic_warmup: Steps in which only the critic is updated.
    reference_every: Steps after which the reference becomes the current policy; 0 never.
    eval_every: Steps between evaluations, which are also played before the first step and
      after the last one; 0 plays none.
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
      proportion to the variance of the rewards in its last groups, which is 0 for tasks
      that are always or never solved.
    by: Fields of Task.info, separated by commas. Tasks that agree in them share their
      variance; if it is empty, each task has its own.
    uniform_share: With 'variance', the share of tasks that are drawn uniformly.
  """

  weight: str = 'uniform'
  by: str = ''
  uniform_share: float = 0.25

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    choices = {'weight': ('uniform', 'variance')}
    fields.check(self, 'curriculum', above_0_to_1=('uniform_share',), choices=choices)
    if self.by and self.weight == 'uniform':
      raise ValueError("curriculum.by is read with curriculum.weight='variance' only.")


@dataclasses.dataclass
class Batch:
  """Sizes of the micro-batches of gradients; a 0 is chosen (train/plan/sizes.py).

  Attributes:
    row_tokens: Tokens of a packed training row; at least `engine.slots`.
    microbatch: Packed rows of one micro-batch, over all chips: a multiple of data x fsdp.
    trees: Whether tokens with which several texts begin are computed once
      (rl/prefix_trees.py); where attention does not support it, they never are.
    replay: Whether a mixture of experts computes each token with the experts that
      computed it in the sampler.
  """

  row_tokens: int = 0
  microbatch: int = 0
  trees: bool = True
  replay: bool = True

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(
      self, 'batch', chosen_if_0=[name.removeprefix('batch.') for name in SIZES]
    )


@dataclasses.dataclass
class Optimizer:
  """The optimizer of policy and critic.

  Attributes:
    kind: 'adamw', 'adamw8' (moments of 8 bits), 'adafactor', or 'muon' (for kernels of
      layers, and 'adamw' for the rest): rl/optimizers.py.
    learning_rate: Learning rate of the policy, after the warm-up.
    critic_learning_rate: Learning rate of the critic.
    warmup: Optimizer steps of linear warm-up.
    weight_decay: Decoupled weight decay of matrices, as in AdamW.
    decay_all: Whether scales of norms and biases decay too.
    adam_b1: Decay rate of the first moment of Adam in 'adamw', 'adamw8' and 'muon'.
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
  decay_all: bool = False
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
      from_0_below_1=('adam_b1', 'adam_b2'),
      choices={'kind': ('adamw', 'adamw8', 'adafactor', 'muon')},
    )
