"""Safetensors files against the format's own library; what is wrong with a broken one."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from agent_r1_jax.models.files import tensor_files

_INDEX = 'model.safetensors.index.json'


def _arrays():
  """Odd shapes and mixed dtypes, 12 to 1000 bytes each."""
  rng = np.random.default_rng(0)
  dtypes = (ml_dtypes.bfloat16, np.float32, np.float16)
  shapes = ((3, 5), (7,), (1, 1), (25, 10), (2, 3, 4), (31,), (11, 3))
  return {
    f'layer.{i}.weight': rng.standard_normal(shape).astype(dtypes[i % 3])
    for i, shape in enumerate(shapes)
  }


def _write(directory, arrays, max_shard_bytes=10**9):
  specs = [tensor_files.Spec(name, x.dtype, x.shape) for name, x in arrays.items()]
  files = tensor_files.shards(specs, max_shard_bytes)
  tensor_files.write(directory, files, arrays.__getitem__)
  return files


def _header(content):
  length = int.from_bytes(content[:8], 'little')
  return json.loads(content[8 : 8 + length]), length


def _describe(arrays):
  return {name: (x.dtype, x.shape, x.tobytes()) for name, x in arrays.items()}


@pytest.mark.parametrize('max_shard_bytes', [10**9, 200, 1])
def test_written_files_are_read_back_by_us_and_by_the_library(tmp_path, max_shard_bytes):
  arrays = _arrays()
  files = _write(tmp_path, arrays, max_shard_bytes)
  read = {name: tensor_files.read(t) for name, t in tensor_files.find(tmp_path).items()}
  assert _describe(read) == _describe(arrays)
  theirs = {}
  for file in files:
    theirs |= safetensors.numpy.load_file(tmp_path / file)
    with safetensors.safe_open(tmp_path / file, 'np') as opened:
      assert opened.metadata() == {'format': 'pt'}
  assert _describe(theirs) == _describe(arrays)
  assert (tmp_path / _INDEX).exists() == (max_shard_bytes < 10**9)


def test_every_tensor_is_aligned_to_its_dtype(tmp_path):
  _write(tmp_path, _arrays())
  header, length = _header((tmp_path / 'model.safetensors').read_bytes())
  assert header.pop('__metadata__') and length % 8 == 0 and len(header) == 7
  for tensor in header.values():
    itemsize = tensor_files.DTYPES[tensor['dtype']].itemsize
    assert tensor['data_offsets'][0] % itemsize == 0


def test_shards_keep_their_limit_and_the_index_names_each_tensor(tmp_path):
  arrays = _arrays()
  files = _write(tmp_path, arrays, 200)
  index = json.loads((tmp_path / _INDEX).read_text())
  assert index['metadata'] == {'total_size': sum(x.nbytes for x in arrays.values())}
  assert list(index['weight_map']) == list(arrays)
  assert sorted(files) == sorted(path.name for path in tmp_path.glob('*.safetensors'))
  for file, specs in files.items():
    held = safetensors.numpy.load_file(tmp_path / file)
    assert set(held) == {k for k, v in index['weight_map'].items() if v == file}
    assert sum(x.nbytes for x in held.values()) <= 200 or len(specs) == 1
  sizes = [sum(spec.nbytes for spec in specs) for specs in files.values()]
  # Greedy: no two neighbours would have fitted into one file.
  assert all(a + b > 200 for a, b in zip(sizes, sizes[1:], strict=False))
  with pytest.raises(ValueError, match='max_shard_bytes is 0; a positive number'):
    tensor_files.shards([], 0)


def test_a_truncated_file_is_named(tmp_path):
  _write(tmp_path, _arrays())
  file = tmp_path / 'model.safetensors'
  whole = file.read_bytes()
  header = 8 + int.from_bytes(whole[:8], 'little')
  for length in (len(whole) - 1, header + 10, header, header - 1, 100, 8, 3, 0):
    file.write_bytes(whole[:length])
    with pytest.raises(ValueError, match=f'{file}: no safetensors file .* truncated'):
      tensor_files.find(tmp_path)
  file.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n')
  with pytest.raises(ValueError, match='a pointer in place of the file'):
    tensor_files.find(tmp_path)
  file.write_bytes(whole + b'\0')
  with pytest.raises(ValueError, match=f'{file}: .* file not fully covered'):
    tensor_files.find(tmp_path)


@pytest.mark.parametrize('dtype', ['int8', 'float64', ml_dtypes.float8_e4m3fn])
def test_a_dtype_that_is_no_weight_is_named(tmp_path, dtype):
  file = tmp_path / 'model.safetensors'
  safetensors.numpy.save_file({'x': np.ones(3, dtype)}, file)
  with pytest.raises(ValueError, match=f'{file}: tensor x is .* one of F32'):
    tensor_files.find(tmp_path)


def test_a_missing_or_mixed_up_shard_is_named(tmp_path):
  first, second = sorted(_write(tmp_path, _arrays(), 300))[:2]
  kept = (tmp_path / first).read_bytes()
  (tmp_path / first).unlink()
  said = f'{tmp_path / first}: missing, though {_INDEX} names it; fetch it'
  with pytest.raises(ValueError, match=said):
    tensor_files.find(tmp_path)
  (tmp_path / first).write_bytes((tmp_path / second).read_bytes())
  said = f'{tmp_path / first}: has tensor .* {_INDEX} does not put there; fetch both'
  with pytest.raises(ValueError, match=said):
    tensor_files.find(tmp_path)
  (tmp_path / first).write_bytes(kept)
  arrays = safetensors.numpy.load_file(tmp_path / first)
  lost = sorted(arrays)[0]
  arrays.pop(lost)
  safetensors.numpy.save_file(arrays, tmp_path / first)
  said = f'{tmp_path / first}: no tensor {lost}, which {_INDEX} puts there; fetch both'
  with pytest.raises(ValueError, match=said):
    tensor_files.find(tmp_path)
  (tmp_path / _INDEX).write_text('{}')
  with pytest.raises(ValueError, match=f'{_INDEX}: has no weight_map'):
    tensor_files.find(tmp_path)


@pytest.mark.parametrize(
  'name', ['../other/model.safetensors', '/etc/passwd', '..', '', 'a\x00.safetensors', 7]
)
def test_the_index_names_files_beside_it_only(tmp_path, name):
  for folder in ('other', 'model'):
    (tmp_path / folder).mkdir()
    _write(tmp_path / folder, {'w': np.zeros(3, np.float32)})
  directory = tmp_path / 'model'
  (directory / 'model.safetensors').unlink()
  (directory / _INDEX).write_text(json.dumps({'weight_map': {'w': name}}))
  said = r'index\.json: weight_map names .* not a \.safetensors file beside it'
  with pytest.raises(ValueError, match=said):
    tensor_files.find(directory)


def test_links_of_a_cache_of_downloads_are_followed(tmp_path):
  for folder in ('blobs', 'model'):
    (tmp_path / folder).mkdir()
  arrays = {'w': np.arange(3, dtype=np.float32)}
  _write(tmp_path / 'blobs', arrays)
  (tmp_path / 'blobs' / 'model.safetensors').rename(tmp_path / 'blobs' / 'f00')
  link = tmp_path / 'model' / 'model-1.safetensors'
  link.symlink_to('../blobs/f00')
  index = {'weight_map': {'w': link.name}}
  (tmp_path / 'model' / _INDEX).write_text(json.dumps(index))
  (tensor,) = tensor_files.find(tmp_path / 'model').values()
  np.testing.assert_array_equal(tensor_files.read(tensor), arrays['w'])
