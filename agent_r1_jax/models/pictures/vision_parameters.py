"""The parameters of a vision tower, as rows of the table in families.py.

A layers, W embed, M heads, h head dim, J feed-forward, Q embed of all patches of a token,
C channels, t frames and p pixels of a patch, d embed of the decoder; w and q are W and Q
where no mesh splits them. What is not split is small, or its gradient would be.
"""

# Letter -> the field of VisionConfig with its size.
SIZES = {
  'A': 'num_layers',
  'W': 'embed_dim',
  'w': 'embed_dim',
  'M': 'num_heads',
  'h': 'head_dim',
  'J': 'mlp_dim',
  'Q': 'merged_dim',
  'q': 'merged_dim',
  'C': 'channels',
  't': 'temporal_patch_size',
  'p': 'patch_size',
}
_BLOCK = (
  ('attn_norm/scale', 'norm1.weight', 'w'),
  ('attn/qkv/kernel', 'attn.qkv.weight', 'W>3Mh'),
  ('attn/qkv/bias', 'attn.qkv.bias', '>3Mh'),
  ('attn/out/kernel', 'attn.proj.weight', 'Mh>W'),
  ('attn/out/bias', 'attn.proj.bias', 'w'),
  ('mlp_norm/scale', 'norm2.weight', 'w'),
  ('gate/kernel', 'mlp.gate_proj.weight', 'W>J'),
  ('gate/bias', 'mlp.gate_proj.bias', 'J'),
  ('up/kernel', 'mlp.up_proj.weight', 'W>J'),
  ('up/bias', 'mlp.up_proj.bias', 'J'),
  ('down/kernel', 'mlp.down_proj.weight', 'J>W'),
  ('down/bias', 'mlp.down_proj.bias', 'w'),
)
_MERGER = (
  ('in_norm/scale', 'ln_q.weight', 'w'),
  ('in/kernel', 'mlp.0.weight', 'Q>q'),
  ('in/bias', 'mlp.0.bias', 'q'),
  ('out/kernel', 'mlp.2.weight', 'Q>d'),
  ('out/bias', 'mlp.2.bias', 'd'),
)
# Path, tensor and dimensions of each.
PARAMETERS = (
  *((f'vision/blocks/{x}', f'visual.blocks.{{}}.{y}', f'A{z}') for x, y, z in _BLOCK),
  *((f'vision/merger/{x}', f'visual.merger.{y}', z) for x, y, z in _MERGER),
)
# That of a convolution, whose tensor has a dimension for each of its inputs.
PATCH = ('vision/patch/kernel', 'visual.patch_embed.proj.weight', 'Ctpp>W')
