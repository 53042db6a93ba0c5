"""This engine and learner beside Hugging Face's on the same device, in one run.

  pip install torch transformers                    # where they are not there already
  python -m experiments.bench.beside                # one GPU: Qwen3-0.6B, bfloat16
  python -m experiments.bench.beside --shape=tiny --rows=4 --prompt=16 --reply=16

Two processes in turn, so that each has the memory to itself: one samples and updates with
this project, one with `generate` and with a plain loop of torch, whose attention is SDPA
and whose activations are recomputed. Both have random weights of one config.json, prompts
and replies of the same lengths (nothing ends a reply), and a clipped policy-gradient step
with AdamW on the replies of all rows, `microbatch` at a time, with float32 master weights
and bfloat16 products. The first repetition compiles and warms up; seconds are the least
of the others. A line for each process, then the ratios of our time to theirs.
"""

from collections.abc import Callable
import json
import subprocess
import sys
import time
from typing import Any

from absl import app, flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import decoder, hf_config
from experiments.bench import common

_SHAPE = flags.DEFINE_string('shape', '0.6b', 'A key of common.SHAPES.')
_ROWS = flags.DEFINE_integer('rows', 64, 'Texts that are sampled, and learned from.')
_PROMPT = flags.DEFINE_integer('prompt', 512, 'Tokens of a prompt.')
_REPLY = flags.DEFINE_integer('reply', 512, 'Tokens of a reply.')
_MICROBATCH = flags.DEFINE_integer('microbatch', 8, 'Texts of a gradient.')
_REPEATS = flags.DEFINE_integer(
  'repeats', 3, 'Repetitions of each measurement, after the first.'
)
_SIDE = flags.DEFINE_enum('side', 'both', ['both', 'jax', 'torch'], 'What to measure.')


def least_seconds(fn: Callable[[], Any]) -> float:
  """Times the repetitions after the first; fn returns when the device is done."""
  times = []
  for _ in range(1 + _REPEATS.value):
    start = time.perf_counter()
    fn()
    times.append(time.perf_counter() - start)
  return min(times[1:])


def batch() -> dict[str, np.ndarray]:
  """Prompts and replies of random tokens [B, T], and an advantage a text [B, 1]."""
  rng, B = np.random.default_rng(0), _ROWS.value
  T = _PROMPT.value + _REPLY.value
  tokens = rng.integers(0, common.SHAPES[_SHAPE.value].vocab_size, (B, T))
  return {'tokens': tokens, 'advantages': rng.normal(size=(B, 1)).astype(np.float32)}


def by_jax(config: decoder.DecoderConfig) -> dict[str, Any]:
  """Seconds of sampling and of the update, by this project."""
  import jax

  from agent_r1_jax.engine import engine as engine_lib
  from agent_r1_jax.engine import request as request_lib
  from agent_r1_jax.host import runtime
  from agent_r1_jax.rl import optimizers

  runtime.initialize()
  given, T = batch(), _PROMPT.value + _REPLY.value
  params = jax.jit(decoder.init, static_argnums=0)(config, jax.random.key(0))
  sizes = {'rows': _ROWS.value, 'slots': T, 'narrow': False, 'bucket': min(T, 512)}
  engine = engine_lib.Engine(config, params, **sizes)
  engine.warm_up()

  async def reply(n: int) -> int:
    prompt = given['tokens'][n, : _PROMPT.value].astype(np.int32)
    key = request_lib.make_key('bench', n)
    request = request_lib.Request(prompt, max_tokens=_REPLY.value, key=key)
    return len((await engine.submit(request)).tokens)

  def sample():
    said = engine.run([reply(n) for n in range(_ROWS.value)])
    assert set(said) == {_REPLY.value}

  found = {'sampling': least_seconds(sample)}
  del engine
  mask = np.tile(np.arange(T) >= _PROMPT.value, (_ROWS.value, 1))
  whole = common.make_batch(given['tokens'], mask, given['advantages'], config.vocab_size)
  parts = common.split_batch(whole, _MICROBATCH.value)
  optimizer = optimizers.make(config_lib.Optimizer(), 1e-6)
  update = common.make_update(config, params, parts, optimizer)
  found['update'] = least_seconds(update)
  device = jax.devices()[0]
  peak = (device.memory_stats() or {}).get('peak_bytes_in_use')
  return found | {'device': device.device_kind, 'peak_bytes': peak}


def by_torch(config: decoder.DecoderConfig) -> dict[str, Any]:
  """The same, as its users would do it with Hugging Face's transformers."""
  try:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # noqa: F401
  except ImportError as error:
    raise app.UsageError(
      f'{error}: pip install torch transformers, or --side=jax'
    ) from None

  cuda = torch.cuda.is_available()
  torch.set_float32_matmul_precision('high')
  model = torch_model(config).to('cuda' if cuda else 'cpu')
  found = {'sampling': least_seconds(torch_sampling(model, config.dtype))}
  found['update'] = least_seconds(torch_update(model, config))
  name = torch.cuda.get_device_name() if cuda else 'cpu'
  peak = torch.cuda.max_memory_allocated() if cuda else None
  return found | {'device': name, 'torch': torch.__version__, 'peak_bytes': peak}


def torch_model(config: decoder.DecoderConfig) -> Any:
  """Makes transformers' model of this shape, with random float32 parameters."""
  import transformers

  raw = hf_config.make(config, np.float32)
  raw = {k: v for k, v in raw.items() if k not in ('architectures', 'torch_dtype')}
  kind = transformers.AutoConfig.for_model(**raw)
  return transformers.AutoModelForCausalLM.from_config(kind, attn_implementation='sdpa')


def torch_wait():
  """Waits until the device has done what was asked of it."""
  import torch  # pyright: ignore[reportMissingImports]

  if torch.cuda.is_available():
    torch.cuda.synchronize()


def torch_sampling(model: Any, dtype: str) -> Callable[[], None]:
  """Makes a function that samples all replies."""
  import torch  # pyright: ignore[reportMissingImports]

  low = getattr(torch, dtype)
  # Generation holds the weights in the type that it computes in, as ours does.
  engine: Any = model
  if low != torch.float32:
    engine = type(model)(model.config).to(model.device, low)
  tokens = torch.as_tensor(batch()['tokens'], device=model.device)
  prompt = tokens[:, : _PROMPT.value]
  options = {'do_sample': True, 'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}
  options |= {'max_new_tokens': _REPLY.value, 'min_new_tokens': _REPLY.value}
  options |= {'pad_token_id': 0, 'eos_token_id': None}

  def sample():
    with torch.inference_mode():
      mask = torch.ones_like(prompt)
      said = engine.generate(prompt, attention_mask=mask, **options)
    assert said.shape == tokens.shape
    torch_wait()

  return sample


def torch_update(model: Any, config: decoder.DecoderConfig) -> Callable[[], None]:
  """Makes a function that makes one optimizer step of a clipped policy gradient."""
  import torch  # pyright: ignore[reportMissingImports]

  given, P, device = batch(), _PROMPT.value, model.device
  tokens = torch.as_tensor(given['tokens'], device=device)
  advantages = torch.as_tensor(given['advantages'], device=device)
  model.train()
  model.gradient_checkpointing_enable({'use_reentrant': False})
  fused = torch.cuda.is_available() or None
  params = list(model.parameters())
  optimizer = torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0, fused=fused)
  low, old = getattr(torch, config.dtype), -float(np.log(config.vocab_size))

  def update():
    for i in range(0, _ROWS.value, _MICROBATCH.value):
      part = tokens[i : i + _MICROBATCH.value]
      with torch.autocast(device.type, low, enabled=low != torch.float32):
        logits = model(part, logits_to_keep=_REPLY.value + 1, use_cache=False).logits
      chosen = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), part[:, P:].flatten(), reduction='none'
      )
      ratio = torch.exp(-chosen.view(len(part), -1) - old)
      advantage = advantages[i : i + _MICROBATCH.value]
      gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
      (-gain.sum() / (_ROWS.value * _REPLY.value)).backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch_wait()

  return update


def line_of(side: str) -> dict[str, Any]:
  """What a process of its own prints."""
  given = [flag for flag in sys.argv[1:] if not flag.startswith('--side')]
  command = [sys.executable, '-m', 'experiments.bench.beside', f'--side={side}', *given]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if done.returncode:
    raise SystemExit(f'--side={side} ended with {done.returncode}; see above')
  return json.loads(done.stdout.splitlines()[-1])


def main(_):
  if _SIDE.value == 'both':
    ours, theirs = line_of('jax'), line_of('torch')
    ratios = {k: round(ours[k] / theirs[k], 3) for k in ('sampling', 'update')}
    for line in (ours, theirs, {'ratio': ratios}):
      print(json.dumps(line), flush=True)
    return
  config = common.SHAPES[_SHAPE.value]
  found = (by_jax if _SIDE.value == 'jax' else by_torch)(config)
  sizes = dict(rows=_ROWS.value, prompt=_PROMPT.value, reply=_REPLY.value)
  about = {'side': _SIDE.value, 'shape': _SHAPE.value} | sizes
  print(json.dumps(about | found | {'dtype': config.dtype}), flush=True)


if __name__ == '__main__':
  app.run(main)
