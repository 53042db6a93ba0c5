"""Files of pictures: what is read, and what is refused before it is decoded."""

import base64
import io
import struct
import zlib

import numpy as np
from PIL import Image
import pytest

from agent_r1_jax.agent import picture_files, pictures

_BOUNDS = 8, 64, 4096
_READER = pictures.Reader(*_BOUNDS)


def _read(data):
  return _READER.resize(picture_files.decode(bytes(data)))


def _draw(mode='RGB', size=(40, 24)):
  noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 4), np.uint8)
  return Image.fromarray(noise, 'RGBA' if mode == 'RGBA' else None).convert(mode)


def _save(image, kind, **options):
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def _huge_png(width, height):
  """A file of some hundred bytes with so many pixels."""
  chunk = lambda name, data: (
    struct.pack('>I', len(data))
    + name
    + data
    + struct.pack('>I', zlib.crc32(name + data))
  )
  header = chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 1, 0, 0, 0, 0))
  return b'\x89PNG\r\n\x1a\n' + header + chunk(b'IDAT', b'') + chunk(b'IEND', b'')


_EXIF = Image.Exif()
_EXIF[0x0131] = 'a camera'
_KINDS = [
  ('PNG', {}),
  ('JPEG', {}),
  ('JPEG', {'progressive': True, 'exif': _EXIF}),
  ('WEBP', {}),
  ('WEBP', {'lossless': True}),
  ('WEBP', {'exif': _EXIF}),
]


@pytest.mark.parametrize(('kind', 'options'), _KINDS)
def test_the_header_has_the_size(kind, options):
  data = _save(_draw(size=(301, 7)), kind, **options)
  assert picture_files.read_size(data) == (kind, 301, 7)
  assert picture_files.decode(data).size == (301, 7)


@pytest.mark.parametrize(('kind', 'options'), _KINDS)
def test_a_file_is_the_picture_that_pillow_decodes(kind, options):
  data = _save(_draw(), kind, **options)
  expected = _READER.resize(Image.open(io.BytesIO(data)))
  found = _read(data)
  np.testing.assert_array_equal(found, expected)
  assert found.shape == (24, 40, 3) and found.dtype == np.uint8


@pytest.mark.parametrize('mode', ['L', 'P', '1', 'LA', 'RGBA', 'CMYK', 'I;16'])
def test_every_mode_becomes_rgb(mode):
  image = Image.fromarray(np.zeros((24, 40), np.uint16)) if mode == 'I;16' else None
  image = image or _draw(mode)
  assert picture_files.to_rgb(image).mode == 'RGB'


def test_what_is_transparent_is_white_and_what_lies_is_turned_upright():
  image = Image.new('RGBA', (16, 8), (0, 0, 0, 0))
  assert set(picture_files.to_rgb(image).get_flattened_data()) == {(255, 255, 255)}
  exif = Image.Exif()
  exif[0x0112] = 6  # Turned by a quarter.
  data = _save(_draw(), 'JPEG', exif=exif)
  assert _read(data).shape == (40, 24, 3)


@pytest.mark.parametrize('side', [2**14, 2**20, 2**31 - 1])
def test_bombs_are_not_decoded(side):
  with pytest.raises(ValueError, match=f'is {side} x {side} pixels; send at most'):
    picture_files.decode(_huge_png(side, side))


def test_a_webp_bomb_is_not_decoded():
  header = b'RIFF' + struct.pack('<I', 22) + b'WEBPVP8X' + struct.pack('<II', 10, 0)
  data = header + b'\xff\x3f\x00' * 2
  with pytest.raises(ValueError, match='16384 x 16384 pixels'):
    picture_files.decode(data)


def _animate(kind):
  frames = [Image.new('RGB', (16, 16), colour) for colour in ('red', 'blue')]
  return _save(frames[0], kind, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    (b'', 'no picture that can be read; send PNG, JPEG or WebP'),
    (b'GIF89a' + bytes(40), 'no picture that can be read'),
    (b'<svg/>', 'no picture that can be read'),
    (b'\x89PNG\r\n\x1a\n', 'the header of the PNG file is broken'),
    (b'\xff\xd8\xff', 'the header of the JPEG file is broken'),
    (b'\xff\xd8\xff\xe0\x00\x00' + bytes(30), 'the header of the JPEG file is broken'),
    (b'RIFF....WEBPVP8 ', 'the header of the WEBP file is broken'),
    (_huge_png(0, 5), 'the header of the PNG file is broken'),
    (_huge_png(8, 8), 'the PNG file is broken'),
    (_save(_draw(), 'PNG')[:700], 'the PNG file is broken'),
    (_save(_draw(), 'JPEG')[:700], 'the JPEG file is broken'),
    (_save(_draw(), 'WEBP')[:300], 'the WEBP file is broken'),
    (_animate('PNG'), 'animated, with 2 frames; send one of them'),
    (_animate('WEBP'), 'animated, with 2 frames'),
    (_save(_draw(), 'PNG') + bytes(picture_files.MAX_BYTES), 'a file of 20,9'),
  ],
)
def test_what_cannot_be_read_is_refused(data, message):
  with pytest.raises(ValueError, match=message):
    _read(data)


def test_damaged_files_never_raise_anything_else():
  rng = np.random.default_rng(0)
  for kind, options in _KINDS:
    data = bytearray(_save(_draw(), kind, **options))
    for _ in range(40):
      broken = bytearray(data)
      for place in rng.integers(0, len(data), 6):
        broken[place] = rng.integers(0, 256)
      try:
        _read(broken)
      except ValueError as error:
        assert 'send' in str(error) or 'cut it' in str(error), error


@pytest.mark.parametrize(
  ('size', 'grid'),
  [
    ((8, 8), (1, 1)),
    ((1, 1), (1, 1)),
    ((1000, 1000), (8, 8)),
    ((1600, 8), (64, 1)),
    ((10, 2000), (1, 64)),
  ],
)
def test_pixels_stay_in_their_bounds(size, grid):
  found = picture_files.fit(*size, *_BOUNDS)
  assert found == grid and 64 <= found[0] * found[1] * 64 <= 4096


def test_a_line_is_no_picture():
  with pytest.raises(ValueError, match='is 1 x 300 pixels, one side 300 times the other'):
    picture_files.fit(300, 1, *_BOUNDS)


def _url(data, kind):
  return f'data:image/{kind};base64,{base64.b64encode(data).decode()}'


def test_a_file_that_takes_for_ever_is_given_up(monkeypatch):
  """A small one: each of its scans goes through all blocks again."""
  data = _save(Image.new('L', (3000, 3000)), 'JPEG', progressive=True)
  scan, end = data.rindex(b'\xff\xda'), data.rindex(b'\xff\xd9')
  hostile = data[:end] + data[scan:end] * 2000 + data[end:]
  assert len(hostile) < 1 << 20
  monkeypatch.setattr(picture_files, 'PROCESSOR_SECONDS', 1)
  with pytest.raises(ValueError, match='more than 1 s of a processor or 1,536 MB'):
    _READER.read(_url(hostile, 'jpeg'))
  assert _READER.read(_url(_save(_draw(), 'PNG'), 'png')).shape == (24, 40, 3)


def test_a_picture_is_decoded_in_another_process(monkeypatch):
  """And is the same, and what is wrong with it is said."""
  data = _save(_draw(size=(61, 47)), 'PNG')
  want = _read(data)
  monkeypatch.setattr(picture_files, 'decode', None)
  found = _READER.read(_url(data, 'png'))
  np.testing.assert_array_equal(found, want)
  assert not found.flags.writeable
  with pytest.raises(ValueError, match='^the picture is 9000 x 9000 pixels'):
    _READER.read(_url(_huge_png(9000, 9000), 'png'))
