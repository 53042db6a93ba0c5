"""Text encoders of the BERT family (e5, bge, MiniLM), read from Hugging Face directories.

Letters: B texts, T tokens, D embed, F feed-forward, L layers, N heads, H head dim.
"""

import bisect
import collections
from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
import re
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax.models.files import json_fields, tensor_files, tensor_layout, weights

# The query and passage prefixes used in training, from the models' cards.
PREFIXES = {
  'e5': ('query: ', 'passage: '),
  'bge': ('Represent this sentence for searching relevant passages: ', ''),
}
_POOLING = {'pooling_mode_mean_tokens': 'mean', 'pooling_mode_cls_token': 'cls'}
_SIZES = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'max_position_embeddings',
  'type_vocab_size',
)
_FIXED = {
  'model_type': 'bert',
  'hidden_act': 'gelu',
  'position_embedding_type': 'absolute',
}
# Tokens per device call; more texts take several calls.
_TOKENS_PER_CALL = 16_384


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The shape of an encoder, in the words of its config.json."""

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  max_position_embeddings: int
  type_vocab_size: int
  layer_norm_eps: float
  pooling: str = 'mean'  # 'mean' over the text's tokens, or 'cls', the first token.
  normalize: bool = True  # Whether to scale vectors to length 1.
  # Type of parameters and activations; norms and softmax are float32.
  dtype: str = 'float32'


class Encoder:
  """Encodes texts as vectors, divided over JAX's local devices.

  Texts are padded to a few lengths and row counts, so that few programs are compiled.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    pooling: str | None = None,
    max_tokens: int | None = None,
    dtype: str | None = None,
  ):
    """Reads a directory in Hugging Face layout, with sentence-transformers' files if any.

    Args:
      directory: Has config.json, model.safetensors and tokenizer.json.
      query_prefix: Prepended to each query. None uses the prompt 'query' of
        config_sentence_transformers.json; else the entry of PREFIXES whose name is a word
        of the directory's, such as e5-base-v2; else nothing.
      passage_prefix: The same for passages, with the prompt 'passage' or 'document'.
      pooling: 'mean' or 'cls'; None uses the directory's pooling module, or 'mean' if
        there is no modules.json. Vectors then have length 1.
      max_tokens: Longer texts are cut; None uses the directory's max_seq_length.
      dtype: 'float32' or 'bfloat16'; None is float32 on a CPU, else bfloat16.

    Raises:
      ValueError: A file is missing or broken, or needs something unsupported.
    """
    directory = pathlib.Path(directory).resolve()
    default = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
    self.config = read_config(directory, pooling=pooling, dtype=dtype or default)
    query, passage = _prefixes(directory)
    self.query_prefix = query if query_prefix is None else query_prefix
    self.passage_prefix = passage if passage_prefix is None else passage_prefix
    max_tokens = max_tokens or _max_tokens(directory, self.config)
    if not 2 < max_tokens <= self.config.max_position_embeddings:
      raise ValueError(
        f'max_tokens is {max_tokens}; it must be 3 to '
        f'{self.config.max_position_embeddings}, the positions of {directory}'
      )
    self._lengths = [n for n in (16, 32, 64, 128, 256) if n < max_tokens]
    self._lengths.append(max_tokens)
    self._tokenizer = _read_tokenizer(directory, self.config, max_tokens)
    mesh = Mesh(np.array(jax.local_devices()), ('data',))
    self._rows = NamedSharding(mesh, PartitionSpec('data'))
    params = read_params(directory, self.config)
    self._params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))

  @property
  def dim(self) -> int:
    """The dimension of a vector."""
    return self.config.hidden_size

  def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
    """Encodes queries, each with the query prefix, as float32 [n, dim]."""
    return self._encode([self.query_prefix + text for text in texts])

  def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
    """Encodes passages, each with the passage prefix, as float32 [n, dim]."""
    return self._encode([self.passage_prefix + text for text in texts])

  def _encode(self, texts):
    # The tokenizer raises on lone surrogates.
    texts = [text.encode('utf-8', 'replace').decode() for text in texts]
    rows = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
    groups = collections.defaultdict(list)
    for i, row in enumerate(rows):
      groups[self._lengths[bisect.bisect_left(self._lengths, len(row))]].append(i)
    calls = []
    for length, members in groups.items():
      max_rows = max(1, _TOKENS_PER_CALL // length)
      for start in range(0, len(members), max_rows):
        chosen = members[start : start + max_rows]
        calls.append((chosen, self._call([rows[i] for i in chosen], length, max_rows)))
    vectors = np.empty((len(texts), self.dim), np.float32)
    # Only now: the device computes while the next texts are padded.
    for chosen, encoded in calls:
      vectors[chosen] = np.asarray(encoded)[: len(chosen)]
    return vectors

  def _call(self, rows, length, max_rows):
    """Starts the computation of at most `max_rows` rows, padded to `length` tokens."""
    devices = self._rows.num_devices
    count = min(1 << (len(rows) - 1).bit_length(), max_rows)
    count += -count % devices  # The same number of rows on every device.
    tokens, lengths = np.zeros((count, length), np.int32), np.ones(count, np.int32)
    for i, row in enumerate(rows):
      tokens[i, : len(row)], lengths[i] = row, len(row)
    tokens, lengths = jax.device_put((tokens, lengths), self._rows)
    return embed(self._params, self.config, tokens, lengths)


@functools.partial(jax.jit, static_argnames='config')
def embed(
  params: dict[str, Any],
  config: EncoderConfig,
  tokens: Int[Array, 'B T'],
  lengths: Int[Array, 'B'],
) -> Float[Array, 'B D']:
  """Computes one vector per text (Devlin et al. 2019, pooling of Reimers, Gurevych 2019).

  Tokens beyond a text's length, at least 1, are ignored. `read_params` reads the params.
  """
  T = tokens.shape[1]
  mask_BT = jnp.arange(T)[None, :] < lengths[:, None]
  table = lambda name: params[f'{name}_embeddings.weight']
  x_BTD = table('word')[tokens]
  x_BTD += table('position')[None, :T] + table('token_type')[None, None, 0]
  x_BTD = _norm(x_BTD, params, 'LayerNorm', config)

  def layer(x_BTD, p):
    heads = (*x_BTD.shape[:2], config.num_attention_heads, -1)
    q, k, v = (
      _linear(x_BTD, p, f'attention.self.{name}').reshape(heads)
      for name in ('query', 'key', 'value')
    )
    mask = mask_BT[:, None, None, :]
    y = jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(x_BTD.shape)
    x_BTD += _linear(y, p, 'attention.output.dense')
    x_BTD = _norm(x_BTD, p, 'attention.output.LayerNorm', config)
    y = jax.nn.gelu(_linear(x_BTD, p, 'intermediate.dense'), approximate=False)
    x_BTD += _linear(y, p, 'output.dense')
    return _norm(x_BTD, p, 'output.LayerNorm', config), None

  x_BTD, _ = jax.lax.scan(layer, x_BTD, params['layers'])
  x_BTD = x_BTD.astype(jnp.float32)
  if config.pooling == 'cls':
    x_BD = x_BTD[:, 0]
  else:
    x_BD = jnp.where(mask_BT[:, :, None], x_BTD, 0.0).sum(1) / lengths[:, None]
  if config.normalize:
    x_BD /= jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12)
  return x_BD


def _linear(x, params, name):
  y = jnp.einsum('BTd,ed->BTe', x, params[f'{name}.weight'])
  return y + params[f'{name}.bias'][None, None]


def _norm(x, params, name, config):
  y = x.astype(jnp.float32)
  y -= y.mean(-1, keepdims=True)
  y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + config.layer_norm_eps)
  y = y * params[f'{name}.weight'][None, None] + params[f'{name}.bias'][None, None]
  return y.astype(x.dtype)


def read_config(
  directory: pathlib.Path, *, pooling: str | None = None, dtype: str = 'float32'
) -> EncoderConfig:
  """Reads an encoder's shape; a ValueError names the file and the field."""
  raw = json_fields.read_json(directory / 'config.json')
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype is {dtype!r}; give 'float32' or 'bfloat16'")
  try:
    for name, supported in _FIXED.items():
      if raw.get(name, supported) != supported:
        raise ValueError(f'{name} is {raw[name]!r}; only {supported!r} is supported')
    sizes = {name: json_fields.read_number(raw, name) for name in _SIZES}
    eps = json_fields.read_number(raw, 'layer_norm_eps', float, 1e-12)
    if sizes['hidden_size'] % sizes['num_attention_heads']:
      raise ValueError('num_attention_heads does not divide hidden_size')
  except ValueError as error:
    raise ValueError(f'{directory / "config.json"}: {error}') from error
  default_pooling, normalize = _read_modules(directory)
  pooling = pooling or default_pooling
  if pooling not in _POOLING.values():
    raise ValueError(f"pooling is {pooling!r}; 'mean' and 'cls' are supported")
  return EncoderConfig(
    **sizes, layer_norm_eps=eps, pooling=pooling, normalize=normalize, dtype=dtype
  )


def _read_modules(directory: pathlib.Path) -> tuple[str, bool]:
  """Returns the pooling, and whether vectors are normalized, from modules.json."""
  path = directory / 'modules.json'
  if not path.is_file():
    return 'mean', True
  modules = json_fields.read_json(path, list)
  try:
    kinds = {module['type'].split('.')[-1]: module['path'] for module in modules}
  except (TypeError, KeyError, AttributeError) as error:
    raise ValueError(f'{path}: a module lacks type or path; fetch it again') from error
  if unknown := sorted(set(kinds) - {'Transformer', 'Pooling', 'Normalize'}):
    raise ValueError(f'{path}: module {unknown[0]} is not supported')
  if 'Pooling' not in kinds:
    raise ValueError(f'{path}: has no Pooling; one vector a text needs it')
  raw = json_fields.read_json(directory / str(kinds['Pooling']) / 'config.json')
  # Older versions have a flag per mode, newer ones the mode's name.
  flags = [
    _POOLING.get(key) or key
    for key, value in raw.items()
    if value is True and key.startswith('pooling_mode_')
  ]
  return str(raw.get('pooling_mode', '+'.join(flags))), 'Normalize' in kinds


def _optional(path: pathlib.Path) -> dict[str, Any]:
  return json_fields.read_json(path) if path.is_file() else {}


def _max_tokens(directory: pathlib.Path, config: EncoderConfig) -> int:
  raw = _optional(directory / 'sentence_bert_config.json')
  positions = config.max_position_embeddings
  return min(json_fields.read_number(raw, 'max_seq_length', default=positions), positions)


def _prefixes(directory: pathlib.Path) -> tuple[str, str]:
  prompts = _optional(directory / 'config_sentence_transformers.json').get('prompts')
  prompts = prompts if isinstance(prompts, dict) else {}
  # A download cache has models--intfloat--e5-base-v2/snapshots/<hash>.
  names = ' '.join(directory.parts[-3:]).lower()
  known = [both for name, both in PREFIXES.items() if re.search(rf'\b{name}\b', names)]
  query, passage = known[0] if known else ('', '')
  passage = prompts.get('passage') or prompts.get('document') or passage
  return str(prompts.get('query') or query), str(passage)


def _read_tokenizer(directory: pathlib.Path, config: EncoderConfig, max_tokens: int):
  import tokenizers

  path = directory / 'tokenizer.json'
  json_fields.read_json(path)  # Its errors name the file, and what to do.
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # tokenizers raises nothing narrower
    raise ValueError(f'{path}: no tokenizer ({error}); fetch it again') from error
  if tokenizer.get_vocab_size() > config.vocab_size:
    raise ValueError(
      f'{path}: has {tokenizer.get_vocab_size()} tokens, the model has '
      f'{config.vocab_size}; take both from one model'
    )
  tokenizer.no_padding()
  tokenizer.enable_truncation(max_tokens)
  return tokenizer


def read_params(directory: pathlib.Path, config: EncoderConfig) -> dict[str, Any]:
  """Reads the parameters by their tensors' names; layers are stacked, [L, ...].

  Raises:
    ValueError: A tensor is missing, has another shape, or is not finite.
  """
  tensors = tensor_files.find(directory, ignore=('position_ids',))
  # A BERT with a head on top has its encoder under this name.
  tensors = {name.removeprefix('bert.'): tensor for name, tensor in tensors.items()}

  def read(name, shape):
    tensor_layout.check_tensor(directory, tensors, name, shape)
    array = tensor_files.read(tensors[name])
    weights.check_finite(directory, name, array)
    return array.astype(jnp.dtype(config.dtype))

  embeddings, layers = _shapes(config)
  params = {name: read(f'embeddings.{name}', shape) for name, shape in embeddings.items()}
  stacked = {
    name: np.stack(
      [read(f'encoder.layer.{i}.{name}', shape) for i in range(config.num_hidden_layers)]
    )
    for name, shape in layers.items()
  }
  return {**params, 'layers': stacked}


def _shapes(config: EncoderConfig):
  """Lists the shapes of the embedding's and of a layer's tensors, by name."""
  D, F = config.hidden_size, config.intermediate_size
  embeddings = {
    'word_embeddings.weight': (config.vocab_size, D),
    'position_embeddings.weight': (config.max_position_embeddings, D),
    'token_type_embeddings.weight': (config.type_vocab_size, D),
    'LayerNorm.weight': (D,),
    'LayerNorm.bias': (D,),
  }
  kernels = {
    'attention.self.query': (D, D),
    'attention.self.key': (D, D),
    'attention.self.value': (D, D),
    'attention.output.dense': (D, D),
    'attention.output.LayerNorm': (D,),
    'intermediate.dense': (F, D),
    'output.dense': (D, F),
    'output.LayerNorm': (D,),
  }
  layers = {f'{name}.weight': shape for name, shape in kernels.items()}
  layers |= {f'{name}.bias': shape[:1] for name, shape in kernels.items()}
  return embeddings, layers
