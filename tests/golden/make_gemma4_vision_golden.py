"""Makes tests/golden/decoder/gemma4, gemma4_ahead and tests/golden/gemma4_pictures.npz.

Commands, with torch 2.13.0, transformers 5.23.0 and pillow 13.0.0:
  python tests/golden/make_gemma4_vision_golden.py [gemma4|gemma4_ahead]
  python tests/golden/make_gemma4_vision_golden.py --check=DIR

The files are those of make_vision_golden.py, without coordinates, which Gemma 4 lacks,
and with the gradients of the tower: gradients.npz has, by the names of transformers,
those of the mean log-prob of token 5 over the first row of pictures. All numbers are
computed in float64.
gemma4_pictures.npz has pictures 'pixels_<i>' as transformers resizes and cuts them,
'patches_<i>', 'positions_<i>', for at most 'most_<i>' tokens.

The second command loads an export of a tiny model and compares logits.
"""

import pathlib
import shutil
import sys

import make_vision_golden
import numpy as np
from PIL import Image
import torch
import transformers
from transformers.models.gemma4.image_processing_pil_gemma4 import (
  Gemma4ImageProcessorPil,
)

_GOLDEN = pathlib.Path(__file__).parent
_IMAGE, _START, _END = 93, 95, 96
_TEXT = {
  'vocab_size': 97,
  'vocab_size_per_layer_input': 97,
  'hidden_size': 24,
  'intermediate_size': 20,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'layer_types': ['sliding_attention', 'full_attention'] * 2,
  'head_dim': 8,
  'global_head_dim': 12,
  'sliding_window': 7,
  'final_logit_softcapping': 3.0,
  'rms_norm_eps': 1e-2,
  'bos_token_id': None,
  'eos_token_id': None,
  'rope_parameters': {
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0},
    'full_attention': {
      'rope_type': 'proportional',
      'partial_rotary_factor': 0.5,
      'rope_theta': 100.0,
    },
  },
}
# A token is 3 x 3 patches, 12 x 12 pixels.
_VISION = {
  'hidden_size': 16,
  'intermediate_size': 20,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'patch_size': 4,
  'position_embedding_size': 20,
  'rms_norm_eps': 1e-2,
  'use_clipped_linears': True,
  'standardize': True,
}
_CONFIG = {
  'text_config': _TEXT
  | {
    'num_kv_shared_layers': 2,
    'use_double_wide_mlp': True,
    'hidden_size_per_layer_input': 6,
  },
  'vision_config': _VISION,
  'image_token_id': _IMAGE,
  'video_token_id': 94,
  'audio_token_id': 94,
  'boi_token_id': _START,
  'eoi_token_id': _END,
}
# As 26B-A4B is, where tokens of a picture see its later ones.
_AHEAD = _CONFIG | {
  'text_config': _TEXT
  | {
    'attention_k_eq_v': True,
    'num_global_key_value_heads': 1,
    'enable_moe_block': True,
    'num_experts': 6,
    'top_k_experts': 2,
    'moe_intermediate_size': 12,
    'hidden_size_per_layer_input': 0,
    'use_bidirectional_attention': 'vision',
  },
  'vision_config': _VISION | {'use_clipped_linears': False, 'standardize': False},
}
_MODELS = {'gemma4': _CONFIG, 'gemma4_ahead': _AHEAD}
_TEXTS = (48, 11, 1)
_ROWS = ((7, (3, 5), 4, (6, 5), 9), ((2, 3), 5))
# Pictures' sizes, and the most tokens of 12 x 12 pixels.
_CUTS = (((61, 40), 70), ((20, 290), 70), ((170, 130), 70))


def _randomize(model, generator):
  def draw(x):
    return torch.randn(x.shape, generator=generator)

  for name, x in model.named_parameters():
    if 'norm' in name or name.endswith(('router.scale', 'per_expert_scale')):
      x.data = 1.0 + 0.3 * draw(x)
    elif 'embed_tokens' in name or 'position_embedding' in name:
      x.data = 0.5 * draw(x)
    else:
      x.data = draw(x) / x.shape[-1] ** 0.5
  for name, x in model.named_buffers():
    if name.endswith(('layer_scalar', 'std_scale')):
      x.data = 1.0 + 0.3 * draw(x)
    elif name.endswith('std_bias'):
      x.data = draw(x)
    elif name.endswith(('_min', '_max')):  # Some numbers of each product are cut off.
      x.data = (-1.0 if name.endswith('min') else 1.0) * (1.5 + 0.3 * draw(x))


def _cut(pixels):
  """Patches as the processor cuts them, and where they lie, by column and row."""
  rows, columns = pixels.shape[0] // 4, pixels.shape[1] // 4
  x = pixels.reshape(rows, 4, columns, 4, 3).transpose(0, 2, 1, 3, 4)
  row, column = np.divmod(np.arange(rows * columns), columns)
  return x.reshape(rows * columns, -1) / 255.0, np.stack([column, row], axis=1)


def _draw_rows(model):
  """The inputs of each row, and its pictures."""
  generator = torch.Generator().manual_seed(1)
  rng = np.random.default_rng(1)
  for parts in _ROWS:
    tokens, pictures = [], []
    for part in parts:
      if isinstance(part, int):
        tokens += torch.randint(0, _IMAGE, (part,), generator=generator).tolist()
        continue
      pictures.append(make_vision_golden._draw(part[0] * 12, part[1] * 12, rng))
      tokens += [_START, *[_IMAGE] * (part[0] * part[1]), _END]
    cuts = [_cut(x) for x in pictures]
    most = max(len(x) for x, _ in cuts)
    patches = np.zeros((len(cuts), most, 48))
    places = np.full((len(cuts), most, 2), -1)
    for i, (x, y) in enumerate(cuts):
      patches[i, : len(x)], places[i, : len(x)] = x, y
    tokens = torch.tensor([tokens])
    given = {
      'input_ids': tokens,
      'mm_token_type_ids': (tokens == _IMAGE).int(),
      'pixel_values': torch.from_numpy(patches).to(model.dtype),
      'image_position_ids': torch.from_numpy(places),
    }
    yield given, pictures


@torch.no_grad()
def _make_rows(model):
  generator = torch.Generator().manual_seed(1)
  text, seen, features, number = {}, {}, [], 0
  for row, length in enumerate(_TEXTS):
    tokens = torch.randint(0, _IMAGE, (1, length), generator=generator)
    text[f'logits_{row}'] = model(tokens).logits[0].numpy()
    text[f'tokens_{row}'] = tokens[0].numpy().astype(np.int32)
  for row, (given, pictures) in enumerate(_draw_rows(model)):
    seen[f'tokens_{row}'] = given['input_ids'][0].numpy().astype(np.int32)
    seen[f'logits_{row}'] = model(**given).logits[0].numpy()
    images = given['pixel_values'], given['image_position_ids']
    features += model.model.get_image_features(*images).pooler_output
    for pixels in pictures:
      seen[f'pixels_{number}'] = pixels
      number += 1
  return text, seen | {'features': torch.cat(features).numpy()}


def _differentiate(model):
  """Gradients of the tower, and of what projects its features."""
  given, _ = next(_draw_rows(model))
  model(**given).logits.log_softmax(-1)[0, :, 5].mean().backward()
  named = model.named_parameters()
  seen = ('model.vision_tower.', 'model.embed_vision.')
  return {k: x.grad.numpy().astype(np.float32) for k, x in named if k.startswith(seen)}


def _widen():
  """Makes float64 of float32 where transformers takes it in a model of float64."""
  softmax = torch.nn.functional.softmax
  torch.Tensor.float, torch.float = torch.Tensor.double, torch.float64
  torch.nn.functional.softmax = lambda x, dim, dtype=None: softmax(x, dim)


def _load(directory, dtype=torch.float32):
  return transformers.AutoModelForImageTextToText.from_pretrained(
    directory,
    dtype=dtype,
    attn_implementation='eager',
    experts_implementation='eager',
  ).eval()


def make(name):
  """Makes a model and its rows."""
  folder = _GOLDEN / 'decoder' / name
  shutil.rmtree(folder, ignore_errors=True)
  config = transformers.Gemma4Config(**_MODELS[name])
  model = transformers.Gemma4ForConditionalGeneration(config)
  _randomize(model, torch.Generator().manual_seed(0))
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink()
  _widen()
  text, seen = _make_rows(_load(folder, torch.float64))
  for file, arrays in (('logits', text), ('pictures', seen)):
    narrow = {
      k: x.astype(np.float32) if x.dtype == np.float64 else x for k, x in arrays.items()
    }
    np.savez_compressed(folder / f'{file}.npz', **narrow)
  found = _differentiate(_load(folder, torch.float64))
  np.savez_compressed(folder / 'gradients.npz', **found)


def make_cuts():
  """Makes gemma4_pictures.npz."""
  rng, cuts = np.random.default_rng(0), {}
  for i, (size, most) in enumerate(_CUTS):
    cuts[f'pixels_{i}'] = pixels = make_vision_golden._draw(*size, rng)
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=most)
    out = processor(Image.fromarray(pixels), return_tensors='np')
    places = out['image_position_ids'][0]
    used = (places >= 0).all(-1)
    patches = np.round(out['pixel_values'][0][used] * 255).astype(np.uint8)
    cuts |= {f'patches_{i}': patches, f'positions_{i}': places[used]}
    cuts[f'most_{i}'] = np.array(most)
  np.savez_compressed(_GOLDEN / 'gemma4_pictures.npz', **cuts)


def check(directory):
  """Compares the logits of an export with those of the golden files."""
  model = _load(directory)
  ahead = model.config.text_config.use_bidirectional_attention
  folder = _GOLDEN / 'decoder' / ('gemma4_ahead' if ahead else 'gemma4')
  for name, found in zip(('logits', 'pictures'), _make_rows(model)):
    with np.load(folder / f'{name}.npz') as expected:
      for key, x in found.items():
        atol = 2e-5 * max(1.0, float(np.abs(expected[key]).max()))
        np.testing.assert_allclose(x, expected[key], rtol=0, atol=atol, err_msg=key)
  print('equal')


if __name__ == '__main__':
  option = sys.argv[1:]
  if option and option[0].startswith('--check='):
    check(option[0].removeprefix('--check='))
  else:
    for model_name in option or _MODELS:
      make(model_name)
    if not option:
      make_cuts()
