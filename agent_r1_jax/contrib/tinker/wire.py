"""The JSON requests of the Tinker API; messages.py has the protobuf ones.

An unknown field is rejected by name, unless it has the client's default value: nothing
that a client asks for is ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_Id = Annotated[str, Field(min_length=1, max_length=128)]
_Seq = Annotated[int, Field(ge=0, lt=1 << 62)]


def _check_finite(x: float) -> float:
  if not abs(x) <= 3e38:
    raise ValueError('it must be finite, also as a float32')
  return x


_Number = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_check_finite)]
_MAX_INT = 2**31 - 1
_Int = Annotated[int, Field(ge=-1, le=_MAX_INT)]
_Path = Annotated[str, Field(max_length=512)]
_Metadata = Annotated[dict[str, Any] | None, Field(max_length=64)]


class _WireModel(BaseModel):
  """Refuses unknown fields."""

  model_config = ConfigDict(extra='forbid', protected_namespaces=())
  type: str | None = None


class CreateSession(_WireModel):
  """Begins a session of a client's process; only its metadata are read."""

  tags: list[str] = Field(default=[], max_length=64)
  user_metadata: _Metadata = None
  sdk_version: str = Field(default='', max_length=64)
  project_id: str | None = None
  display_name: str | None = None


class SessionId(_WireModel):
  """Says that a session is alive."""

  session_id: _Id


class LoraConfig(_WireModel):
  """An adapter."""

  rank: int
  seed: int | None = Field(default=None, ge=0, lt=1 << 32)
  train_unembed: bool = True
  train_mlp: bool = True
  train_attn: bool = True


class OptimizerConfig(_WireModel):
  """The optimizer, which is Adam."""

  type: Literal['adamw'] = 'adamw'


class CreateModel(_WireModel):
  """Begins a training run."""

  session_id: _Id
  model_seq_id: _Seq
  base_model: str
  user_metadata: _Metadata = None
  lora_config: LoraConfig = LoraConfig(rank=32)
  optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelId(_WireModel):
  """Names a training run."""

  model_id: _Id


class AdamParams(_WireModel):
  """The hyperparameters of a step of Adam."""

  learning_rate: _Number = Field(default=1e-4, ge=0)
  beta1: _Number = Field(default=0.9, ge=0, lt=1)
  beta2: _Number = Field(default=0.95, ge=0, lt=1)
  # Where the second moment is 0, so is the first: avoids 0 / 0.
  eps: _Number = Field(default=1e-12, ge=1e-30)
  weight_decay: _Number = Field(default=0.0, ge=0)
  grad_clip_norm: _Number = Field(default=0.0, ge=0)


class _Operation(ModelId):
  """An operation of a run; operations are executed in the order of their numbers."""

  seq_id: _Seq


class OptimStep(_Operation):
  """Makes a step of Adam."""

  adam_params: AdamParams


class _Saving(_Operation):
  """Saves part of a run."""

  ttl_seconds: int | None = Field(default=None, ge=1)
  user_metadata: Annotated[dict[str, str] | None, Field(max_length=64)] = None


class SaveWeights(_Saving):
  """Saves a run's state."""

  path: _Path
  overwrite: bool = False


class SaveForSampler(_Saving):
  """Saves a run's weights for sampling: under a name, or only for a sampling session."""

  path: _Path | None = None
  sampling_session_seq_id: _Seq | None = None
  kind: Literal['snapshot', 'inflight'] = 'snapshot'

  @model_validator(mode='after')
  def _check(self):
    if (self.path is None) == (self.sampling_session_seq_id is None):
      raise ValueError('give path or sampling_session_seq_id')
    return self


class LoadWeights(_WireModel):
  """Loads a state into a run, or begins a run with it."""

  model_id: _Id | None = None
  seq_id: _Seq | None = None
  session_id: _Id | None = None
  model_seq_id: _Seq | None = None
  base_model: str | None = None
  user_metadata: _Metadata = None
  path: _Path
  optimizer: bool
  optimizer_config: OptimizerConfig | None = None
  weights_access_token: None = None

  @model_validator(mode='after')
  def _check(self):
    into = self.model_id is not None and self.seq_id is not None
    begins = self.session_id is not None and self.model_seq_id is not None
    if into == begins:
      raise ValueError('give model_id and seq_id, or session_id and model_seq_id')
    return self


class CreateSamplingSession(_WireModel):
  """Begins a sampling session."""

  session_id: _Id
  sampling_session_seq_id: _Seq
  base_model: str | None = None
  model_path: _Path | None = None


class Chunk(_WireModel):
  """Tokens of a prompt."""

  type: Literal['encoded_text'] = 'encoded_text'
  tokens: list[int]


class ModelInput(_WireModel):
  """A prompt."""

  chunks: list[Chunk] = Field(max_length=1024)


class SamplingParams(_WireModel):
  """The sampling settings, and what ends a reply."""

  max_tokens: int | None = Field(default=None, ge=1)
  seed: int | None = None
  stop: str | list[str] | list[int] | None = None
  temperature: _Number = Field(default=1.0, ge=0, le=100)
  top_k: int = Field(default=-1, ge=-1, le=_MAX_INT)
  top_p: _Number = Field(default=1.0, ge=1e-6, le=1)


class Sparse(_WireModel):
  """A tensor in JSON; with indices, a sparse matrix in CSR."""

  data: list[_Int] = Field(max_length=1 << 20)
  dtype: Literal['int64']
  shape: tuple[_Int, _Int]
  sparse_crow_indices: list[_Int] | None = None
  sparse_col_indices: list[_Int] | None = None


class Sample(_WireModel):
  """Samples replies to a prompt."""

  num_samples: int = Field(default=1, ge=1, le=1024)
  prompt: ModelInput
  sampling_params: SamplingParams
  sampling_session_id: _Id
  seq_id: _Seq
  prompt_logprobs: bool | None = None
  topk_prompt_logprobs: Literal[0] = 0
  topk_sample_logprobs: int = Field(default=0, ge=0)
  target_prompt_logprobs: Sparse | None = None
  prompt_alt_tokens_k: Literal[0] = 0
  prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
  record_stability_info: Literal[False] | None = None


class RetrieveFuture(_WireModel):
  """Asks for the result of a request."""

  request_id: Annotated[str, Field(max_length=256)]
  allow_metadata_only: bool = False


class TinkerPath(_WireModel):
  """Names a saved state."""

  tinker_path: _Path


class Page(BaseModel):
  """The requested part of a list, in the query of the address."""

  limit: int = Field(default=100, ge=0, lt=10**9)
  offset: int = Field(default=0, ge=0, lt=10**9)
