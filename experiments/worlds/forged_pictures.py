"""Small photographs, their forgeries, and what their pixels reveal.

A photograph is a drawn scene with the noise of its ISO and one real JPEG pass; its
metadata has both numbers. Some of its 3 x 3 cells are glare, which has neither noise nor
traces of compression, or a texture, which looks like noise: both raise false alarms. A
forger changes a plain cell, or the complete picture, and saves losslessly. Detectors read
pixels, and never the forger's actions.
"""

from collections.abc import Callable, Mapping
import functools
import io
from typing import Any, NamedTuple

import numpy as np

CELLS = [*'abcdefghi']  # Row by row.
_SIDE, _PATCH = 32, 28  # Pixels of a cell, and of a pasted square.
# The standard deviation of the sensor noise, in grey levels, by ISO.
SIGMA = {100: 1.5, 400: 6.0, 1600: 14.0}
# JPEG qualities. The steps of 95 are so small that pixels show no trace of them.
QUALITIES = (50, 75, 95)


class Photo(NamedTuple):
  """A picture, uint8; its metadata; and what each cell shows."""

  pixels: np.ndarray
  iso: int
  jpeg: int
  looks: dict[str, str]

  def cell(self, name: str) -> np.ndarray:
    """Returns the pixels of a cell, as a view."""
    row, column = (_SIDE * i for i in divmod(CELLS.index(name), 3))
    return self.pixels[row : row + _SIDE, column : column + _SIDE]

  def plain(self) -> list[str]:
    """Returns the cells without glare and texture."""
    return [name for name, look in self.looks.items() if look == 'plain']


def _to_pixels(values: np.ndarray) -> np.ndarray:
  return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def to_picture(values: np.ndarray) -> Any:
  """Makes a PIL image of grey levels."""
  from PIL import Image

  return Image.fromarray(values)


def _resize(values: np.ndarray, side: int) -> np.ndarray:
  """Resamples a square by cubic interpolation."""
  made = to_picture(values.astype(np.float32)).resize((side, side), 3)
  return np.asarray(made, np.float64)


def _save(pixels: np.ndarray, quality: int) -> Any:
  """Saves as JPEG, and opens the file."""
  from PIL import Image

  file = io.BytesIO()
  to_picture(pixels).save(file, 'JPEG', quality=quality)
  return Image.open(file)


def photograph(rng: np.random.Generator, confusing: bool = True) -> Photo:
  """Takes a photograph of a new scene; `confusing` allows glare and textures."""
  iso, jpeg = int(rng.choice([*SIGMA])), int(rng.choice(QUALITIES))
  scene = _resize(rng.uniform(60, 170, (5, 5)), 3 * _SIDE)
  y, x = np.mgrid[: 3 * _SIDE, : 3 * _SIDE]
  for _ in range(6):
    (cy, cx), radius = rng.uniform(0, 3 * _SIDE, 2), rng.uniform(4, 14)
    scene += rng.uniform(-30, 30) * np.clip(radius - np.hypot(y - cy, x - cx), 0, 1)
  photo = Photo(scene, iso, jpeg, dict.fromkeys(CELLS, 'plain'))
  # One texture per scene, as of one wall: its cells resemble each other.
  angle, period = rng.uniform(0, np.pi), rng.uniform(2.5, 4.5)
  wave = np.sin(2 * np.pi * (np.cos(angle) * x + np.sin(angle) * y) / period)
  for cell in rng.permutation(CELLS)[: confusing * rng.choice(3, p=(0.5, 0.3, 0.2))]:
    photo.looks[cell] = look = str(rng.choice(['glare', 'texture']))
    waves = photo._replace(pixels=wave).cell(cell)
    photo.cell(cell)[:] = 290 if look == 'glare' else photo.cell(cell) + 22 * waves
  noisy = _to_pixels(scene + rng.normal(0, SIGMA[iso], scene.shape))
  return photo._replace(pixels=np.asarray(_save(noisy, jpeg)))


# A forger's methods: (photograph, a plain cell, randomness) -> photograph.


def _paste(photo: Photo, cell: str, patch: np.ndarray, rng) -> Photo:
  photo = photo._replace(pixels=photo.pixels.copy())
  y, x = rng.integers(0, 3, 2)
  at = photo.cell(cell)[y : y + _PATCH, x : x + _PATCH]
  # The edges are blended over two pixels.
  ramp = np.clip(np.minimum(np.arange(_PATCH) + 1, _PATCH - np.arange(_PATCH)) / 3, 0, 1)
  weight = np.minimum(ramp, ramp[:, None])
  at[:] = _to_pixels(weight * patch + (1 - weight) * at)
  return photo


def _cut(crop: np.ndarray, side: int = _PATCH) -> np.ndarray:
  """Cuts out a square; wherever it is pasted, it is off the compression's grid."""
  start = 3 if side == _PATCH else 8
  return crop[start : start + side, start : start + side].astype(np.float64)


def _other_iso(photo: Photo, rng) -> int:
  return int(rng.choice([iso for iso in SIGMA if iso != photo.iso]))


def splice(photo: Photo, cell: str, rng) -> Photo:
  """Pastes from a photograph of another ISO, matching the brightness."""
  other = photo
  while other.iso == photo.iso:
    other = photograph(rng, confusing=False)
  patch = _cut(other.cell(str(rng.choice(CELLS))))
  return _paste(photo, cell, patch + photo.cell(cell).mean() - patch.mean(), rng)


def copy(photo: Photo, cell: str, rng) -> Photo:
  """Pastes the content of another plain cell."""
  source = str(rng.choice([name for name in photo.plain() if name != cell]))
  return _paste(photo, cell, _cut(photo.cell(source)), rng)


def resample(photo: Photo, cell: str, rng) -> Photo:
  """Enlarges the cell's content."""
  small = _cut(photo.cell(cell), int(rng.integers(10, 14)))
  return _paste(photo, cell, _resize(small, _PATCH), rng)


def renoise(photo: Photo, cell: str, rng) -> Photo:
  """Smooths the cell's content, and adds the noise of another ISO."""
  smooth = _resize(_resize(_cut(photo.cell(cell)), 7), _PATCH)
  noisy = smooth + rng.normal(0, SIGMA[_other_iso(photo, rng)], smooth.shape)
  return _paste(photo, cell, noisy, rng)


def recompress(photo: Photo, cell: str, rng) -> Photo:
  """Crops a few pixels, and saves with another quality."""
  y, x = rng.integers(1, 8, 2)
  moved = np.pad(photo.pixels[y:, x:], ((0, y), (0, x)), 'reflect')
  quality = int(rng.choice([q for q in QUALITIES if q != photo.jpeg]))
  return photo._replace(pixels=np.asarray(_save(moved, quality)))


def relabel(photo: Photo, cell: str, rng) -> Photo:
  """Replaces the metadata by that of a photograph with another ISO."""
  return photo._replace(iso=_other_iso(photo, rng), jpeg=int(rng.choice(QUALITIES)))


FORGERIES: Mapping[str, Callable[..., Photo]] = {
  'splice': splice,
  'copy': copy,
  'resample': resample,
  'noise': renoise,
  'recompress': recompress,
  'metadata': relabel,
}


# What pixels reveal.


@functools.cache
def _steps(quality: int) -> np.ndarray:
  """Returns the quantization steps that PIL uses for a quality, [8, 8]."""
  steps = _save(np.zeros((8, 8), np.uint8), quality).quantization[0]
  return np.array(steps, np.float64).reshape(8, 8)


_COSINES = np.cos(np.pi * (2 * np.arange(8) + 1) * np.arange(8)[:, None] / 16) / 2
_COSINES[0] /= np.sqrt(2)


def noise(crop: np.ndarray) -> float:
  """Estimates the noise in grey levels by Immerkaer's mask; a median ignores edges."""
  crop = crop.astype(np.float64)
  rows = crop[:-2] - 2 * crop[1:-1] + crop[2:]
  both = np.abs(rows[:, :-2] - 2 * rows[:, 1:-1] + rows[:, 2:])
  blocks = both[:28, :28].reshape(4, 7, 4, 7).mean((1, 3))
  return float(np.sqrt(np.pi / 2) / 6 * np.median(blocks))


def fit(crop: np.ndarray, quality: int) -> float:
  """Measures how well DCT coefficients are multiples of a quality's steps: 1 is exact."""
  blocks = crop.reshape(len(crop) // 8, 8, -1, 8).swapaxes(1, 2).astype(np.float64) - 128
  found, steps = _COSINES @ blocks @ _COSINES.T, _steps(quality)
  used = (np.abs(found) > 0.6 * steps) & (steps > 4)
  used[..., 0, 0] = False
  return float(np.cos(2 * np.pi * found / steps)[used].mean()) if used.sum() > 7 else 0.0


# Noise thresholds between ISO 100 and 400, and 400 and 1600, after compression.
_BOUNDS = {50: (0.39, 1.0), 75: (0.54, 2.2), 95: (2.6, 8.0)}


def read(crop: np.ndarray) -> tuple[int, int]:
  """Reads ISO and JPEG quality from a crop; the quality is 95 if there is no trace."""
  quality = next((q for q in (50, 75) if fit(crop, q) > 0.7), 95)
  return [*SIGMA][int(np.searchsorted(_BOUNDS[quality], noise(crop)))], quality


# Maps of suspicion: from cells, [9, 32, 32], to one number each.
_Crops = np.ndarray


def _outliers(values) -> np.ndarray:
  """Measures how far each value is from the median, in logarithms."""
  logs = np.log(np.maximum(values, 0.05))
  return np.abs(logs - np.median(logs))


def _below(values) -> np.ndarray:
  return np.median(values) - values


def _grain(crops: _Crops) -> np.ndarray:
  return _outliers([noise(crop) for crop in crops])


def _pixel_noise(crops: _Crops) -> np.ndarray:
  return _outliers(np.median(np.abs(np.diff(crops, 2, axis=1)), (1, 2)) + 0.3)


def _line_steps(crops: _Crops) -> np.ndarray:
  """Returns the mean step of brightness across each line and column, [2, 9, 31]."""
  return np.stack([np.abs(np.diff(crops, axis=i)).mean(3 - i) for i in (1, 2)])


def _blockiness(crops: _Crops) -> np.ndarray:
  """Finds cells with smaller steps across the grid of 8 x 8 pixels."""
  steps = _line_steps(crops)
  on, off = steps[..., 7::8], np.delete(steps, [7, 15, 23], axis=2)
  return _below((on.mean((0, 2)) + 0.5) / (off.mean((0, 2)) + 0.5))


def _seams(crops: _Crops) -> np.ndarray:
  """Finds the straightest line across a cell at which brightness jumps."""
  steps = _line_steps(crops)
  return (steps.max(2) / (np.median(steps, 2) + 0.5)).max(0)


def _misfit(crops: _Crops) -> np.ndarray:
  fits = np.array([[fit(crop, q) for crop in crops] for q in (50, 75)])
  return _below(fits[np.argmax(np.median(fits, 1))])


def _twins(crops: _Crops) -> np.ndarray:
  """Finds each cell's best match of details in another cell."""
  padded = np.pad(crops, ((0, 0), (1, 1), (1, 1)), 'edge')
  near = padded[:, 2:, 1:-1] + padded[:, :-2, 1:-1]
  detail = crops - (near + padded[:, 1:-1, 2:] + padded[:, 1:-1, :-2]) / 4
  detail -= detail.mean((1, 2), keepdims=True)
  detail /= np.linalg.norm(detail, axis=(1, 2), keepdims=True) + 20
  waves = np.fft.rfft2(detail, (2 * _SIDE, 2 * _SIDE))
  found = np.fft.irfft2(waves[:, None] * waves[None].conj()).max((2, 3))
  np.fill_diagonal(found, 0)
  return found.max(1)


def _blur(crops: _Crops) -> np.ndarray:
  """Finds cells with a smaller share of fine detail."""
  fine = np.abs(np.diff(crops, axis=2)).mean((1, 2)) + 0.3
  return _below(fine / (np.abs(crops[..., 4:] - crops[..., :-4]).mean((1, 2)) + 0.3))


def _history(crops: _Crops) -> np.ndarray:
  """Finds the grid of an earlier compression in the cells."""
  moved = lambda crop, y, x: crop[y : y + 24, x : x + 24]
  places = [(y, x) for y in range(8) for x in range(8) if y or x]
  total = lambda at: sum(fit(moved(crop, *at), 75) for crop in crops[::4])
  best = max(places, key=total)
  return np.array([fit(moved(crop, *best), 75) for crop in crops])


# A detector's map, and its threshold of suspicion: the one with the best verdicts on
# training pictures. None sees that the metadata is wrong.
DETECTORS: Mapping[str, tuple[Callable[[_Crops], np.ndarray], float]] = {
  'grain': (_grain, 0.5),
  'pixel': (_pixel_noise, 0.5),
  'block': (_blockiness, 0.33),
  'grid': (_misfit, 0.126),
  'twin': (_twins, 0.17),
  'seam': (_seams, 3.06),
  'blur': (_blur, 0.154),
  'history': (_history, 0.42),
}


def suspects(photo: Photo, detector: str) -> list[str]:
  """Returns the two cells that a detector suspects most, or fewer."""
  find, bound = DETECTORS[detector]
  values = find(np.array([photo.cell(name) for name in CELLS], np.float64))
  return [CELLS[i] for i in np.argsort(-values)[:2] if values[i] > bound]
