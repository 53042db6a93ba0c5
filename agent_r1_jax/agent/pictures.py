"""Pictures in messages: content parts, read and resized for a vision-language model.

A picture is a content part in OpenAI's form, with a data URL. URLs of the network and
paths of this machine are never read:

  {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}

`make_part` makes one from a PIL image or the bytes of a file. Control tokens stand for it
in a chat's text, and the ids of types.make_picture_ids in its tokens.

A film is many parts: for every two frames, their time as a text, then both as one picture
file, one above the other. The URL says so: data:image/png;film=16;base64, for a film of
16 frames.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
import functools
import io
import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import picture_files
from agent_r1_jax.host import isolated, model_paths


class Form(NamedTuple):
  """How a family's chat format writes pictures.

  Attributes:
    tokens: The control tokens before a picture, in its place, and after it.
    trims: Whether text parts next to pictures are stripped of whitespace.
    answer_end: The end of a tool's answer, if its pictures come after it.
  """

  tokens: tuple[str, str, str]
  trims: bool = False
  answer_end: str = ''

  def move(self, text: str) -> str:
    """Moves the pictures of tools' answers after the answers, in a rendered text."""
    if not self.answer_end:
      return text
    shown, end = re.escape(''.join(self.tokens)), re.escape(self.answer_end)
    return re.sub(f'((?:{shown})+)({end})', r'\2\1', text)


# Qwen2-VL and its successors, and Gemma 4.
QWEN = Form(('<|vision_start|>', '<|image_pad|>', '<|vision_end|>'))
GEMMA = Form(('<|image>', '<|image|>', '<image|>'), True, '<|"|>}<tool_response|>')
CONTROL_TOKENS = QWEN.tokens
# Qwen2.5-VL's means, then standard deviations, of red, green and blue.
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Senders may be untrusted, and a small file can take minutes and all memory. `seconds` is
# wall time, and ends a process that waits; picture_files.read limits CPU time.
_LIMITS = {'seconds': 120.0, 'memory_mb': 1536}
_read_apart = isolated.in_subprocess(
  picture_files.read, imports=['PIL.ImageOps', 'numpy'], **_LIMITS
)
_DATA = re.compile(r'data:image/[a-z+.-]+;(?:film=([1-9][0-9]{0,5});)?base64,')
# The fewest and most pixels of all frames of a film together, as in published files.
_FILM_PIXELS = 4096, 3 << 23
# The files that say how pictures are preprocessed; in the second one, an object does.
_FILES = 'preprocessor_config.json', 'processor_config.json'
_FILM_FILE = 'video_preprocessor_config.json'


def make_part(image: Any) -> dict[str, Any]:
  """Makes a content part from a PIL image or the bytes of a file.

  A part is returned unchanged.
  """
  if isinstance(image, dict):
    return image
  if isinstance(image, bytes):
    kind, data = picture_files.read_size(image)[0].lower(), image
  else:
    buffer, kind = io.BytesIO(), 'png'
    image.save(buffer, kind)
    data = buffer.getvalue()
  text = base64.b64encode(data).decode()
  url = f'data:image/{kind};base64,{text}'
  return {'type': 'image_url', 'image_url': {'url': url}}


def make_film(frames: Sequence[Any], fps: float) -> list[dict[str, Any]]:
  """Makes the parts of a film, as Qwen3-VL reads them: a time, two frames, a time, ...

  Args:
    frames: PIL images of one size. If their number is odd, the last one is repeated.
    fps: Frames per second.

  Raises:
    ValueError: There are no frames, or their sizes differ.
  """
  if len({frame.size for frame in frames}) != 1:
    raise ValueError('frames: give at least one, all of one size.')
  parts = []
  for i in range(0, len(frames), 2):
    pair = i, min(i + 1, len(frames) - 1)
    part = make_part(picture_files.stack([frames[frame] for frame in pair]))
    shown = part['image_url']
    shown['url'] = shown['url'].replace(';', f';film={len(frames)};', 1)
    parts += [{'type': 'text', 'text': f'<{sum(pair) / 2 / fps:.1f} seconds>'}, part]
  return parts


def is_image(value: Any) -> bool:
  """Whether a value is a PIL image or a picture's part, without importing PIL."""
  match value:
    case {'type': 'image_url', 'image_url': {'url': str(url)}}:
      return bool(_DATA.match(url[:64]))
  return any(c.__module__ == 'PIL.Image' for c in type(value).__mro__)


def find_addresses(message: types.Message) -> list[str]:
  """Finds the URLs of a message's pictures, in order.

  Raises:
    ValueError: A part is neither a text nor a picture.
  """
  content = message.get('content')
  parts = content if isinstance(content, list) else ()
  return [url for part in parts if (url := _find_address(part)) is not None]


def _find_address(part: Any) -> str | None:
  match part:
    case {'type': 'image_url', 'image_url': {'url': str(url)}}:
      return url
    case {'type': 'text', 'text': str()}:
      return None
  raise ValueError(
    f'{part!r:.80} is no part of a message: give {{"type": "text", "text": ...}} or '
    '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}.'
  )


def write_places(
  message: types.Message,
  change: Callable[[str], str] = lambda text: text,
  form: Form = QWEN,
) -> types.Message:
  """Joins the parts of a message's content, with control tokens for its pictures.

  `change` is applied to each text part, or to a content that is a text already.
  """
  content, pieces = message['content'], []
  if isinstance(content, str):
    return {**message, 'content': change(content)}
  answers = message['role'] == 'tool' and form.answer_end
  if answers:
    content = sorted(content, key=lambda part: _find_address(part) is not None)
  elif form.trims and message['role'] != 'assistant':
    content = [_trim(part) for part in content]
  for part in content:
    if _find_address(part) is not None:
      pieces.append((''.join(form.tokens), True))
    elif isinstance(text := change(part['text']), types.ControlText):
      pieces += [(piece, i % 2 == 0) for i, piece in enumerate(text.parts)]
    else:
      pieces.append((str(text), False))
  if message['role'] == 'assistant' and any(control for _, control in pieces):
    raise ValueError('a message of the assistant has a picture; a policy writes none.')
  content = types.ControlText.joined(pieces)
  # In a reply, control tokens that a policy may sample count as such anyway.
  return {
    **message,
    'content': str(content) if message['role'] == 'assistant' else content,
  }


def _trim(part: dict[str, Any]) -> dict[str, Any]:
  text = part.get('text')
  # Control text, which a task wrote, stays unchanged.
  return part | {'text': text.strip()} if type(text) is str else part


class Reader:
  """Reads and resizes pictures for a model.

  Attributes:
    side: The side of a token's square, in pixels.
    min_pixels: Smaller pictures are enlarged; 0 makes every picture as large as allowed.
    max_pixels: Larger pictures are shrunk.
    colours: The means, then the standard deviations, that normalise colours.
    film_pixels: The fewest and most pixels of a film; None if the model takes no films.
    form: How the model's chat format writes pictures.
  """

  def __init__(
    self,
    side: int,
    min_pixels: int,
    max_pixels: int,
    colours: tuple = _CLIP,
    film_pixels: tuple[int, int] | None = None,
    form: Form = QWEN,
  ):
    """Checks the sizes."""
    whole = all(type(x) is int for x in (side, min_pixels, max_pixels))
    least = side**2 if min_pixels == 0 else min_pixels
    if not (whole and side >= 1 and side**2 <= least <= max_pixels):
      raise ValueError(
        f'min_pixels is {min_pixels!r} and max_pixels {max_pixels!r}; a token has '
        f'{side} x {side} pixels: give at least so many, and max_pixels not below that.'
      )
    self.side, self.min_pixels, self.max_pixels = side, min_pixels, max_pixels
    self.colours, self.film_pixels, self.form = colours, film_pixels, form
    # An episode's pictures are read when its messages are encoded, and when it ends.
    self.read = functools.lru_cache(64)(self._read)

  def _read(self, url: str) -> np.ndarray:
    """Reads the picture in a data URL as uint8 [H, W, 3].

    Two frames of a film are [H, W, 6]. H and W are multiples of `side`. The array is
    read-only.

    Raises:
      ValueError: It is no picture, or too large; the message says why and how to fix it.
    """
    match = _DATA.match(url[:64])
    if not match:
      raise ValueError(
        f'the picture {url[:40]!r} is no data: only "data:image/png;base64,..." is read, '
        'and no address is fetched; send the picture itself.'
      )
    if len(url) > picture_files.MAX_BYTES * 4 // 3 + 64:
      raise ValueError(
        f'a picture has {len(url):,} characters of base64; send at most '
        f'{picture_files.MAX_BYTES:,} bytes.'
      )
    try:
      data = base64.b64decode(url[match.end() :], validate=True)
    except binascii.Error as error:
      raise ValueError(f'a picture is no base64 ({error}); encode it again.') from None
    if (count := match.group(1)) and not self.film_pixels:
      raise ValueError('the picture is of a film, and this model sees none.')
    least, most = self.min_pixels, self.max_pixels
    if count and self.film_pixels:
      least, most = (max(1, pixels // int(count)) for pixels in self.film_pixels)
    bounds = 2 if count else 1, self.side, least, most
    seconds, megabytes = picture_files.PROCESSOR_SECONDS, _LIMITS['memory_mb']
    try:
      *shape, text = _read_apart.call_and_wait(data, seconds, *bounds)
    except isolated.FailedError as error:
      raise ValueError(str(error).removeprefix('ValueError: ')) from None
    except (isolated.EndedError, TimeoutError):
      raise ValueError(
        f'a picture takes more than {seconds} s of a processor or {megabytes:,} MB to '
        'decode; send it smaller, or as a plain PNG.'
      ) from None
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)

  def resize(self, image: Any) -> np.ndarray:
    """Resizes a PIL image to whole tokens, as uint8 [H, W, 3]."""
    pixels = picture_files.resize(image, self.side, self.min_pixels, self.max_pixels)
    pixels.flags.writeable = False
    return pixels


def load(
  directory: Any, side: int, colours: tuple = _CLIP, films: bool = False
) -> Reader | None:
  """Loads the reader of a vision-language model; None if its directory has none.

  `side` and `colours` are as in Reader, from the model's shape; `films` says whether the
  model takes films.

  Raises:
    ValueError: preprocessor_config.json, or the image_processor of
      processor_config.json, belongs to another kind of model.
  """
  folder = model_paths.get_directory(directory)
  path = next((folder / x for x in _FILES if (folder / x).is_file()), None)
  if not path:
    return None
  form, scales = QWEN, colours
  try:
    raw = json.loads(path.read_text(encoding='utf-8'))
    raw = raw if path.name == _FILES[0] else raw['image_processor']
    if 'max_soft_tokens' in raw:  # Gemma 4, whose tower scales colours itself.
      found, form = raw['patch_size'] * raw['pooling_kernel_size'], GEMMA
      least, most = 0, raw['max_soft_tokens'] * found**2
    else:
      found = raw['patch_size'] * raw['merge_size']
      bounds = raw.get('size') or {}
      least = raw.get('min_pixels') or bounds['shortest_edge']
      most = raw.get('max_pixels') or bounds['longest_edge']
      scales = tuple(raw['image_mean']), tuple(raw['image_std'])
    film_pixels = _read_film_pixels(path.parent) if films else None
  except (OSError, ValueError, TypeError, LookupError) as error:
    raise ValueError(
      f'{path} cannot be read ({type(error).__name__}: {error}); the models whose '
      'pictures are understood are those of docs/models.md.'
    ) from error
  if found != side:
    raise ValueError(
      f'{path}: patch_size times merge_size is {found}, and a token of the model has '
      f'{side} pixels in each direction; copy the file of this model.'
    )
  if scales != colours:
    raise ValueError(
      f'{path}: colours are scaled by {scales}; this model needs {colours}.'
    )
  return Reader(side, least, most, colours, film_pixels, form)


def _read_film_pixels(folder: pathlib.Path) -> tuple[int, int]:
  path = folder / _FILM_FILE
  size = json.loads(path.read_text('utf-8'))['size'] if path.is_file() else {}
  names = 'shortest_edge', 'longest_edge'
  least, most = (size.get(x, y) for x, y in zip(names, _FILM_PIXELS, strict=True))
  return int(least), int(most)


def save(reader: Reader, directory: Any, patch: int) -> None:
  """Writes preprocessor_config.json; a patch has sides of `patch` pixels.

  A reader of films also gets video_preprocessor_config.json.
  """
  path = pathlib.Path(directory) / _FILES[0]
  if reader.form == GEMMA:
    sizes = {'patch_size': patch, 'pooling_kernel_size': reader.side // patch}
    sizes |= {'max_soft_tokens': reader.max_pixels // reader.side**2}
    raw = {'image_processor_type': 'Gemma4ImageProcessor', **sizes}
    path.write_text(json.dumps(raw, indent=1) + '\n', encoding='utf-8')
    return
  raw = {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'patch_size': patch,
    'merge_size': reader.side // patch,
    'temporal_patch_size': 2,
    'min_pixels': reader.min_pixels,
    'max_pixels': reader.max_pixels,
    'image_mean': reader.colours[0],
    'image_std': reader.colours[1],
  }
  path.write_text(json.dumps(raw, indent=1) + '\n', encoding='utf-8')
  if reader.film_pixels:
    edges = ('shortest_edge', 'longest_edge')
    raw = raw | {'size': dict(zip(edges, reader.film_pixels, strict=True))}
    raw = {k: x for k, x in raw.items() if not k.endswith(('_pixels', '_type'))}
    raw['video_processor_type'] = 'Qwen3VLVideoProcessor'
    path = path.with_name(_FILM_FILE)
    path.write_text(json.dumps(raw, indent=1) + '\n', encoding='utf-8')
