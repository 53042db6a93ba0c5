"""Reads picture files: PNG, JPEG and WebP.

Senders may be untrusted. The size is read from the header before anything is decoded,
because a file of a few kilobytes can hold billions of pixels; and pictures.py calls
`read` in a separate process.
"""

import base64
from collections.abc import Sequence
import io
import math
from typing import Any

from agent_r1_jax.host import isolated

MAX_BYTES = 20 << 20
MAX_PIXELS = 64 << 20  # 192 MiB as colours, and twice that with transparency.
PROCESSOR_SECONDS = 10  # CPU time per file; 64 million pixels take about three seconds.
# The largest ratio of a picture's sides, as in transformers.
_MAX_RATIO = 200
_KINDS = 'PNG, JPEG or WebP'


def read_size(data: bytes) -> tuple[str, int, int]:
  """Reads the kind, width and height of a picture from its header, without decoding.

  Raises:
    ValueError: It is no PNG, JPEG or WebP file, or its header is incomplete.
  """
  kind, size = None, None
  if data.startswith(b'\x89PNG\r\n\x1a\n'):
    kind, number = 'PNG', lambda at: int.from_bytes(data[at : at + 4], 'big')
    if len(data) >= 24 and data[12:16] == b'IHDR':
      size = number(16), number(20)
  elif data.startswith(b'\xff\xd8'):
    kind, size = 'JPEG', _read_jpeg_size(data)
  elif data[:4] == b'RIFF' and data[8:12] == b'WEBP':
    kind, size = 'WEBP', _read_webp_size(data)
  if kind is None:
    raise ValueError(f'the file is no picture that can be read; send {_KINDS}.')
  if size is None or min(size) < 1:
    raise ValueError(f'the header of the {kind} file is broken; send the file again.')
  return kind, *size


def _read_jpeg_size(data: bytes) -> tuple[int, int] | None:
  """Walks the segments up to the frame header, which has the size."""
  place = 2
  while place + 9 <= len(data) and data[place] == 0xFF:
    marker = data[place + 1]
    if marker == 0xFF:  # Segments may be padded.
      place += 1
      continue
    # SOF0 to SOF15, without DHT, JPG and DAC, whose markers are in that range.
    if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
      height, width = (int.from_bytes(data[place + i : place + i + 2]) for i in (5, 7))
      return width, height
    place += 2 + int.from_bytes(data[place + 2 : place + 4])
  return None


def _read_webp_size(data: bytes) -> tuple[int, int] | None:
  """Reads the size of a lossy (VP8), lossless (VP8L) or extended (VP8X) file."""
  if len(data) < 30:
    return None
  number = lambda at, n: int.from_bytes(data[at : at + n], 'little')
  if data[12:16] == b'VP8X':
    return number(24, 3) + 1, number(27, 3) + 1
  if data[12:16] == b'VP8L':
    bits = number(21, 4)
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
  if data[12:16] == b'VP8 ':
    return number(26, 2) & 0x3FFF, number(28, 2) & 0x3FFF
  return None


def decode(
  data: bytes, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
) -> Any:
  """Decodes a file to a PIL image.

  Raises:
    ValueError: The file is too large, of another kind, animated or broken.
  """
  if len(data) > max_bytes:
    raise ValueError(
      f'the picture is a file of {len(data):,} bytes; send at most {max_bytes:,}.'
    )
  kind, width, height = read_size(data)
  if width * height > max_pixels:
    raise ValueError(
      f'the picture is {width} x {height} pixels; send at most {max_pixels:,} of them.'
    )
  from PIL import Image

  try:
    image = Image.open(io.BytesIO(data), formats=(kind,))
    frames = getattr(image, 'n_frames', 1)
    if frames == 1 and image.size == (width, height):
      image.load()
  # Decoders raise exceptions of any type for broken files.
  except Exception as error:
    raise ValueError(
      f'the {kind} file is broken ({error}); send the file again.'
    ) from error
  if frames != 1:
    raise ValueError(f'the picture is animated, with {frames} frames; send one of them.')
  if image.size != (width, height):
    raise ValueError(f'the header of the {kind} file is broken; send the file again.')
  return image


def to_rgb(image: Any) -> Any:
  """Turns a PIL image upright and converts it to RGB, as transformers does.

  Applies the EXIF orientation, and puts transparent pixels on white.

  Raises:
    ValueError: The image cannot be decoded.
  """
  from PIL import Image, ImageOps

  try:
    image = ImageOps.exif_transpose(image)
    if 'A' in image.getbands() or image.info.get('transparency') is not None:
      image = image.convert('RGBA')
      white = Image.new('RGBA', image.size, (255, 255, 255, 255))
      image = Image.alpha_composite(white, image)
    return image.convert('RGB')
  except Exception as error:
    raise ValueError(f'the picture is broken ({error}); send the file again.') from error


def fit(
  height: int, width: int, size: int, least_pixels: int, most_pixels: int
) -> tuple[int, int]:
  """Finds the rows and columns of tokens for a picture of this size.

  A token has sides of `size` pixels. The resized picture keeps its ratio nearly, and its
  pixels are within the bounds. Matches transformers, except that a picture of one row or
  column of tokens is shortened if it would exceed the bounds.

  Raises:
    ValueError: One side is more than 200 times the other.
  """
  _check_ratio(height, width)
  rows, columns = round(height / size), round(width / size)
  pixels = rows * columns * size**2
  if pixels > most_pixels:
    shrink = math.sqrt(height * width / most_pixels)
    rows, columns = (max(1, int(x / shrink / size)) for x in (height, width))
  elif pixels < least_pixels:
    grow = math.sqrt(least_pixels / (height * width))
    rows, columns = (math.ceil(x * grow / size) for x in (height, width))
  most = max(1, most_pixels // size**2)
  rows = min(rows, max(1, most // columns))
  return rows, min(columns, max(1, most // rows))


def _check_ratio(height: int, width: int) -> None:
  ratio = max(height, width) / min(height, width)
  if ratio > _MAX_RATIO:
    raise ValueError(
      f'the picture is {width} x {height} pixels, one side {ratio:.0f} times the '
      f'other; cut it so that it is at most {_MAX_RATIO} times.'
    )


def fill(height: int, width: int, size: int, most_pixels: int) -> tuple[int, int]:
  """Finds the most rows and columns of tokens that the bound allows for a picture.

  Matches transformers for Gemma 4; see `fit`.
  """
  _check_ratio(height, width)
  most = most_pixels // size**2
  scale = math.sqrt(most * size**2 / (height * width))
  rows, columns = (math.floor(scale * x / size) for x in (height, width))
  if not rows:
    return 1, min(width // height, most)
  return (rows, columns) if columns else (min(height // width, most), 1)


def resize(image: Any, size: int, least_pixels: int, most_pixels: int) -> Any:
  """Resizes a PIL image to whole tokens, as uint8 [H, W, 3].

  Uses `fit`, or `fill` if `least_pixels` is 0.
  """
  import numpy as np

  image = to_rgb(image)
  if least_pixels:
    rows, columns = fit(image.height, image.width, size, least_pixels, most_pixels)
  else:
    rows, columns = fill(image.height, image.width, size, most_pixels)
  # 3 is Pillow's bicubic filter, which transformers uses.
  return np.array(image.resize((columns * size, rows * size), 3), np.uint8)


def stack(images: Sequence[Any]) -> Any:
  """Stacks PIL images of one size vertically."""
  from PIL import Image

  width, height = images[0].size
  made = Image.new('RGB', (width, len(images) * height))
  for place, image in enumerate(images):
    made.paste(to_rgb(image), (0, place * height))
  return made


def read(
  data: bytes, seconds: float, frames: int, *bounds: int
) -> tuple[int, int, int, str]:
  """Decodes and resizes a file; the process is killed after `seconds` of CPU time.

  Args:
    data: The file.
    seconds: The limit of CPU time.
    frames: How many frames of a film are stacked in the file; 1 for a picture.
    *bounds: The last arguments of `resize`, for each frame.

  Returns:
    H, W, 3 times the frames, and the pixels [H, W, 3 · frames] as base64.
  """
  import numpy as np

  with isolated.limit_processor(seconds):
    image = decode(data)
    height = image.height // frames
    boxes = [(0, i * height, image.width, (i + 1) * height) for i in range(frames)]
    parts = [image.crop(box) for box in boxes] if frames > 1 else [image]
    pixels = np.concatenate([resize(part, *bounds) for part in parts], axis=-1)
  return *pixels.shape, base64.b64encode(pixels.tobytes()).decode()
