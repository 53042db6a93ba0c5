"""Settings of the models."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from agent_r1_jax import fields


class _Formats:
  """What belongs to a configuration of models, and is no field of it.

  Attributes:
    formats: Formats of models other than HF's (models/files/tensor_files.Format), such as
      contrib.gguf.FORMAT. As Python objects they are neither flags nor in config.json.
  """

  formats: Sequence[Any] = ()


@dataclasses.dataclass
class Model(_Formats):
  """The models that are loaded, and how they compute.

  Attributes:
    path: Directory of the policy to start from: weights and tokenizer in HF layout. Or
      what one of `formats` reads, beside which the tokenizer's files lie.
    reference: Directory of the reference policy or teacher, which must have the same
      tokenizer; if it is empty, the reference is the initial policy.
    dtype: Type of activations and KV cache: 'float32' or 'bfloat16'.
    batch_invariant: Whether the sampler's log-probs and the learner's are equal to the
      last bit, whatever is computed beside a token (batch, chunks of a prefill, shared
      prefixes, packing): the importance ratio of the first update is exactly 1. On one
      CPU only; docs/models.md has its price.
    remat: Activations recomputed in the backward pass: 'none', 'dots' or 'full'. If it is
      empty it is 'none', or 'full' where that does not fit the memory.
    lora_rank: Rank of the LoRA adapters that are trained in place of all parameters; 0
      trains all.
    lora_targets: The projections with adapters, separated by commas.
    lora_alpha: Adapters are scaled by lora_alpha / lora_rank.
    frozen: The numbers in the kernels under adapters: 'float32'; or 'int8' or 'fp8', of 8
      bits with a scale for each output, in learner and sampler alike (QLoRA). Embeddings
      and the head are then stored in `dtype`.
  """

  path: str = ''
  reference: str = ''
  dtype: str = 'float32'
  batch_invariant: bool = False
  remat: str = ''
  lora_rank: int = 0
  lora_targets: str = 'q,k,v,o,gate,up,down'
  lora_alpha: float = 16.0
  frozen: str = 'float32'

  @property
  def adapter_targets(self) -> tuple[str, ...]:
    """The names in `lora_targets`."""
    return tuple(name.strip() for name in self.lora_targets.split(','))

  def check(self) -> None:
    """Raises ValueError for a wrong value, or two that contradict each other."""
    choices = {'dtype': ('float32', 'bfloat16'), 'remat': ('none', 'dots', 'full')}
    choices['frozen'] = ('float32', 'int8', 'fp8')
    if not self.remat:
      del choices['remat']
    fields.check(self, 'model', above_0=('lora_alpha',), choices=choices)
    if self.batch_invariant and self.lora_rank:
      raise ValueError(
        f'model.batch_invariant: with model.lora_rank={self.lora_rank} the bits of the '
        'sampler and the learner are not known to be equal; leave out one of them.'
      )
