"""Makes tests/golden/decoder/qwen2_5_vl and tests/golden/pictures.npz.

Commands, with torch 2.13.0, transformers 5.23.0 and pillow 13.0.0:
  python tests/golden/make_vision_golden.py
  python tests/golden/make_vision_golden.py --check=DIR

The first is a tiny random model as make_decoder_golden.py makes them, whose logits.npz
has rows of text, and whose pictures.npz rows of text and pictures: 'tokens_<row>' [T],
'logits_<row>' [T, V], 'coordinates_<row>' [T, 3], and 'features' [F, D] of all pictures
in their order. pictures.npz holds pictures as transformers cuts them: 'pixels_<i>' is a
picture [H, W, 3], and 'patches_<i>' and 'grid_<i>' are what becomes of it.

The second loads an export of the tiny model and compares logits.
"""

import pathlib
import shutil
import sys

import numpy as np
from PIL import Image
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
  Qwen2VLImageProcessorPil,
)

_GOLDEN = pathlib.Path(__file__).parent
_MODEL = _GOLDEN / 'decoder' / 'qwen2_5_vl'
_IMAGE, _VIDEO, _START, _END = 93, 94, 95, 96
_CONFIG = {
  'text_config': {
    'vocab_size': 97,
    'hidden_size': 48,
    'intermediate_size': 40,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'rms_norm_eps': 1e-3,
    'bos_token_id': None,
    'eos_token_id': None,
    # Of six pairs of a head one turns by time, two by row and three by column.
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': 1000.0,
      'mrope_section': [1, 2, 3],
    },
  },
  # A window is 2 x 2 tokens, or 16 patches.
  'vision_config': {
    'depth': 4,
    'hidden_size': 16,
    'intermediate_size': 20,
    'num_heads': 2,
    'patch_size': 4,
    'window_size': 16,
    'out_hidden_size': 48,
    'fullatt_block_indexes': [2],
  },
  'image_token_id': _IMAGE,
  'video_token_id': _VIDEO,
  'vision_start_token_id': _START,
  'vision_end_token_id': _END,
}
_TEXTS = (48, 11, 1)
# Rows of texts and pictures: lengths of text, and grids of tokens.
_ROWS = (
  (7, (3, 5), 4, (6, 5), 9),
  ((2, 3), 5),
)
_CUTS = (  # Pictures' sizes, and the bounds of their pixels, in patches of 14.
  ((61, 40), 28 * 28, 28 * 28 * 12),
  ((20, 90), 28 * 28 * 4, 28 * 28 * 12),
  ((130, 170), 28 * 28, 28 * 28 * 6),
)


def _randomize(model, generator):
  for name, x in model.named_parameters():
    noise = torch.randn(x.shape, generator=generator)
    if 'norm' in name or 'ln_q' in name:
      x.data = 1.0 + 0.3 * noise
    elif name.endswith('bias') or 'embed_tokens' in name:
      x.data = 0.5 * noise
    else:
      x.data = 1.5 * noise / x[0].numel() ** 0.5


def _draw(height, width, rng):
  """A picture of noise on a gradient."""
  rows, columns = np.mgrid[:height, :width]
  base = np.stack([rows * 3, columns * 2, rows + columns], axis=-1)
  return ((base + rng.integers(0, 90, base.shape)) % 256).astype(np.uint8)


def _cut(pixels, patch_size, **bounds):
  processor = Qwen2VLImageProcessorPil(patch_size=patch_size, **bounds)
  out = processor(Image.fromarray(pixels), return_tensors='np')
  return out['pixel_values'].astype(np.float32), out['image_grid_thw'][0]


def _run(model, parts, generator, rng):
  """Tokens, coordinates, logits, pictures and features of one row."""
  tokens, patches, grids, pictures = [], [], [], []
  for part in parts:
    if isinstance(part, int):
      tokens += torch.randint(0, _IMAGE, (part,), generator=generator).tolist()
      continue
    pixels = _draw(part[0] * 8, part[1] * 8, rng)
    cut, grid = _cut(pixels, 4, min_pixels=64, max_pixels=10**6)
    assert list(grid) == [1, 2 * part[0], 2 * part[1]]
    pictures.append(pixels)
    patches.append(torch.from_numpy(cut))
    grids.append(torch.from_numpy(grid))
    tokens += [_START, *[_IMAGE] * (part[0] * part[1]), _END]
  tokens = torch.tensor([tokens])
  kinds = (tokens == _IMAGE).int()
  patches, grids = torch.cat(patches), torch.stack(grids)
  with torch.no_grad():
    out = model(
      input_ids=tokens,
      pixel_values=patches,
      image_grid_thw=grids,
      mm_token_type_ids=kinds,
    )
    places, _ = model.model.get_rope_index(tokens, kinds, image_grid_thw=grids)
    features = model.model.visual(patches, grid_thw=grids).pooler_output
  return tokens[0], places[:, 0].T, out.logits[0], pictures, features


def _make_rows(model):
  generator = torch.Generator().manual_seed(1)
  rng = np.random.default_rng(1)
  text, seen, features = {}, {}, []
  for row, length in enumerate(_TEXTS):
    tokens = torch.randint(0, _IMAGE, (1, length), generator=generator)
    with torch.no_grad():
      text[f'logits_{row}'] = model(tokens).logits[0].numpy()
    text[f'tokens_{row}'] = tokens[0].numpy().astype(np.int32)
  number = 0
  for row, parts in enumerate(_ROWS):
    tokens, places, logits, pictures, found = _run(model, parts, generator, rng)
    seen[f'tokens_{row}'] = tokens.numpy().astype(np.int32)
    seen[f'coordinates_{row}'] = places.numpy().astype(np.int32)
    seen[f'logits_{row}'] = logits.numpy()
    features.append(found.numpy())
    for pixels in pictures:
      seen[f'pixels_{number}'] = pixels
      number += 1
  return text, seen | {'features': np.concatenate(features)}


def _load(directory):
  return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager'
  ).eval()


def make():
  """Makes both."""
  shutil.rmtree(_MODEL, ignore_errors=True)
  model = transformers.Qwen2_5_VLForConditionalGeneration(
    transformers.Qwen2_5_VLConfig(**_CONFIG)
  )
  _randomize(model, torch.Generator().manual_seed(0))
  model.save_pretrained(_MODEL)
  (_MODEL / 'generation_config.json').unlink()
  text, seen = _make_rows(_load(_MODEL))
  np.savez_compressed(_MODEL / 'logits.npz', **text)
  np.savez_compressed(_MODEL / 'pictures.npz', **seen)
  rng, cuts = np.random.default_rng(0), {}
  for i, (size, least, most) in enumerate(_CUTS):
    cuts[f'pixels_{i}'] = _draw(*size, rng)
    cuts[f'patches_{i}'], cuts[f'grid_{i}'] = _cut(
      cuts[f'pixels_{i}'], 14, min_pixels=least, max_pixels=most
    )
    cuts[f'bounds_{i}'] = np.array([least, most])
  np.savez_compressed(_GOLDEN / 'pictures.npz', **cuts)


def check(directory):
  """Compares the logits of an export with those of the golden files."""
  for name, found in zip(('logits', 'pictures'), _make_rows(_load(directory))):
    with np.load(_MODEL / f'{name}.npz') as expected:
      for key, x in found.items():
        np.testing.assert_allclose(x, expected[key], rtol=0, atol=1e-5, err_msg=key)
  print('equal')


if __name__ == '__main__':
  option = sys.argv[1:]
  check(option[0].removeprefix('--check=')) if option else make()
