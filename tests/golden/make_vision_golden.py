"""Makes tests/golden/decoder/qwen2_5_vl, qwen3_vl and tests/golden/pictures.npz.

Commands, with torch 2.13.0, transformers 5.23.0 and pillow 13.0.0 (qwen3_vl: torch
2.11.0, transformers 5.17.0):
  python tests/golden/make_vision_golden.py [qwen2_5_vl|qwen3_vl]
  python tests/golden/make_vision_golden.py --check=DIR

The first are tiny random models as make_decoder_golden.py makes them, whose logits.npz
has rows of text, and whose pictures.npz rows of text and pictures: 'tokens_<row>' [T],
'logits_<row>' [T, V], 'coordinates_<row>' [T, 3], and 'features' [F, n D] of all pictures
in their order, each behind the other those of the last layer and of DeepStack's. A pair
of frames of a film is a picture, 'pixels_<i>' [H, W, 6]. pictures.npz holds pictures as
transformers cuts them: 'pixels_<i>' is a picture [H, W, 3], and 'patches_<i>' and
'grid_<i>' are what becomes of it.

The second loads an export of a tiny model and compares logits.
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
# Pairs of a head turn by 0 1 2 0 1 0, and patches lie between the places of a 3 x 3.
_CONFIG3 = _CONFIG | {
  'text_config': _CONFIG['text_config']
  | {
    'num_hidden_layers': 3,
    'head_dim': 12,
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': 1000.0,
      'mrope_section': [3, 2, 1],
      'mrope_interleaved': True,
    },
  },
  'vision_config': {
    'depth': 4,
    'hidden_size': 16,
    'intermediate_size': 20,
    'num_heads': 2,
    'patch_size': 4,
    'out_hidden_size': 48,
    'num_position_embeddings': 9,
    'deepstack_visual_indexes': [1, 2],
  },
  'tie_word_embeddings': True,
}
_CONFIG3['text_config']['tie_word_embeddings'] = True
_MODELS = {
  'qwen2_5_vl': (transformers.Qwen2_5_VLForConditionalGeneration, _CONFIG),
  'qwen3_vl': (transformers.Qwen3VLForConditionalGeneration, _CONFIG3),
}
_TEXTS = (48, 11, 1)
# Rows of texts and pictures: lengths of text, and grids of tokens. A third number is how
# many pairs of frames a film has, each behind the text that says its time.
_ROWS = {
  'qwen2_5_vl': ((7, (3, 5), 4, (6, 5), 9), ((2, 3), 5)),
  'qwen3_vl': ((7, (3, 5), 4, (6, 5), 9), ((2, 3), 5, (2, 4, 2), 3)),
}
_CUTS = (  # Pictures' sizes, and the bounds of their pixels, in patches of 14.
  ((61, 40), 28 * 28, 28 * 28 * 12),
  ((20, 90), 28 * 28 * 4, 28 * 28 * 12),
  ((130, 170), 28 * 28, 28 * 28 * 6),
)


def _randomize(model, generator):
  for name, x in model.named_parameters():
    noise = torch.randn(x.shape, generator=generator)
    if name.endswith('bias') or 'embed_tokens' in name or 'pos_embed' in name:
      x.data = 0.5 * noise
    elif 'norm' in name or 'ln_q' in name:
      x.data = 1.0 + 0.3 * noise
    else:
      x.data = 1.5 * noise / x[0].numel() ** 0.5


def _draw(height, width, rng):
  """A picture of noise on a gradient."""
  rows, columns = np.mgrid[:height, :width]
  base = np.stack([rows * 3, columns * 2, rows + columns], axis=-1)
  return ((base + rng.integers(0, 90, base.shape)) % 256).astype(np.uint8)


def _cut(pixels, patch_size, signed=False, **bounds):
  bounds |= {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3} if signed else {}
  processor = Qwen2VLImageProcessorPil(patch_size=patch_size, **bounds)
  out = processor(Image.fromarray(pixels), return_tensors='np')
  return out['pixel_values'].astype(np.float32), out['image_grid_thw'][0]


def _run(model, parts, generator, rng):
  """Tokens, coordinates, logits, pictures and features of one row."""
  signed = model.config.model_type == 'qwen3_vl'
  tokens, pictures = [], []
  patches, grids = {_IMAGE: [], _VIDEO: []}, {_IMAGE: [], _VIDEO: []}

  def cut(pixels, rows, columns):
    cut, grid = _cut(pixels, 4, signed, min_pixels=64, max_pixels=10**6)
    assert list(grid) == [1, 2 * rows, 2 * columns]
    return torch.from_numpy(cut).to(model.dtype)

  for part in parts:
    if isinstance(part, int):
      tokens += torch.randint(0, _IMAGE, (part,), generator=generator).tolist()
      continue
    rows, columns, *pairs = part
    kind = _VIDEO if pairs else _IMAGE
    for pair in range(pairs[0] if pairs else 1):
      if pairs:
        tokens += [10 + pair, 20 + pair]
      frames = [_draw(rows * 8, columns * 8, rng) for _ in range(1 + bool(pairs))]
      both = [cut(x, rows, columns).reshape(-1, 3, 2, 16) for x in frames]
      both[0][:, :, 1] = both[-1][:, :, 1]
      pictures.append(np.concatenate(frames, axis=-1))
      patches[kind].append(both[0].reshape(len(both[0]), -1))
      tokens += [_START, *[kind] * (rows * columns), _END]
    grids[kind].append(torch.tensor([pairs[0] if pairs else 1, 2 * rows, 2 * columns]))
  tokens = torch.tensor([tokens])
  kinds = (tokens == _IMAGE).int() + 2 * (tokens == _VIDEO).int()
  shown = {k: (torch.cat(x), torch.stack(grids[k])) for k, x in patches.items() if x}
  given = {'pixel_values': _IMAGE, 'pixel_values_videos': _VIDEO}
  given = {k: shown[x][0] for k, x in given.items() if x in shown}
  where = {'image_grid_thw': _IMAGE, 'video_grid_thw': _VIDEO}
  where = {k: shown[x][1] for k, x in where.items() if x in shown}
  out = model(input_ids=tokens, mm_token_type_ids=kinds, **given, **where)
  places, _ = model.model.get_rope_index(tokens, kinds, **where)
  features = []
  for found in shown.values():  # All pictures of a row stand before its film.
    out_of_tower = model.model.visual(found[0], grid_thw=found[1])
    deep = getattr(out_of_tower, 'deepstack_features', None) or []
    features.append(torch.cat([out_of_tower.pooler_output, *deep], dim=-1))
  return tokens[0], places[:, 0].T, out.logits[0], pictures, torch.cat(features)


@torch.no_grad()
def _make_rows(model):
  generator = torch.Generator().manual_seed(1)
  rng = np.random.default_rng(1)
  text, seen, features = {}, {}, []
  for row, length in enumerate(_TEXTS):
    tokens = torch.randint(0, _IMAGE, (1, length), generator=generator)
    text[f'logits_{row}'] = model(tokens).logits[0].numpy()
    text[f'tokens_{row}'] = tokens[0].numpy().astype(np.int32)
  number = 0
  for row, parts in enumerate(_ROWS[model.config.model_type]):
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
  return transformers.AutoModelForImageTextToText.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager'
  ).eval()


def make(name):
  """Makes a model and its rows."""
  folder, (make_model, config) = _GOLDEN / 'decoder' / name, _MODELS[name]
  shutil.rmtree(folder, ignore_errors=True)
  model = make_model(make_model.config_class(**config))
  _randomize(model, torch.Generator().manual_seed(0))
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink()
  text, seen = _make_rows(_load(folder))
  np.savez_compressed(folder / 'logits.npz', **text)
  np.savez_compressed(folder / 'pictures.npz', **seen)


def make_cuts():
  """Makes pictures.npz."""
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
  model = _load(directory)
  folder = _GOLDEN / 'decoder' / model.config.model_type
  for name, found in zip(('logits', 'pictures'), _make_rows(model)):
    with np.load(folder / f'{name}.npz') as expected:
      for key, x in found.items():
        np.testing.assert_allclose(x, expected[key], rtol=0, atol=1e-5, err_msg=key)
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
