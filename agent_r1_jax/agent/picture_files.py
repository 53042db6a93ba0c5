"""Reads the files of pictures: PNG, JPEG and WebP.

Whoever sends a picture may not be trusted. Its size is read from the header before
anything is decoded, for a file of some kilobytes can hold billions of pixels.
"""

import io
from typing import Any

MAX_BYTES = 20 << 20
MAX_PIXELS = 64 << 20  # 192 MiB as colours, and twice that where there is transparency.
_KINDS = 'PNG, JPEG or WebP'


def read_size(data: bytes) -> tuple[str, int, int]:
  """Reads the kind, width and height of a picture from its header, decoding nothing.

  Raises:
    ValueError: It is no PNG, JPEG or WebP file, or ends before its size.
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
  """Goes from segment to segment up to that of the frame, which has the size."""
  place = 2
  while place + 9 <= len(data) and data[place] == 0xFF:
    marker = data[place + 1]
    if marker == 0xFF:  # Segments may be padded.
      place += 1
      continue
    # All of SOF0 to SOF15 but DHT, JPG and DAC, which lie among them.
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
  # The readers of the formats raise whatever they stumble over.
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
  """Turns a PIL image upright and makes it RGB, as transformers does.

  The orientation that a camera wrote is applied, and what is transparent is laid on
  white.

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
