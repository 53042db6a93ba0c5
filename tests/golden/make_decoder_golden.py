"""Makes tests/golden/decoder: tiny random models and the logits transformers gives them.

Command: python tests/golden/make_decoder_golden.py  (torch 2.13.0, transformers 5.23.0;
gpt_oss, qwen3_5, gemma4: torch 2.11.0, transformers 5.17.0). Names of models after the
command make these alone.

A directory per model: config.json and safetensors as `save_pretrained` wrote them, and
logits.npz with 'tokens_<row>' [T] and 'logits_<row>' [T, V], each row run on its own.
Every parameter is drawn at random (transformers starts biases at 0 and norms at 1,
which would hide that they are ignored); RMS epsilons are large for the same reason.
"""

import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

_DIRECTORY = pathlib.Path(__file__).parent / 'decoder'
_SIZES = {
  'vocab_size': 97,
  'hidden_size': 24,
  'intermediate_size': 40,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
}
# With head dim 8 and base 100 the wavelengths are 6, 20, 63 and 199: below, between
# and above 32 / 4 and 32 / 1, so each branch of Llama 3's scaling is in use.
_LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 100.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
# Of four pairs YaRN keeps the first, mixes the second and divides the others.
_YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'beta_fast': 3.0,
  'beta_slow': 0.5,
  'original_max_position_embeddings': 32,
}
_EXPERTS = {'num_experts': 6, 'num_experts_per_tok': 2, 'moe_intermediate_size': 12}
_STATES = {
  'layer_types': ['linear_attention', 'full_attention'] * 2,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 6,
  'linear_value_head_dim': 5,
}
_MODELS = {
  'qwen2': transformers.Qwen2Config(
    **_SIZES,
    tie_word_embeddings=True,
    rms_norm_eps=1e-3,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
  ),
  'qwen3': transformers.Qwen3Config(
    **_SIZES,
    head_dim=8,
    rms_norm_eps=1e-2,
    rope_parameters={'rope_type': 'default', 'rope_theta': 5000.0},
  ),
  'llama': transformers.LlamaConfig(
    **_SIZES, head_dim=8, rms_norm_eps=1e-3, rope_parameters=_LLAMA3
  ),
  'gemma': transformers.GemmaConfig(
    **_SIZES,
    head_dim=8,
    rms_norm_eps=1e-3,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
  ),
  'mistral': transformers.MistralConfig(
    **_SIZES,
    head_dim=8,
    rms_norm_eps=1e-3,
    sliding_window=5,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
  ),
  'smollm3': transformers.SmolLM3Config(
    **_SIZES,
    rms_norm_eps=1e-3,
    no_rope_layers=[1, 0],
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
  ),
  'phi3': transformers.Phi3Config(
    **_SIZES,
    rms_norm_eps=1e-3,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    rope_parameters={
      'rope_type': 'default',
      'rope_theta': 1000.0,
      'partial_rotary_factor': 0.75,
    },
  ),
  'olmo2': transformers.Olmo2Config(
    **_SIZES,
    rms_norm_eps=1e-2,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
  ),
  'olmo3': transformers.Olmo3Config(
    **_SIZES,
    rms_norm_eps=1e-2,
    sliding_window=7,
    layer_types=['sliding_attention', 'full_attention'],
    rope_parameters={
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
      'full_attention': {**_YARN, 'rope_theta': 100.0},
    },
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
  ),
  'gemma2': transformers.Gemma2Config(
    **_SIZES,
    head_dim=8,
    rms_norm_eps=1e-3,
    query_pre_attn_scalar=6,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    sliding_window=7,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
  ),
  'gemma3_text': transformers.Gemma3TextConfig(
    **_SIZES,
    head_dim=8,
    rms_norm_eps=1e-3,
    query_pre_attn_scalar=6,
    sliding_window=5,
    layer_types=['sliding_attention', 'full_attention'],
    rope_parameters={
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0},
      'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1000.0},
    },
  ),
  'qwen2_moe': transformers.Qwen2MoeConfig(
    **_SIZES,
    **_EXPERTS,
    shared_expert_intermediate_size=20,
    rms_norm_eps=1e-3,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
  ),
  'qwen3_moe': transformers.Qwen3MoeConfig(
    **_SIZES,
    **_EXPERTS,
    head_dim=8,
    norm_topk_prob=True,
    rms_norm_eps=1e-2,
    rope_parameters={'rope_type': 'default', 'rope_theta': 5000.0},
  ),
  'gpt_oss': transformers.GptOssConfig(
    **_SIZES | {'intermediate_size': 12},
    num_local_experts=6,
    num_experts_per_tok=2,
    head_dim=8,
    sliding_window=7,
    rms_norm_eps=1e-2,
    rope_parameters={**_YARN, 'rope_theta': 100.0, 'truncate': False},
  ),
  'qwen3_5_text': transformers.Qwen3_5TextConfig(
    **_SIZES | {'num_hidden_layers': 4},
    **_STATES,
    head_dim=8,
    rms_norm_eps=1e-2,
    rope_parameters={
      'rope_type': 'default',
      'rope_theta': 100.0,
      'partial_rotary_factor': 0.5,
    },
  ),
  'qwen3_5_moe_text': transformers.Qwen3_5MoeTextConfig(
    **{k: x for k, x in _SIZES.items() if k != 'intermediate_size'},
    **_EXPERTS,
    **_STATES | {'layer_types': ['linear_attention', 'full_attention']},
    shared_expert_intermediate_size=20,
    head_dim=8,
    rms_norm_eps=1e-2,
    rope_parameters={
      'rope_type': 'default',
      'rope_theta': 100.0,
      'partial_rotary_factor': 0.5,
    },
  ),
}
_GEMMA4 = {
  **_SIZES,
  'num_hidden_layers': 6,
  'layer_types': ['sliding_attention', 'full_attention'] * 3,
  'head_dim': 8,
  'global_head_dim': 12,
  'sliding_window': 5,
  'final_logit_softcapping': 3.0,
  'rms_norm_eps': 1e-2,
  'rope_parameters': {
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0},
    'full_attention': {
      'rope_type': 'proportional',
      'partial_rotary_factor': 0.5,
      'rope_theta': 100.0,
    },
  },
}
# As E2B and E4B are, and as 26B-A4B is; 12B and 31B have the latter's attention.
_MODELS['gemma4_text'] = transformers.Gemma4TextConfig(
  **_GEMMA4,
  num_kv_shared_layers=2,
  use_double_wide_mlp=True,
  hidden_size_per_layer_input=6,
  vocab_size_per_layer_input=97,
)
_MODELS['gemma4_experts'] = transformers.Gemma4TextConfig(
  **_GEMMA4 | {'num_hidden_layers': 4, 'layer_types': _GEMMA4['layer_types'][:4]},
  attention_k_eq_v=True,
  num_global_key_value_heads=1,
  enable_moe_block=True,
  num_experts=6,
  top_k_experts=2,
  moe_intermediate_size=12,
  hidden_size_per_layer_input=0,
  vocab_size_per_layer_input=97,
)
_MODELS['gemma4_unified_text'] = transformers.Gemma4UnifiedTextConfig(
  **_GEMMA4 | {'num_hidden_layers': 2, 'layer_types': _GEMMA4['layer_types'][:2]},
  attention_k_eq_v=True,
  num_global_key_value_heads=1,
)
_DTYPES = {'qwen2': torch.bfloat16}  # The others are float32.
_LENGTHS = (48, 11, 1)


def _randomize(model, generator):
  for name, x in model.named_parameters():
    noise = torch.randn(x.shape, generator=generator)
    if 'norm' in name or name.endswith(('router.scale', 'per_expert_scale')):
      x.data = 1.0 + 0.3 * noise
    elif name.endswith('A_log'):
      x.data = noise - 2.0  # Some heads forget soon, others late.
    elif name.endswith('bias') or 'embed' in name:
      x.data = 0.5 * noise
    elif name.endswith('gate_up_proj'):
      x.data = noise  # Some numbers of gpt-oss are cut off at 7.
    else:
      x.data = 1.5 * noise / x.shape[-1] ** 0.5
  for name, x in model.named_buffers():
    if name.endswith('layer_scalar'):
      x.data = 1.0 + 0.3 * torch.randn(x.shape, generator=generator)


def main():
  generator = torch.Generator().manual_seed(0)
  for name in sys.argv[1:] or _MODELS:
    config = _MODELS[name]
    shutil.rmtree(_DIRECTORY / name, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_config(
      config, attn_implementation='eager'
    )
    _randomize(model, generator)
    model.tie_weights()
    model = model.to(_DTYPES.get(name, torch.float32))
    # Qwen3 is saved in several shards, as transformers cuts them.
    size = '20KB' if name == 'qwen3' else '1GB'
    model.save_pretrained(_DIRECTORY / name, max_shard_size=size)
    (_DIRECTORY / name / 'generation_config.json').unlink()
    # Loaded again: `.to(bfloat16)` also rounds RoPE's frequencies, which are not stored.
    model = transformers.AutoModelForCausalLM.from_pretrained(
      _DIRECTORY / name, dtype=torch.float32, attn_implementation='eager'
    ).eval()
    rows = {}
    for row, length in enumerate(_LENGTHS):
      tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
      with torch.no_grad():
        logits = model(tokens).logits
      rows[f'tokens_{row}'] = tokens[0].numpy().astype(np.int32)
      rows[f'logits_{row}'] = logits[0].numpy()
    np.savez_compressed(_DIRECTORY / name / 'logits.npz', **rows)


if __name__ == '__main__':
  main()
