"""The protobuf messages of the Tinker API: data in, log-probs and samples out.

The client sends the data of forward and forward_backward as protobuf, and gets their
results, and samples, as protobuf too. A table describes the messages, from which Google's
library makes the classes. On the wire, a protobuf map is a list of entries with the
fields `key` and `value`, and an enumeration is an int32; the table uses these.

Letters: n tokens of a datum, K targets of each position.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax.contrib.tinker import data
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.web import http

MEDIA_TYPE = 'application/x-protobuf'
MOST_DATA = 1024  # Per request, as the client sends them.
# The fields of each message: (number, type); a type with a * is a list.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
  'SparseCsr': {
    'values': (1, 'bytes'),
    'crow_indices': (2, 'bytes'),
    'col_indices': (3, 'bytes'),
  },
  'Tensor': {
    'dense': (1, 'bytes'),
    'sparse_csr': (2, 'SparseCsr'),
    'dtype': (3, 'int32'),
    'shape': (4, 'int64*'),
  },
  'TensorEntry': {'key': (1, 'string'), 'value': (2, 'Tensor')},
  'NumberEntry': {'key': (1, 'string'), 'value': (2, 'double')},
  'Setting': {'number': (1, 'double'), 'text': (2, 'string')},
  'SettingEntry': {'key': (1, 'string'), 'value': (2, 'Setting')},
  'Text': {'tokens': (1, 'bytes')},
  'Chunk': {'encoded_text': (1, 'Text')},
  'Datum': {'model_input': (1, 'Chunk*'), 'loss_fn_inputs': (2, 'TensorEntry*')},
  'ForwardBackwardRequest': {
    'model_id': (1, 'string'),
    'seq_id': (2, 'int32'),
    'data': (3, 'Datum*'),
    'loss_fn': (4, 'string'),
    'loss_fn_config': (5, 'NumberEntry*'),
    'forward_only': (6, 'bool'),
    'loss_fn_config_v2': (7, 'SettingEntry*'),
  },
  'BatchedTensor': {
    'data': (1, 'bytes'),
    'offsets': (2, 'bytes'),
    'dtype': (3, 'int32'),
    'trailing_shape': (4, 'int64*'),
  },
  'BatchedTensorEntry': {'key': (1, 'string'), 'value': (2, 'BatchedTensor')},
  'ArrayRecord': {'fields': (2, 'BatchedTensorEntry*'), 'num_datums': (3, 'int64')},
  'ForwardBackwardOutput': {
    'loss_fn_output_type': (1, 'string'),
    'loss_fn_outputs': (2, 'ArrayRecord*'),
    'metrics': (3, 'NumberEntry*'),
  },
  'TopkLogprobs': {
    'token_ids': (1, 'bytes'),
    'logprobs': (2, 'bytes'),
    'k': (3, 'uint32'),
    'length': (4, 'uint32'),
  },
  'SampledSequence': {
    'stop_reason': (1, 'int32'),
    'tokens': (2, 'bytes'),
    'logprobs': (3, 'bytes'),
    'topk_sampled_logprobs': (4, 'TopkLogprobs'),
  },
  'SampleResponse': {
    'sequences': (1, 'SampledSequence*'),
    'prompt_logprobs': (2, 'bytes'),
    'target_prompt_logprobs': (5, 'Tensor'),
  },
}
_FLOAT32, _INT64 = 1, 2  # Of `dtype`.
_DTYPES = {_FLOAT32: np.dtype('<f4'), _INT64: np.dtype('<i8')}
_STOP, _LENGTH = 0, 1  # Of `stop_reason`.


class ForwardBackward(NamedTuple):
  """A request for a forward pass, or for a forward and a backward pass."""

  model_id: str
  seq_id: int
  forward_only: bool
  loss: str
  options: dict[str, float]  # The loss's numbers.
  data: list[data.Datum]
  body: bytes  # The complete request, as it was sent.


@functools.cache
def _classes() -> dict[str, Any]:
  """Makes the classes of the messages."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  kinds = descriptor_pb2.FieldDescriptorProto
  file = descriptor_pb2.FileDescriptorProto(
    name='agent_r1_jax/tinker.proto', package='agent_r1_jax', syntax='proto3'
  )
  for name, fields in _MESSAGES.items():
    message = file.message_type.add(name=name)
    for field, (number, kind) in fields.items():
      one = kind.removesuffix('*')
      is_message = one in _MESSAGES
      message.field.add(
        name=field,
        number=number,
        label=kinds.LABEL_REPEATED if kind != one else kinds.LABEL_OPTIONAL,
        type=kinds.TYPE_MESSAGE
        if is_message
        else kinds.Type.Value(f'TYPE_{one.upper()}'),
        type_name=f'.agent_r1_jax.{one}' if is_message else None,
      )
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  find = lambda name: pool.FindMessageTypeByName(f'agent_r1_jax.{name}')
  return {name: message_factory.GetMessageClass(find(name)) for name in _MESSAGES}


def make(name: str, **fields: Any) -> Any:
  """Makes a message of the table."""
  return _classes()[name](**fields)


def parse(body: bytes) -> dict[str, Any]:
  """Parses a request; of its fields, reads only the run's name and its own.

  Raises:
    RefusedError: It is not such a message.
  """
  from google.protobuf import message as message_lib

  message = make('ForwardBackwardRequest')
  try:
    message.ParseFromString(body)
  except message_lib.DecodeError as error:
    raise http.RefusedError(
      400, f'the body is no ForwardBackwardRequest: {error}'
    ) from None
  names = {'model_id': message.model_id, 'seq_id': message.seq_id}
  return names | {'message': message, 'body': body}


def read_forward_backward(fields: Mapping[str, Any]) -> ForwardBackward:
  """Reads the result of `parse`.

  Raises:
    RefusedError: A datum has something unsupported.
  """
  message = fields['message']
  options = {entry.key: entry.value for entry in message.loss_fn_config}
  for entry in message.loss_fn_config_v2:
    if entry.value.text:
      text = f'loss_fn_config: {entry.key} is a text, and every option is a number'
      raise http.RefusedError(400, text)
    options[entry.key] = entry.value.number
  if len(message.data) > MOST_DATA:
    text = (
      f'the request has {len(message.data):,} data; send at most {MOST_DATA:,} at once'
    )
    raise http.RefusedError(400, text)
  read, total = [], 0
  for number, datum in enumerate(message.data):
    try:
      read.append(_read_datum(datum))
    except ValueError as error:
      raise http.RefusedError(400, f'data[{number}]: {error}') from None
    total += read[-1].targets.size  # The body does not limit a sparse matrix's size.
    if total > data.MAX_TOKENS:
      text = f'the data have more than {data.MAX_TOKENS:,} targets; send fewer'
      raise http.RefusedError(400, text)
  names = message.model_id, message.seq_id, message.forward_only, message.loss_fn
  return ForwardBackward(*names, options, read, fields['body'])


def _read_datum(message: Any) -> data.Datum:
  """Reads a datum; raises ValueError if it is invalid."""
  chunks = []
  for chunk in message.model_input:
    if not chunk.HasField('encoded_text'):
      raise ValueError('a chunk is no text; pictures and sounds are not supported')
    chunks.append(_read_numbers(chunk.encoded_text.tokens, np.dtype('<i4')))
  tokens = np.concatenate([np.zeros(0, np.int32), *chunks])
  columns = {}
  for entry in message.loss_fn_inputs:
    columns[entry.key] = _read_tensor(entry.value, entry.key)
  return data.make_datum(tokens, columns)


def _read_numbers(raw: bytes, dtype: np.dtype) -> np.ndarray:
  if len(raw) % dtype.itemsize:
    raise ValueError(f'{len(raw)} bytes are no array of {dtype.name}')
  return np.frombuffer(raw, dtype)


def _read_tensor(message: Any, name: str) -> np.ma.MaskedArray:
  """Reads a tensor; entries that a sparse one does not list are masked."""
  if message.dtype not in _DTYPES:
    raise ValueError(f'{name} has the dtype {message.dtype}; send float32 or int64')
  sparse, csr = message.sparse_csr, None
  if message.HasField('sparse_csr'):
    indices = sparse.crow_indices, sparse.col_indices
    csr = [_read_numbers(raw, np.dtype('<i8')) for raw in indices]
  raw = message.dense if csr is None else sparse.values
  values = _read_numbers(raw, _DTYPES[message.dtype])
  return data.make_column(values, message.shape or values.shape, name, csr)


def write_forward_backward(
  columns: Mapping[str, Sequence[np.ndarray]], metrics: Mapping[str, float]
) -> bytes:
  """Writes the result of a pass.

  Args:
    columns: By name, an array [n] or [n, K] for each datum, float32.
    metrics: Named numbers; a name's suffix, such as ':sum', says how the client joins
      them.
  """
  rows = [dict(zip(columns, x, strict=True)) for x in zip(*columns.values(), strict=True)]
  # A record has data of one K, the same for all columns.
  shape = lambda row: next(iter(row.values())).shape[1:]
  records = [_make_record([*group]) for _, group in itertools.groupby(rows, shape)]
  return make(
    'ForwardBackwardOutput',
    loss_fn_output_type='ArrayRecord',
    loss_fn_outputs=records,
    metrics=[make('NumberEntry', key=k, value=v) for k, v in metrics.items()],
  ).SerializeToString()


def _make_record(rows: Sequence[Mapping[str, np.ndarray]]) -> Any:
  fields = []
  for name in rows[0]:
    arrays = [row[name] for row in rows]
    value = make(
      'BatchedTensor',
      data=b''.join(x.astype('<f4').tobytes() for x in arrays),
      offsets=np.cumsum([0, *(x.nbytes for x in arrays)]).astype('<i8').tobytes(),
      dtype=_FLOAT32,
      trailing_shape=arrays[0].shape[1:],
    )
    fields.append(make('BatchedTensorEntry', key=name, value=value))
  return make('ArrayRecord', fields=fields, num_datums=len(rows))


def write_samples(
  samples: Iterable[request_lib.Chunk],
  prompt_logprobs: np.ndarray | None,
  target_logprobs: np.ndarray | None = None,
) -> bytes:
  """Writes replies, their prompt's log-probs [n], and other tokens' [n - 1, K]."""
  message = make('SampleResponse')
  for sample in samples:
    sequence = message.sequences.add(
      stop_reason=_STOP if sample.stopped else _LENGTH,
      tokens=sample.tokens.astype('<i4').tobytes(),
      logprobs=sample.logprobs.astype('<f4').tobytes(),
    )
    if k := sample.top_tokens.shape[1]:
      top = sequence.topk_sampled_logprobs
      top.k, top.length = k, len(sample.tokens)
      top.token_ids = sample.top_tokens.astype('<i4').tobytes()
      top.logprobs = sample.top_logprobs.astype('<f4').tobytes()
  if prompt_logprobs is not None:
    message.prompt_logprobs = prompt_logprobs.astype('<f4').tobytes()
  if target_logprobs is not None:
    tensor = message.target_prompt_logprobs
    tensor.dtype, tensor.dense = _FLOAT32, target_logprobs.astype('<f4').tobytes()
    tensor.shape.extend(target_logprobs.shape)
  return message.SerializeToString()
