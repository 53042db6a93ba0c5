"""First light, part 3: times updates, and compares them with their operations' bound.

An update is the gradient of a GRPO loss on one row of T tokens, half of them actions,
with recomputed activations, and the optimizer's step, in bfloat16 with float32 master
weights. All programs are compiled first, in threads, and cached on disk. With
AGENT_R1_ROW_ATTENTION=0 in the environment, every GPU uses cuDNN's attention.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import dataclasses
import functools
import os
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.models import costs, decoder, families, lora, sharding
from agent_r1_jax.models.kernels import attention_kernels
from agent_r1_jax.rl import algorithms, learner, optimizers
from experiments.bench import common
from experiments.bench.light import card, lines

_CASES = flags.DEFINE_integer(
  'cases', 99, 'How many cases, from the first on.', flag_values=lines.FLAGS
)
_REPEATS = 3
# The time that a case needs after compilation.
_LEAST_SECONDS = 8.0


class Case(NamedTuple):
  """One update."""

  shape: str  # A key of common.SHAPES.
  tokens: int
  optimizer: str = 'adamw'  # A key of optimizers.KINDS.
  rank: int = 0  # Of adapters; 0 trains all parameters.
  remat: str = 'full'
  published: float | None = None  # MFU on an H100 by prime-rl.

  @property
  def name(self) -> str:
    """The name of the case in its line."""
    how = f'LoRA of rank {self.rank}' if self.rank else self.optimizer
    remat = '' if self.remat == 'full' else f', remat {self.remat}'
    return f'{self.shape}, {self.tokens} tokens, {how}{remat}'


CASES = (
  Case('0.6b', 16_384, published=0.111),
  Case('0.6b', 65_536, published=0.268),
  Case('4b', 16_384, rank=16, published=0.217),
  Case('3b', 4096, 'adamw8'),
  Case('0.6b', 16_384, remat='dots'),
)
REHEARSAL = (Case('tiny', 256, rank=4), Case('tiny', 256, 'adamw8'))


def update() -> Iterator[lines.Line]:
  """Yields a line for each case; one that does not compile in time says so."""
  if lines.get_part() == 'cudnn' and jax.default_backend() == 'tpu':
    yield {'what': 'cuDNN', 'failed': 'a TPU has none'}
    return
  cases = (REHEARSAL if lines.is_tiny() else CASES)[: _CASES.value]
  lower = {case: functools.partial(_lower, case) for case in cases}
  yield from measure_compiled(lower, lambda case: [measure(case)], '{}')


def measure_compiled(
  lower: dict[Any, Callable[[], Any]],
  measure_case: Callable[[Any], Iterable[lines.Line]],
  what: str,
) -> Iterator[lines.Line]:
  """Compiles the programs of all cases in threads, then measures the cases.

  A call then finds its program in JAX's cache on disk. Cases that are not compiled after
  half of the part's time are measured last. XLA autotunes on the device while it
  compiles, so a line says how many programs were still compiling.

  Args:
    lower: For each case, a function that lowers its programs.
    measure_case: Yields the lines of a case.
    what: The format of a failure's `what`, filled with the case's name.
  """
  pool = futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
  compiled: dict[Any, list[futures.Future]] = {}
  for case, make in lower.items():
    try:  # Traced one after the other, because tracing is Python.
      compiled[case] = [pool.submit(program.compile) for program in make()]
    except Exception as error:
      yield {'what': what.format(case.name), 'failed': lines.describe_error(error)}
  pool.shutdown(wait=False)
  every = [future for several in compiled.values() for future in several]
  futures.wait(every, timeout=lines.count_seconds_left() / 2)
  is_late = lambda case: not all(future.done() for future in compiled[case])
  for case in sorted(compiled, key=is_late):
    end = time.monotonic() + max(0.0, lines.count_seconds_left() - _LEAST_SECONDS)
    try:  # A case that does not fit or compile becomes one line.
      for future in compiled[case]:
        future.result(max(0.0, end - time.monotonic()))
      busy = sum(not future.done() for future in every)
      note = {'compiling': busy} if busy else {}
      yield from (line | note for line in measure_case(case))
    except Exception as error:
      yield {'what': what.format(case.name), 'failed': lines.describe_error(error)}


def measure(case: Case) -> lines.Line:
  """Measures a case: seconds, tokens per second and MFU."""
  update, operations = make_update(case)
  first, seconds = lines.measure_seconds(update, repeats=_REPEATS)
  peak = card.find_peak()
  stats = jax.devices()[0].memory_stats() or {}
  more: dict[str, Any] = {'published': case.published} if case.published else {}
  return lines.make(
    case.name,
    seconds,
    's',
    operations / peak,
    attention=_name_attention(case),
    tokens_per_second=round(case.tokens / seconds),
    mfu=round(operations / seconds / peak, 4),
    operations=operations,
    peak_bytes_so_far=stats.get('peak_bytes_in_use'),
    first_seconds=first,
    **more,
  )


def make_update(case: Case) -> tuple[Callable[[], None], float]:
  """Returns a function that takes a step, and the operations that it needs."""
  config, batch = _make_config(case), _make_batch(case)
  params = jax.jit(_make_params, static_argnums=(0, 1))(case, config)
  operations = costs.count_gradient(params, config, batch)
  step = common.make_update(config, params, [batch], _make_optimizer(case))
  return step, operations


def _make_config(case: Case) -> decoder.DecoderConfig:
  config = common.SHAPES[case.shape]
  return dataclasses.replace(config, dtype='bfloat16', remat=case.remat)


def _make_params(case: Case, config: decoder.DecoderConfig) -> decoder.Params:
  params = decoder.init(config, jax.random.key(0))
  if case.rank:
    key = jax.random.key(1)
    params = lora.add(params, case.rank, [*families.TARGETS], 2.0 * case.rank, key)
  return params


def _make_batch(case: Case) -> types.Batch:
  rng, T = np.random.default_rng(0), case.tokens
  vocab_size = common.SHAPES[case.shape].vocab_size
  tokens = rng.integers(0, vocab_size, (1, T))
  actions = np.arange(T)[None] >= T // 2
  return common.make_batch(tokens, actions, rng.normal(size=(1, T)), vocab_size)


def _make_optimizer(case: Case) -> Any:
  return optimizers.make(config_lib.Optimizer(kind=case.optimizer), 1e-6)


_LOSS = learner.objective(algorithms.grpo(kl_coef=0.0))


def _lower(case: Case) -> list[Any]:
  """Lowers the gradient and the optimizer's step, from shapes only."""
  config, optimizer = _make_config(case), _make_optimizer(case)
  params: Any = jax.eval_shape(lambda: _make_params(case, config))
  learned = lora.split(params)[0]
  state: Any = jax.eval_shape(lambda p: learner.init(p, optimizer), params)
  gradient = learner._gradient.lower(
    params, _make_batch(case), config=config, loss=_LOSS, temperature=1.0, scores=False
  )
  step = learner._apply.lower(
    state._replace(params=learned), learned, optimizer=optimizer
  )
  return [gradient, step]


def _name_attention(case: Case) -> str:
  """Names the attention kernel for this case's rows."""
  config = _make_config(case)
  shape = (1, case.tokens, config.num_heads, config.head_dim)
  queries: Any = jax.ShapeDtypeStruct(shape, config.dtype)
  if sharding.platform() == 'gpu':
    if attention_kernels.knows_spans(queries):
      return 'row_attention'
    return 'cuDNN' if attention_kernels.has_cudnn(queries) else 'XLA'
  return 'Pallas' if sharding.platform() == 'tpu' else 'XLA'


MEASUREMENTS = (update,)

if __name__ == '__main__':
  lines.run(MEASUREMENTS)
