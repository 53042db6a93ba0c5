"""A tiny policy with a tokenizer of its own, for the tests of what runs a policy."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import pathlib
import tempfile
import threading
from typing import Any
import zlib

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.agent import automata
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.models import decoder, families, lora
from agent_r1_jax.models.files import tensor_layout, weights
from agent_r1_jax.models.pictures import vision_config
from agent_r1_jax.rl import learner, packing, table
from experiments import train_tokenizer

TEXTS = (
  'What is the capital of the country? The capital is the city of the river.',
  'Search the text, then answer with the name of the city and nothing else.',
  'one two three four five six seven eight nine ten',
)
VOCAB = 300

# One size for most tests, so that they share what is compiled.
SIZES = {
  'rows': 6,
  'slots': 128,
  'decode_steps': 8,
  'prefill_rows': 4,
  'prefill_tokens': 8,
}
BUCKET = 64
# A tower whose windows are 2 x 2 tokens of 8 x 8 pixels.
VISION = vision_config.VisionConfig(
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  mlp_dim=24,
  out_dim=16,
  patch_size=4,
  window_size=16,
  full_attention=(1,),
  image_token_id=299,
)
# Without windows, and with features for the first layer of the decoder.
DEEP_VISION = dataclasses.replace(
  VISION,
  full_attention=(0, 1),
  num_places=9,
  deepstack=(0,),
  colours=vision_config.SIGNED,
  films=True,
)
# A token is the mean of 2 x 2 patches.
POOLED_VISION = dataclasses.replace(
  VISION,
  full_attention=(0, 1),
  temporal_patch_size=1,
  window_size=8,
  axis_places=64,
  clips=True,
  standardizes=True,
  colours=vision_config.SIGNED,
)
YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 128,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'attention_factor': 1.1,
  'truncate': False,
}


def run_config(
  base: config_lib.Config | None = None, **fields_by_last_name: Any
) -> config_lib.Config:
  """A run's configuration; fields are named without the part that they are in."""
  changes = {full_name(name): value for name, value in fields_by_last_name.items()}
  return fields.replace(base or config_lib.Config(), changes)


def full_name(name: str) -> str:
  """The dotted name of a field of a run's configuration."""
  ambiguous = {'model': 'model.path', 'optimizer': 'optimizer.kind'}
  ambiguous |= {'checkpoint_every': 'checkpoint.every'}
  known = {full.split('.')[-1]: full for full in [*fields.names(config_lib.Config)][::-1]}
  return ambiguous.get(name) or known.get(name, name)


def config(family: str = 'llama', layers: int = 1) -> decoder.DecoderConfig:
  """Grouped queries, and each family's biases, norms, experts and states."""
  facts = families.FAMILIES[family]
  normalizes = family in ('qwen3_moe', 'gpt_oss', 'qwen3_5_moe_text')
  mixture = {'experts_per_token': 2, 'normalize_experts': normalizes}
  sizes = {'num_experts': 8, 'expert_dim': 12, 'shared_dim': 8, 'mlp_dim': 24}
  has = {field for field, _ in facts.sizes.values()}
  sees = {'vision': VISION, 'mrope_section': (1, 1, 2)}
  if facts.has('axis_places/embedding', 'vision'):
    sees = {'vision': POOLED_VISION}
  if facts.alternates_axes:
    sees = {'vision': DEEP_VISION, 'mrope_section': (2, 1, 1)}
  if facts.is_recurrent:  # At least one of each kind; the last one attends.
    layers = max(layers, 2)
    sizes |= {'linear_key_heads': 2, 'linear_value_heads': 4, 'conv_width': 4}
    sizes |= {'linear_key_dim': 8, 'linear_value_dim': 6}
  kinds: dict[str, Any] = {}
  if facts.has_full:  # Every other layer slides; of four, two share keys and values.
    layers = max(layers, 2)
    sizes |= {'full_kv_heads': 1 + ('input_dim' in has), 'full_head_dim': 12}
    sizes |= {'input_dim': 6}
    kinds = {'sliding': ((True, False) * layers)[-layers:], 'window': 9}
    kinds |= {'local_rope_theta': 1e3, 'keys_are_values': 'input_dim' not in has}
    kinds |= {'shared_layers': 2 * (layers > 3), 'wide_mlp': 'input_dim' in has}
    kinds['logit_cap'] = 4.0
    mixture['normalize_experts'] = True
  return decoder.DecoderConfig(
    family=family,
    vocab_size=VOCAB,
    embed_dim=16,
    num_layers=layers,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    **{field: size for field, size in sizes.items() if field in has},
    **(mixture if 'num_experts' in has else {}),
    rope_scaling=None if 'default' in facts.scalings else YARN,
    **kinds,
    recurrent=(True,) * (layers - 1) + (False,) if facts.is_recurrent else (),
    **(sees if facts.sees else {}),
  )


def params(
  shape: decoder.DecoderConfig, likely: Mapping[int, float] | None = None
) -> decoder.Params:
  """Random parameters whose logits depend on the whole text.

  The first number of every embedding is the same, so that the first row of the output
  layer is a bias: `likely` adds some three times its value to the logits of a token.
  """

  def spread(path, leaf):
    seed = zlib.crc32(jax.tree_util.keystr(path).encode())
    noise = np.random.default_rng(seed).normal(size=leaf.shape)
    return np.asarray(leaf + 0.3 * noise, np.float32)

  tree, ones = init_shapes(shape), {'scale': 1.0, 'log': -2.0}
  for side in ('input', 'output'):  # Towers cut off at these.
    ones |= {f'{side}_min': -2.0, f'{side}_max': 2.0}
  tree = jax.tree_util.tree_map_with_path(
    lambda path, x: spread(path, np.full(x.shape, ones.get(path[-1].key, 0.0))), tree
  )
  tree['embed']['embedding'] *= 3
  tree['embed']['embedding'][:, 0] = 4.0
  tree['lm_head']['kernel'][0] = 0.0
  for token, bias in (likely or {}).items():
    tree['lm_head']['kernel'][0, token] = bias
  return jax.device_put(tree)


def add_adapters(
  params: Any,
  rank: int,
  targets: Sequence[str],
  alpha: float,
  b: float = 0.0,
  seed: int = 0,
) -> decoder.Params:
  """lora.add, but NumPy draws A, and B with the deviation `b`: nothing is compiled."""

  def draw(path, leaf):
    name = path[-1].key
    if name == 'lora_scale':
      return np.full(leaf.shape, alpha / rank, np.float32)
    deviation = b if name == 'lora_b' else math.prod(leaf.shape[1:-1]) ** -0.5
    rng = np.random.default_rng([seed, zlib.crc32(jax.tree_util.keystr(path).encode())])
    return np.float32(deviation) * rng.standard_normal(leaf.shape, np.float32)

  add = lambda params: lora.add(params, rank, targets, alpha, jax.random.key(0))
  made = lora.take(jax.eval_shape(add, params))
  made = jax.tree_util.tree_map_with_path(draw, made)
  return lora.join(jax.device_put(made), params)


def init_shapes(shape: decoder.DecoderConfig) -> Any:
  """The shapes of the tree that decoder.init makes, without a trace of the model.

  test_decoder.py compares the two for each family.
  """
  leaves = tensor_layout.list_leaves(shape, value_head=False)
  flat = {x.path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in leaves}
  return traverse_util.unflatten_dict(flat, sep='/')


@functools.cache
def tokenizer_dir() -> pathlib.Path:
  """Trained once; the directory goes with the process."""
  directory = tempfile.TemporaryDirectory()
  _directories.append(directory)
  train_tokenizer.train(TEXTS, vocab_size=VOCAB, directory=directory.name)
  return pathlib.Path(directory.name)


_directories: list[tempfile.TemporaryDirectory] = []


@functools.cache
def chat(max_tool_tokens: int = 64) -> chat_lib.Chat:
  tokenizer = tokenizer_lib.load(tokenizer_dir())
  assert len(tokenizer) <= VOCAB
  return chat_lib.Chat(tokenizer, max_tool_tokens=max_tool_tokens)


def save(
  directory: pathlib.Path, likely: Mapping[int, float] | None = None, layers: int = 1
) -> str:
  """A whole model directory."""
  shape = config(layers=layers)
  weights.save(directory, shape, params(shape, likely), tokenizer_from=tokenizer_dir())
  return str(directory)


class ClosedOnce(env_lib.ToolEnv):
  """Counts its closings; `made` gets each environment."""

  def __init__(self, made: list, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.closings = 0
    made.append(self)

  def close(self):
    self.closings += 1


def engine(
  tree: decoder.Params, *, shape: decoder.DecoderConfig | None = None, **sizes: Any
) -> engine_lib.Engine:
  """An engine of the sizes that are compiled anyway."""
  return engine_lib.Engine(shape or config(), tree, **SIZES | {'bucket': BUCKET} | sizes)


def stop(ids: Sequence[int] | None = None) -> types.Automaton:
  """Ends a reply at these tokens; by default at those of `chat`."""
  return automata.stop(chat().stop_ids if ids is None else ids, VOCAB)


def rows(tokens: Any, positions: Any = None, ids: Any = None) -> types.Rows:
  """Packed rows, by default of one segment each."""
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  ids = jnp.ones_like(positions) if ids is None else ids
  return types.Rows(tokens, positions, types.Segments(ids))


def learned(
  tree: decoder.Params,
  segments: Sequence[types.Segment],
  *,
  shape: decoder.DecoderConfig | None = None,
  temperature: float = 1.0,
) -> list[np.ndarray]:
  """The learner's log-probs of each segment's tokens, packed as in training."""
  lengths = [len(s.tokens) for s in segments]
  row_tokens = SIZES['slots'] * -(-max(lengths) // SIZES['slots'])
  where = packing.plan_layout(lengths, row_tokens=row_tokens, row_multiple=8)
  out = []
  for batch in packing.split_microbatches(
    packing.pack(table.from_segments(segments), where), 8
  ):
    batch = jax.device_put(batch)
    kwargs = {'config': shape or config(), 'temperature': temperature}
    out.append(np.asarray(learner.logprobs(tree, batch, **kwargs)))
  return np.split(where.extract(np.concatenate(out)), np.cumsum(lengths)[:-1])


def assert_on_policy(tree: decoder.Params, segments: Sequence[types.Segment], **kwargs):
  """The log-probs of the sampler are the learner's, and there are none elsewhere."""
  assert segments
  for segment, logprobs in zip(segments, learned(tree, segments, **kwargs), strict=True):
    mask = segment.action_mask
    assert segment.tokens.shape == mask.shape == segment.behaviour_logprobs.shape
    np.testing.assert_allclose(
      segment.behaviour_logprobs[mask], logprobs[mask], atol=2e-5
    )
    assert not segment.behaviour_logprobs[~mask].any()


def within(fn, *args, seconds: float = 900.0, **kwargs):
  """fn(...), or a failure if it hangs: it then stays behind in a thread."""
  outcome = []

  def call():
    try:
      outcome.append((fn(*args, **kwargs), None))
    except BaseException as error:
      outcome.append((None, error))

  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  thread.join(seconds)
  assert not thread.is_alive(), f'{fn} hangs'
  value, error = outcome[0]
  if error is not None:
    raise error
  return value


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
  """Collects one entry for each compilation by XLA."""
  found: list[str] = []
  _listening.append(found)
  try:
    yield found
  finally:
    _listening.remove(found)


_listening: list[list[str]] = []


def _on_duration(event: str, seconds: float, **kwargs):
  if event == '/jax/core/compile/backend_compile_duration':
    for found in _listening:
      found.append(str(kwargs))


jax.monitoring.register_event_duration_secs_listener(_on_duration)
