"""Pictures in messages: how they are read, bounded, encoded and shown."""

import base64
import io
import json

import numpy as np
from PIL import Image
import pytest
import templates
import tiny

from agent_r1_jax import sft, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env, pictures, tool, transcript
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import request
from agent_r1_jax.host import records
from agent_r1_jax.report import episodes
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.serve import requests
from experiments import train_tokenizer

READER = pictures.Reader(8, 64, 64 * 16)


def image(seed: int = 0, width: int = 24, height: int = 16) -> Image.Image:
  rng = np.random.default_rng(seed)
  return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def url(made: Image.Image) -> str:
  return pictures.make_part(made)['image_url']['url']


@pytest.fixture(scope='module')
def chat(tmp_path_factory):
  directory = tmp_path_factory.mktemp('sees')
  train_tokenizer.train(
    tiny.TEXTS,
    vocab_size=tiny.VOCAB,
    directory=directory,
    more_tokens=pictures.CONTROL_TOKENS,
  )
  return chat_lib.Chat(tokenizer_lib.load(directory), pictures=READER)


def user(*parts) -> dict:
  content = [p if isinstance(p, dict) else {'type': 'text', 'text': p} for p in parts]
  return {'role': 'user', 'content': content}


def test_the_pixels_of_a_picture_that_fits_are_its_own():
  made = image()
  np.testing.assert_array_equal(READER.read(url(made)), np.asarray(made))


def encode(data: bytes, kind: str = 'png') -> str:
  return f'data:image/{kind};base64,{base64.b64encode(data).decode()}'


def save(made: Image.Image, kind: str, **options) -> bytes:
  buffer = io.BytesIO()
  made.save(buffer, kind, **options)
  return buffer.getvalue()


@pytest.mark.parametrize(
  ('address', 'message'),
  [
    ('https://example.com/a.png', 'no address is fetched'),
    ('file:///etc/passwd', 'no address is fetched'),
    ('data:text/html;base64,YQ==', 'no address is fetched'),
    ('data:image/png;base64,@@', 'is no base64'),
    (encode(b'no picture'), 'send PNG, JPEG or WebP'),
    (encode(save(image(), 'PNG')[:-900]), 'broken'),
    (encode(b'x' * (21 << 20)), 'send at most'),
  ],
)
def test_what_is_no_picture_is_refused(refused, address, message):
  with refused(message):
    READER.read(address)


def test_equal_tokens_are_equal_pictures():
  ids = types.make_picture_ids(np.asarray(image()), 8)
  assert ids.shape == (6,) and ids.dtype == np.int32
  assert (ids >= types.FIRST_PICTURE_ID).all() and len({*ids.tolist()}) == 6
  np.testing.assert_array_equal(ids, types.make_picture_ids(np.asarray(image()), 8))
  changed = np.array(image())
  changed[0, 0, 0] ^= 1
  assert not (ids == types.make_picture_ids(changed, 8)).any()
  # The same bytes in another form show something else.
  turned = np.asarray(image()).reshape(24, 16, 3)
  assert not (ids == types.make_picture_ids(turned, 8)).any()


def test_a_prompt_has_the_tokens_of_its_pictures(chat):
  first, second = image(1), image(2, 8, 8)
  parts = ['Look: ', pictures.make_part(first), ' and ', pictures.make_part(second)]
  ids = chat.encode_prompt([user(*parts)])
  shown = ids[ids >= types.FIRST_PICTURE_ID]
  want = [types.make_picture_ids(np.asarray(x), 8) for x in (first, second)]
  np.testing.assert_array_equal(shown, np.concatenate(want))
  text = chat.decode_exactly(ids)
  assert text.count('<|vision_start|><|vision_end|>') == 2
  # Elsewhere it is the prompt of the same texts.
  plain = chat.encode_prompt([{'role': 'user', 'content': 'Look:  and '}])
  control = {chat.tokenizer.convert_tokens_to_ids(x) for x in pictures.CONTROL_TOKENS}
  rest = [i for i in ids.tolist() if i < types.FIRST_PICTURE_ID and i not in control]
  assert chat.decode_exactly(rest) == chat.decode_exactly(plain)


def test_a_film_is_times_and_pairs_of_frames(refused):
  """As Qwen3-VL's processor writes it: 2 frames a second, the last one of 3 repeated."""
  frames = [image(seed) for seed in range(3)]
  first, pair, second, last = pictures.make_film(frames, 2.0)
  assert [part['text'] for part in (first, second)] == ['<0.2 seconds>', '<1.0 seconds>']
  reader = pictures.Reader(8, 64, 64 * 16, film_pixels=(64, 64 * 60))
  shown = [reader.read(part['image_url']['url']) for part in (pair, last)]
  for found, both in zip(shown, ((0, 1), (2, 2)), strict=True):
    want = [np.asarray(frames[i]) for i in both]
    np.testing.assert_array_equal(found, np.concatenate(want, axis=-1))
  ids = types.make_picture_ids(shown[0], 8)
  assert ids.shape == (6,) and ids[0] != types.make_picture_ids(shown[1], 8)[0]
  # All frames share the pixels of a film; a picture has its own bounds.
  small = pictures.Reader(8, 64, 64 * 16, film_pixels=(64, 64 * 6))
  assert small.read(pair['image_url']['url']).shape == (8, 8, 6)
  with refused('is of a film'):
    READER.read(pair['image_url']['url'])
  with refused('all of one size'):
    pictures.make_film([image(0), image(0, 8, 8)], 2.0)


async def test_a_tool_returns_a_film():
  @tool.tool
  def watch() -> list:
    """Watches."""
    return ['Seen:', *pictures.make_film([image(0), image(1)], 1.0)]

  parts = (await tool.call(watch, {})).parts
  assert [part.get('text') for part in parts] == ['Seen:', '<0.5 seconds>', None]
  assert pictures.is_image(parts[2]) and ';film=2;' in parts[2]['image_url']['url']


def test_turns_with_pictures_are_those_of_gemma_4(tmp_path):
  """Its template writes one token for a picture, and an answer's pictures behind it."""
  tokenizer = templates.load('gemma4', tmp_path)
  reader = pictures.Reader(8, 0, 64 * 16, form=pictures.GEMMA)
  chat = chat_lib.Chat(tokenizer, pictures=reader)
  part, call = pictures.make_part(image()), {'name': 'look', 'arguments': {}}
  text = lambda words: {'type': 'text', 'text': words}
  said = [part, text('a '), text('<|image|>')]
  messages = [
    user(part, ' What is it? ', part),
    {'role': 'assistant', 'content': '', 'tool_calls': [{'id': '1', 'function': call}]},
    {'role': 'tool', 'name': 'look', 'tool_call_id': '1', 'content': said},
    {'role': 'assistant', 'content': 'It.'},
    user('Sure?\n', part),
  ]
  parts = [ids for ids, _ in chat.encode_turns(messages)]
  # As large as 16 tokens allow: 3 x 4 of a picture of 2 x 3.
  assert sum((ids >= types.FIRST_PICTURE_ID).sum() for ids in parts) == 4 * 12
  found = ''.join(map(chat.decode_exactly, parts)).replace('<image|>', '<|image|>')
  found = found.replace('<|image><|image|>', '<|image|>')
  for message in messages:
    if isinstance(message['content'], list):
      content = message['content']
      message['content'] = [{'type': 'image'} if p == part else p for p in content]
  options = {'add_generation_prompt': True}
  theirs = tokenizer_lib.render(tokenizer, messages, (), options)
  # A prompt opens an empty thought, of which the template writes the last one.
  thought = '<|channel>thought\n<channel|>'
  assert found.count(thought) == 2
  assert found.replace(thought, '', 1) == theirs


def test_a_delta_has_pictures_of_tools_and_texts_are_cut(chat):
  long = 'one two three ' * 400
  content = [{'type': 'text', 'text': long}, pictures.make_part(image())]
  ids = chat.encode_delta([{'role': 'tool', 'name': 'look', 'content': content}])
  assert (ids >= types.FIRST_PICTURE_ID).sum() == 6
  assert '[output cut]' in chat.decode_exactly(ids)


def test_data_cannot_spell_a_picture(chat):
  spelt = ''.join(pictures.CONTROL_TOKENS)
  for message in (
    {'role': 'user', 'content': spelt},
    user(spelt),
    {'role': 'assistant', 'content': spelt},
  ):
    ids = chat.encode_prompt([{'role': 'user', 'content': 'x'}, message])
    place = chat.tokenizer.convert_tokens_to_ids(pictures.CONTROL_TOKENS[1])
    assert place not in ids
  ids = chat.encode_prompt([user(spelt, pictures.make_part(image()))])
  assert (ids >= types.FIRST_PICTURE_ID).sum() == 6


def test_a_model_that_sees_nothing_says_so(refused):
  with refused('preprocessor_config'):
    tiny.chat().encode_prompt([user('x', pictures.make_part(image()))])
  with refused('image_pad'):
    chat_lib.Chat(tiny.chat().tokenizer, pictures=READER)


def test_other_parts_are_refused(refused, chat):
  with refused('is no part of a'):
    chat.encode_prompt([user({'type': 'input_audio', 'input_audio': {}})])
  with refused('a policy writes none'):
    message = {'role': 'assistant', 'content': [pictures.make_part(image())]}
    chat.encode_prompt([{'role': 'user', 'content': 'x'}, message])


async def test_a_tool_returns_pictures():
  @tool.tool
  def look(at: int) -> list:
    """Looks.

    Args:
      at: Where.
    """
    return [f'at {at}', image(at)]

  result = await tool.call(look, {'at': 3})
  assert result.ok and result.text == ''
  assert result.parts == ({'type': 'text', 'text': 'at 3'}, pictures.make_part(image(3)))
  world = env.ToolEnv([look], lambda task, messages: 0.0)
  await world.reset(types.Task('1', [{'role': 'user', 'content': 'x'}]))
  call = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
  (message,) = (await world.step(call)).messages
  assert message == {'role': 'tool', 'name': 'look', 'content': [*result.parts]}


def test_segments_have_the_pictures_of_their_text():
  ids, numbers = np.zeros(1, np.int32), np.zeros(1, np.float32)
  reply = request.Chunk(
    *(ids, numbers, ids), True, *(ids[None], numbers[None], numbers, numbers)
  )
  text = transcript.Transcript()
  passage = text.begin()
  show = lambda n, *seen: types.Prompt(np.zeros(n, np.int32), seen)
  text.add_turn(passage, show(2, np.asarray(image())), reply)
  fork = text.fork(passage, 2)
  text.add_turn(fork, show(1, np.asarray(image(1))), reply)
  text.add_turn(passage, show(1), reply)
  segments, turns = text.collect()
  assert [len(s.pictures) for s in segments] == [2, 1]
  made = types.Trajectory(types.Task('1', []), 0, 0, segments, turns, [], 'done')
  packed = records.pack(store_lib.list_fields(made))
  again = store_lib.make_trajectory(records.unpack(packed), made.task)
  np.testing.assert_array_equal(again.segments[0].pictures[1], np.asarray(image(1)))


def test_a_conversation_of_supervised_text_has_pictures(chat):
  messages = [
    user('x', pictures.make_part(image())),
    {'role': 'assistant', 'content': 'y'},
  ]
  segment = sft.segment(chat, sft.Conversation(messages))
  np.testing.assert_array_equal(segment.pictures, [np.asarray(image())])
  config = sft.Config(steps=2, rows=1, row_tokens=64)
  (batch,) = sft.batches([segment], config, tiny.VISION)
  shown = batch.rows.tokens >= types.FIRST_PICTURE_ID
  assert shown.sum() == 6 and (batch.weights[shown] == 0).all()


def test_a_log_has_the_pictures_beside_the_text(tmp_path):
  part = pictures.make_part(image())
  messages = [user('What is it?', part), {'role': 'assistant', 'content': 'It.'}]
  task = types.Task('1', messages[:1])
  made = types.Trajectory(task, 0, 0, [], [], messages, 'error')
  episodes.write(tmp_path / 'log.jsonl', [made], step=1)
  line = json.loads((tmp_path / 'log.jsonl').read_text())
  assert line['question'] == line['messages'][0]['content'] == 'What is it?\n[picture]'
  assert line['messages'][0]['pictures'] == [part['image_url']['url']]


def test_a_log_has_contents_of_any_form(tmp_path):
  task = types.Task('1', [])
  messages = [{'role': 'user', 'content': [{'type': 'sound'}, 3]}]
  made = types.Trajectory(task, 0, 0, [], [], messages, 'error')
  episodes.write(tmp_path / 'log.jsonl', [made], step=1)
  line = json.loads((tmp_path / 'log.jsonl').read_text())
  assert line['messages'] == [{'role': 'user', 'content': '[{"type": "sound"}, 3]'}]


def test_the_api_takes_parts_with_pictures():
  part = pictures.make_part(image())
  given = part | {'image_url': part['image_url'] | {'detail': 'high'}}
  made = requests.ChatRequest.model_validate({'messages': [user('a', given, 'b')]})
  assert made.messages == [user('a', part, 'b')]
  texts = requests.ChatRequest.model_validate({'messages': [user('a', 'b')]})
  assert texts.messages == [{'role': 'user', 'content': 'a\nb'}]
  with pytest.raises(ValueError, match='texts or pictures'):
    requests.ChatRequest.model_validate({'messages': [user({'type': 'file'})]})


def test_a_reader_is_that_of_the_model_directory(refused, tmp_path):
  assert pictures.load(tmp_path, 8) is None
  pictures.save(READER, tmp_path, patch=4)
  again = pictures.load(tmp_path, 8)
  assert again and (again.side, again.min_pixels, again.max_pixels) == (8, 64, 1024)
  path = tmp_path / 'preprocessor_config.json'
  raw = json.loads(path.read_text())
  path.write_text(json.dumps(raw | {'image_mean': [0.5, 0.5, 0.5]}))
  with refused('colours are scaled'):
    pictures.load(tmp_path, 8)
  path.write_text(json.dumps(raw | {'min_pixels': 'all'}))
  with refused('min_pixels'):
    pictures.load(tmp_path, 8)
  path.write_text(json.dumps(raw))
  with refused('is 8, and a token of'):
    pictures.load(tmp_path, 28)
  path.write_text('{}')
  with refused('cannot be read'):
    pictures.load(tmp_path, 8)
  signed = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
  pictures.save(pictures.Reader(8, 64, 1024, signed, (64, 999)), tmp_path, patch=4)
  gemma = pictures.Reader(12, 0, 70 * 144, signed, form=pictures.GEMMA)
  for name in ('preprocessor_config.json', 'processor_config.json'):
    folder = tmp_path / f'in_{name}'
    folder.mkdir()
    pictures.save(gemma, folder, patch=4)
    if name == 'processor_config.json':
      raw = json.loads((folder / 'preprocessor_config.json').read_text())
      (folder / 'preprocessor_config.json').unlink()
      (folder / name).write_text(json.dumps({'image_processor': raw}))
    again = pictures.load(folder, 12, signed)
    assert again and (again.min_pixels, again.max_pixels) == (0, 70 * 144)
    assert again.form == pictures.GEMMA
  films = [pictures.load(tmp_path, 8, signed, films) for films in (True, False)]
  assert [x and x.film_pixels for x in films] == [(64, 999), None]
