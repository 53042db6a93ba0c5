"""The configuration of a training run; absl flags and config.json are made of it."""

import dataclasses
import difflib
import math
import re
import sys
from typing import Any

from agent_r1_jax import alarms as alarms_lib
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.rl import algorithms, optimizers, probe

# The fields for which 0 is "chosen": sizes.py.
SIZES = (
  'rows',
  'slots',
  'row_tokens',
  'microbatch',
  'feed_rows',
  'feed_tokens',
  'bucket',
  'replicas',
)


@dataclasses.dataclass
class Config:
  """Everything of a run that is a number or a name; the paper's values where it has them.

  Attributes:
    model: Directory of the policy to start from: weights and tokenizer in HF layout.
    reference: Directory of the reference policy or teacher, of the same tokenizer; empty
      is the policy as it started.
    reference_every: Steps after which the reference becomes the present policy; 0 never.
    dtype: Of activations and cache: 'float32' or 'bfloat16'.
    remat: Activations recomputed in the backward pass: 'none', 'dots' or 'full'.
    lora_rank: Of the adapters that are trained in place of all parameters; 0 is without.
    lora_targets: Projections that get one, with commas between them.
    lora_alpha: Adapters count lora_alpha / lora_rank times.
    seed: Of the order of tasks and of all sampling.
    steps: Rollouts, each followed by its updates.
    tasks: Of one rollout.
    samples: Episodes of a task: the group.
    max_turns: Replies of an episode.
    max_turn_tokens: Tokens of a reply.
    max_tool_tokens: Tokens of a tool's message; what is longer is cut.
    tools_in_prompt: Who tells the model of its tools: 'default' is its chat template, or
      where that knows none, a text in the system message (chat.TOOLS); 'refuse' refuses
      such a template; 'own' leaves it to the tasks' own messages.
    long_prompts: What happens to tasks whose prompt leaves no room for a reply in a row:
      'refuse' ends the run before it begins; 'skip' leaves them out of training, and in
      evaluations they stay, unanswered.
    reset_seconds: That the reset of an environment may take, and before it make_env.
    step_seconds: That each step of an environment may take, tools and rewards included.
    episode_seconds: That an episode may take from when it gets a row; its time in the
      engine counts, beside other episodes. What is late is masked as an error.
    temperature: Of sampling, and of the log-probs that are trained.
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
    epochs: Over each rollout.
    minibatches: Optimizer steps an epoch.
    learning_rate: Of the policy, after the warm-up.
    critic_learning_rate: Of the critic.
    critic_warmup: Steps in which the critic alone is updated.
    warmup: Optimizer steps of linear warm-up.
    weight_decay: Of the optimizer, decoupled as AdamW's.
    optimizer: Of optimizers.KINDS: 'adamw', 'adamw8' (moments of 8 bits) or 'adafactor'.
    offload: Keep the optimizer's state in the host's memory between updates.
    adam_b1: Decay of Adam's first moment, of 'adamw' and 'adamw8'.
    adam_b2: Of its second. The default forgets sooner than the .999 of PyTorch and verl.
    adam_eps: Added to the root of the second moment.
    clip_norm: Of the gradient of policy and critic each, over all leaves; inf is without.
    rows: Episodes at a time, on each chip (or `tensor` of them). Of this and of the other
      sizes 0 is chosen from device and model (sizes.py): slots, feed_rows, feed_tokens,
      bucket, replicas, row_tokens and microbatch.
    slots: Tokens of a row, at most: prompt, replies and tools together.
    decode_steps: Tokens a decode segment.
    feed_rows: Rows a feed.
    feed_tokens: Tokens of a row a feed.
    bucket: Least slots that a cache read covers; it doubles up to slots.
    width: Most rows that are decoded at a time; 0 is all. With slow tools, half of rows.
    narrow: Whether few rows run in programs for a quarter of rows. A run repeats to the
      last bit only without it and with bucket = slots: environments and tools take their
      time.
    replicas: That share each chip and its rows; as many as cores is best on a CPU.
    row_tokens: Tokens of a packed training row; at least `slots`.
    microbatch: Packed rows of one gradient, over all chips: a multiple of data x fsdp.
    data: Chips, or groups of them, that hold the training state each; see sharding.py.
    fsdp: Chips that it is split over; 0 is all that the other axes leave.
    tensor: Chips that share each layer, in training and in sampling.
    context: Chips that share each training row.
    samplers: Chips of each process that only sample, while the others only train; 0: all
      do both in turn.
    eval_every: Rollouts between evaluations; 0 evaluates at the end only.
    checkpoint_every: Rollouts between checkpoints.
    keep: Checkpoints kept.
    keep_rollouts: Whether finished episodes are on disk until a checkpoint has learned
      from them: after a kill they are not played again.
    max_error_rate: Share of episodes of a rollout whose environment may raise or be late.
    alarms: Numbers beyond which an alarm is logged.
  """

  model: str = ''
  reference: str = ''
  reference_every: int = 0
  dtype: str = 'float32'
  remat: str = 'none'
  lora_rank: int = 0
  lora_targets: str = 'q,k,v,o,gate,up,down'
  lora_alpha: float = 16.0
  seed: int = 0
  steps: int = 100
  tasks: int = 16
  samples: int = 8
  max_turns: int = 5
  max_turn_tokens: int = 1024
  max_tool_tokens: int = 1024
  tools_in_prompt: str = 'default'
  long_prompts: str = 'refuse'
  reset_seconds: float = 60.0
  step_seconds: float = 300.0
  episode_seconds: float = 3600.0
  temperature: float = 1.0
  max_refills: int = 0
  sync_every: int = 1
  ahead: int = 0
  partial: bool = False
  max_staleness: int = 1_000_000
  epochs: int = 1
  minibatches: int = 1
  learning_rate: float = 1e-6
  critic_learning_rate: float = 1e-5
  critic_warmup: int = 0
  warmup: int = 0
  weight_decay: float = 0.0
  optimizer: str = 'adamw'
  offload: bool = False
  adam_b1: float = 0.9
  adam_b2: float = 0.95
  adam_eps: float = 1e-8
  clip_norm: float = 1.0
  rows: int = 0
  slots: int = 0
  decode_steps: int = 32
  feed_rows: int = 0
  feed_tokens: int = 0
  bucket: int = 0
  width: int = 0
  narrow: bool = True
  replicas: int = 0
  row_tokens: int = 0
  microbatch: int = 0
  data: int = 1
  fsdp: int = 0
  tensor: int = 1
  context: int = 1
  samplers: int = 0
  eval_every: int = 0
  checkpoint_every: int = 20
  keep: int = 3
  keep_rollouts: bool = False
  max_error_rate: float = 0.1
  alarms: alarms_lib.Limits = dataclasses.field(default_factory=alarms_lib.Limits)

  @property
  def oldest(self) -> int:
    """The most steps by which a policy may be older than the one that learns from it."""
    return self.sync_every - 1 + self.ahead


# What the fields may be: numbers 0 and more, but for these.
_AT_LEAST_1 = (
  *('tasks', 'samples', 'max_turns', 'max_turn_tokens', 'max_tool_tokens'),
  *('epochs', 'minibatches', 'sync_every', 'decode_steps'),
  *('data', 'tensor', 'context', 'checkpoint_every', 'keep'),
)
_ABOVE_0 = (
  'reset_seconds',
  'step_seconds',
  'episode_seconds',
  'clip_norm',
  'lora_alpha',
  'adam_eps',
)
_AT_MOST = {'max_error_rate': 1.0}
_BELOW_1 = ('adam_b1', 'adam_b2')
_CHOICES = {
  'dtype': ('float32', 'bfloat16'),
  'remat': ('none', 'dots', 'full'),
  'optimizer': tuple(optimizers.KINDS),
  'tools_in_prompt': chat_lib.TOOLS_IN_PROMPT,
  'long_prompts': ('refuse', 'skip'),
}


def define_flags(default: Any, name: str = 'config', **options: Any):
  """Defines the absl flags --config.<field> of a configuration.

  Args:
    default: A configuration, a dataclass: what holds where no flag is given.
    name: Of the flags.
    **options: Of ml_collections.config_flags.DEFINE_config_dataclass.

  Returns:
    The holder of the flag, whose `value` is the configuration.

  Raises:
    SystemExit: The command line names a field that does not exist; says which may have
      been meant.
  """
  from ml_collections import config_flags

  given = (re.match(rf'--?{name}\.([\w.]+)', argument) for argument in sys.argv[1:])
  for path in (match[1] for match in given if match):
    owner: Any = default
    for field in path.split('.'):
      known = [f.name for f in dataclasses.fields(owner)] if _has_fields(owner) else []
      if field not in known:
        meant = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
        hint = f'did you mean {meant[0]}?' if meant else f'there are {", ".join(known)}.'
        sys.exit(f'--{name}.{path}: there is no field {field!r}; {hint}')
      owner = getattr(owner, field)
  return config_flags.DEFINE_config_dataclass(name, default, **options)


def _has_fields(value: Any) -> bool:
  return dataclasses.is_dataclass(value)


def check_values(config: Config) -> None:
  """Refuses a value of a wrong type or out of its range.

  Raises:
    ValueError: Names the field, the value and what it may be.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if problem := _problem(field.name, field.type, value):
      raise ValueError(f'{field.name} is {value!r}; {problem}')


def _problem(name: str, kind: Any, value: Any) -> str | None:
  """What a value must be, if it is not."""
  if name in _CHOICES:
    known = value in _CHOICES[name]
    return None if known else f'give one of {", ".join(map(repr, _CHOICES[name]))}.'
  if kind in (bool, str):
    names = {bool: 'True or False', str: 'a text'}
    return None if isinstance(value, kind) else f'it must be {names[kind]}.'
  if kind not in (int, float):
    return None if isinstance(value, kind) else f'it must be of {kind}.'
  sort = 'a whole number' if kind is int else 'a number'
  allowed = int if kind is int else int | float
  if isinstance(value, bool) or not isinstance(value, allowed) or math.isnan(value):
    return f'it must be {sort}.'
  if name in _ABOVE_0:
    return None if value > 0 else f'it must be {sort} above 0.'
  if name in _BELOW_1:
    return None if 0 <= value < 1 else f'it must be {sort} from 0 to below 1.'
  least = 1 if name in _AT_LEAST_1 else 0
  most = _AT_MOST.get(name, math.inf)
  if least <= value <= most and not (kind is float and value == math.inf):
    return None
  if name in SIZES:
    return f'it must be {sort}, and 0 chooses it.'
  bound = f'at least {least}' if most == math.inf else f'from {least} to {most:g}'
  return f'it must be {sort}, {bound}.'


def check(config: Config, algorithm: algorithms.Algorithm) -> None:
  """Refuses what would fail only after a rollout, or would do nothing.

  Raises:
    ValueError: Names the field and the mend.
  """
  check_values(config)
  if not isinstance(algorithm, algorithms.Algorithm):
    raise ValueError(
      f'algorithm is {algorithm!r:.100}; it must be an algorithms.Algorithm, such as '
      'algorithms.grpo() gives.'
    )
  if 0 < config.row_tokens < config.slots:
    raise ValueError(
      f'row_tokens is {config.row_tokens}, less than slots ({config.slots}): a long text '
      'would not fit a training row. Raise it, or leave it 0.'
    )
  for name in ('reference', 'reference_every'):
    if getattr(config, name) and not algorithm.needs_reference:
      raise ValueError(f'{name}: the algorithm reads no reference policy; leave it out.')
  if algorithm.reads_reference and not config.reference:
    raise ValueError(
      'reference: the algorithm learns from a teacher; give its directory.'
    )
  if config.reference_every and algorithm.reads_reference:
    raise ValueError('reference_every: a teacher stays as it is; make it 0.')
  times = {'epochs': config.epochs, 'minibatches': config.minibatches}
  probe.check(algorithm, config.samples, **times)
  if config.reference_every and config.reference and config.lora_rank:
    raise ValueError('reference_every: with adapters it needs reference to be empty.')
  _check_staleness(config, algorithm)


def _check_staleness(config, algorithm):
  """That what older policies sampled can be learned from."""
  for name, least in (('sync_every', 2), ('ahead', 1)):
    if getattr(config, name) >= least and not algorithm.correction:
      raise ValueError(
        f'{name} is {getattr(config, name)}: episodes are of an older policy, and the '
        'algorithm has no correction for that (rl/correction.py).'
      )
  if config.max_staleness < config.oldest:
    raise ValueError(
      f'max_staleness is {config.max_staleness}, but with sync_every='
      f'{config.sync_every} and ahead={config.ahead} policies get '
      f'{config.oldest} steps old.'
    )
  if config.ahead < 0 or (config.ahead > 1 and not config.partial):
    raise ValueError(
      f'ahead is {config.ahead}; it must be 0 or 1, or above 1 with partial=True.'
    )
  if config.partial and not config.ahead:
    raise ValueError('partial: no episode is played during an update; make ahead 1.')
  if config.ahead and (config.max_refills or algorithm.greedy_baseline):
    raise ValueError(
      f'ahead is {config.ahead}: max_refills, and algorithms with a greedy baseline, '
      'play more episodes once a rollout has ended; make ahead 0.'
    )
  if config.ahead and config.tensor > 1 and not config.samplers:
    raise ValueError(
      'ahead: the chips of a replica (tensor) cannot sample and train at the same time; '
      'give some of them to sampling alone (samplers).'
    )
