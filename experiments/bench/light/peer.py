"""First light, part 5: the usual alternative on the same device, for comparison.

transformers' `generate`, and a policy-gradient step in PyTorch with its own attention, in
bfloat16 with float32 master weights and recomputed activations, like the update of part
3. The shapes are those of parts 3 and 4, whose result is a line's `ours`.
"""

from collections.abc import Callable, Iterator
import statistics
import time
from typing import Any

from experiments.bench import common
from experiments.bench.light import lines

_REPEATS = 3


def generate() -> Iterator[lines.Line]:
  """Measures the sampled tokens per second of transformers' `generate`."""
  import torch  # pyright: ignore[reportMissingImports]

  shape, rows, prompt, new = (
    ('tiny', 2, 16, 8) if lines.is_tiny() else ('0.6b', 64, 480, 64)
  )
  model = _make_model(shape).to(torch.bfloat16).eval()
  tokens = torch.randint(0, model.config.vocab_size, (rows, prompt), device=_device())
  ask: dict[str, Any] = {'max_new_tokens': new, 'min_new_tokens': new, 'do_sample': True}
  ask |= {'top_k': 0, 'attention_mask': torch.ones_like(tokens), 'pad_token_id': 0}

  def call() -> None:
    with torch.no_grad():
      model.generate(tokens, **ask)

  first, seconds = _measure(call)
  what = f'generate, {shape}, {rows} rows, {prompt + new // 2} used on average'
  # Our decode with nearly as many used slots, without its prefill.
  used = 64 if lines.is_tiny() else 512
  ours = _find_speed('sampler', f'decode, {shape}, {rows} rows, {used} used')
  yield lines.make(what, rows * new / seconds, 'tokens/s', first_seconds=first, ours=ours)


def train() -> Iterator[lines.Line]:
  """Measures the trained tokens per second of a policy-gradient step."""
  import torch  # pyright: ignore[reportMissingImports]

  shape, T = ('tiny', 256) if lines.is_tiny() else ('0.6b', 16_384)
  model = _make_model(shape).train()
  model.gradient_checkpointing_enable({'use_reentrant': False})
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
  generator = torch.Generator().manual_seed(0)
  tokens = torch.randint(0, model.config.vocab_size, (1, T), generator=generator)
  advantages = torch.randn((1, T // 2), generator=generator).to(_device())
  tokens, actions = tokens.to(_device()), slice(T // 2 - 1, T - 1)

  def call() -> None:
    with torch.autocast(_device(), torch.bfloat16):
      hidden = model.model(tokens, use_cache=False).last_hidden_state[:, actions]
      logits = model.lm_head(hidden).float()
    chosen = tokens[:, T // 2 :, None]
    logprobs = torch.log_softmax(logits, -1).gather(-1, chosen)[..., 0]
    ratio = torch.exp(logprobs - logprobs.detach())
    clipped = torch.clamp(ratio, 0.8, 1.2) * advantages
    loss = -torch.minimum(ratio * advantages, clipped).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

  first, seconds = _measure(call)
  peak = torch.cuda.max_memory_allocated() if _device() == 'cuda' else None
  ours = _find_speed('update', f'{shape}, {T} tokens, adamw')
  yield lines.make(
    f'step, {shape}, {T} tokens, adamw',
    T / seconds,
    'tokens/s',
    first_seconds=first,
    peak_bytes=peak,
    ours=ours,
  )


def _make_model(shape: str) -> Any:
  """Makes transformers' model of a shape, with random parameters."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers

  from agent_r1_jax.models.files import hf_config

  fields = hf_config.make(common.SHAPES[shape], 'bfloat16')
  config = transformers.AutoConfig.for_model(**fields)
  config._attn_implementation = 'sdpa'
  torch.manual_seed(0)
  with torch.device(_device()):
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _device() -> str:
  import torch  # pyright: ignore[reportMissingImports]

  return 'cuda' if torch.cuda.is_available() else 'cpu'


def _measure(call: Callable[[], None]) -> tuple[float, float]:
  """Times the first call, and the median of the others, in seconds."""
  import torch  # pyright: ignore[reportMissingImports]

  times = []
  for _ in range(1 + _REPEATS):
    start = time.perf_counter()
    call()
    if _device() == 'cuda':
      torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
  return times[0], statistics.median(times[1:])


def _find_speed(part: str, what: str) -> float | None:
  """Finds our latest tokens per second in the line of this name."""
  found = {x['what']: x for x in lines.read(lines.out()) if x['part'] == part}
  return found.get(what, {}).get('tokens_per_second')


MEASUREMENTS = (train, generate)

if __name__ == '__main__':
  # PyTorch has the device.
  lines.run(MEASUREMENTS, device=False)
