"""Model cards, and uploads to a Hub on this machine."""

import json
import os
import pathlib
import re
import subprocess
import sys

import hub_server
import huggingface_hub
from huggingface_hub import constants
import plain
import pytest
import run_maker
import runs
import tiny
import transformers
import yaml

from agent_r1_jax.agent import tokenizer
from agent_r1_jax.contrib.hub import model_card, publishing, run_record, upload
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models.files import peft_files, weights

# The library gives its HTTP client the bytes of an object by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")
REPOSITORY = f'{hub_server.USER}/search-policy'
model = runs.model


@pytest.fixture
def hub(monkeypatch):
  """The Hub; the library in this process may reach it, as one that has no Xet."""
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
  monkeypatch.setattr(constants, 'HF_HUB_DISABLE_TELEMETRY', True)
  with hub_server.Hub().running() as server:
    yield server


@pytest.fixture
def workdir(tmp_path, model):
  return run_maker.make(tmp_path / 'a run', model)


def read(workdir, part='model'):
  with run_record.open_run(workdir, part) as record:
    return record


def push(hub, files, repository=REPOSITORY, token=hub_server.TOKEN, **kwargs):
  kwargs = {'seconds': 30.0} | kwargs
  return upload.push(repository, files, endpoint=hub.address, token=token, **kwargs)


class TestCard:
  def test_it_says_what_the_run_was(self, workdir, model):
    (workdir / 'table.md').write_text('## Exact match\n\n| method |\n|---|\n| GRPO |\n')
    text = model_card.write(read(workdir), base='Qwen/Qwen3-4B', license_id='mit')
    _, head, body = text.split('---\n', 2)
    assert yaml.safe_load(head) == {
      'library_name': 'transformers',
      'pipeline_tag': 'text-generation',
      'base_model': 'Qwen/Qwen3-4B',
      'base_model_relation': 'finetune',
      'license': 'mit',
      'tags': ['agent_r1_jax', 'reinforcement-learning', 'agent', 'tool-use'],
    }
    version = json.loads((workdir / 'config.json').read_text())['version']
    for words in (
      *('LlamaForCausalLM, F32', 'turns that call `look`', '### Exact match'),
      *('group_relative(divide_by_std=True)', 'InLoss(coef=0.01, estimator=k3'),
      *('5 of 5, each of 2 tasks with 4 episodes', f' {version} ', '| reward        |'),
      *('0.125 (step 0)', '0.875 (step 5) | 3 ', '0.625 (step 5) | - '),
      *('limits.max_turn_tokens', '3 replies of 6 tokens, in a context of 96 tokens'),
      *("from_pretrained('USER/NAME')", '--config.model.path=policy'),
      'vllm serve USER/NAME',
    ):
      assert words in body, words
    assert 'seed' not in body and 'No licence' not in body
    assert str(workdir.parent) not in text and os.path.dirname(model) not in text

  @pytest.mark.parametrize('path', ['/home/me/judge', '~/judge', 'C:\\me\\judge'])
  def test_functions_of_a_path_say_its_name_alone(self, workdir, path):
    made_of = json.loads((workdir / 'made_of.json').read_text())
    made_of['algorithm']['advantages'] = {
      'function': 'make.<locals>.judge',
      'code': '5c96defb7083e6f7',
      'path': repr(path),
      'question': repr('yes/no'),
    }
    (workdir / 'made_of.json').write_text(json.dumps(made_of))
    text = model_card.write(read(workdir))
    assert "make(path='judge', question='yes/no')" in text

  def test_it_says_what_is_not_known(self, workdir):
    (workdir / 'made_of.json').unlink()
    text = model_card.write(read(workdir))
    assert 'base_model' not in text and "a local model, in a folder named 'tiny'" in text
    assert 'No licence is stated' in text and 'no table of held-out tasks' in text

  def test_adapters_name_their_base(self, tmp_path, model):
    workdir = run_maker.make(tmp_path, model, rank=3)
    text = model_card.write(read(workdir, 'adapter'), base='Qwen/Qwen3-4B')
    metadata = yaml.safe_load(text.split('---\n')[1])
    assert metadata['library_name'] == 'peft'
    assert metadata['base_model_relation'] == 'adapter'
    assert '--max-lora-rank 3' in text and 'vllm serve Qwen/Qwen3-4B' in text

  @pytest.mark.parametrize(
    ('path', 'base'),
    [
      ('/h/models--Qwen--Qwen3-4B/snapshots/0a1b', 'Qwen/Qwen3-4B'),
      ('third_party/downloads/qwen3-4b', 'Qwen/Qwen3-4B'),
      ('third_party/downloads/hotpotqa', ''),
      ('/data/qwen3-4b', ''),
      ('', ''),
    ],
  )
  def test_the_base_is_known_of_what_was_downloaded(self, path, base):
    manifest = pathlib.Path(__file__).parents[3] / 'third_party' / 'manifest.json'
    entries = json.loads(manifest.read_text())['entries']
    assert publishing.find_base(path, entries) == base


class TestUpload:
  def test_what_arrives_are_the_files_and_the_card_in_one_commit(
    self, hub, workdir, tmp_path
  ):
    files = upload.collect(read(workdir), 'A card of USER/NAME.', REPOSITORY)
    files['README.md'] = b'---\n---\n' + files['README.md']
    url = push(hub, files)
    assert url.startswith(f'{hub.address}/{REPOSITORY}/commit/')
    sent = dict(hub.repositories[REPOSITORY])
    assert sent.pop('README.md').endswith(f'A card of {REPOSITORY}.'.encode())
    assert sent.pop('.gitattributes') == b''
    assert sent == run_maker.read_files(workdir / 'model')
    assert len(hub.commits) == 1 and not hub.public
    folder = huggingface_hub.snapshot_download(
      REPOSITORY, endpoint=hub.address, token=hub_server.TOKEN, cache_dir=tmp_path / 'c'
    )
    shape, params = weights.load(folder)
    assert shape == tiny.config(layers=1)
    plain.equal(params, tiny.params(shape))
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.hidden_size) == ('llama', 16)
    read_by_them = transformers.AutoTokenizer.from_pretrained(folder)
    text = 'What is the capital of the country?'
    assert read_by_them.encode(text) == tokenizer.load(workdir / 'model').encode(text)

  def test_weights_of_an_earlier_upload_go_and_other_files_stay(self, hub, workdir):
    files = upload.collect(read(workdir), '---\n---\n', REPOSITORY)
    shards = {f'model-0000{i}-of-00002.safetensors': b'x' for i in (1, 2)}
    index = {'model.safetensors.index.json': b'{}'}
    hub.repositories[REPOSITORY] = {**shards, **index, 'notes.md': b'mine'}
    push(hub, files)
    assert hub.repositories[REPOSITORY].keys() == {*files, 'notes.md'}
    assert len(hub.commits) == 1
    push(hub, {'README.md': b'---\n---\n', 'adapter_model.safetensors': b'x'})
    assert hub.repositories[REPOSITORY].keys() > {*files, 'notes.md'}

  def test_adapters_arrive_with_the_name_of_their_base(
    self, hub, tmp_path, model, refused
  ):
    record = read(run_maker.make(tmp_path / 'run', model, rank=3), 'adapter')
    with refused('--base_model=USER/NAME'):
      upload.collect(record, '---\n---\n', REPOSITORY)
    push(hub, upload.collect(record, '---\n---\n', REPOSITORY, 'Qwen/Qwen3-4B'))
    sent = hub.repositories[REPOSITORY]
    settings = json.loads(sent['adapter_config.json'])
    assert settings['base_model_name_or_path'] == 'Qwen/Qwen3-4B'
    assert model.encode() not in sent['adapter_config.json']
    for name, content in sent.items():
      (tmp_path / name).write_bytes(content)
    shape = tiny.config(layers=1)
    plain.equal(peft_files.load(tmp_path, shape), peft_files.load(record.folder, shape))

  def test_a_public_repository_gets_nothing_without_public(self, hub):
    files = {'README.md': b'---\n---\n'}
    push(hub, files, public=True)
    assert hub.public == {REPOSITORY} and len(hub.commits) == 1
    with pytest.raises(ValueError, match='exists and is public: .*--public'):
      push(hub, files)
    assert len(hub.commits) == 1

  @pytest.mark.parametrize('name', ['policy', 'a/b/c', 'a b/c', 'a/b--c', '-a/b', 'a/'])
  def test_a_wrong_name_is_refused_before_anything_is_asked(self, hub, name):
    with pytest.raises(ValueError, match='no name of a repository: give USER/NAME'):
      push(hub, {}, name)
    assert not hub.requests

  def test_no_token(self, hub, monkeypatch, tmp_path):
    monkeypatch.delenv('HF_TOKEN', raising=False)
    monkeypatch.setattr(constants, 'HF_TOKEN_PATH', str(tmp_path / 'none'))
    with pytest.raises(ValueError, match='no token for the Hub: run `hf auth login`'):
      push(hub, {}, token=None)
    assert not hub.requests

  @pytest.mark.parametrize(
    ('answers', 'kind', 'message'),
    [
      ({'/create': 401}, ValueError, 'does not accept the token .HTTP 401.: make one'),
      ({'/create': 403}, ValueError, 'may not write to somebody/.* .HTTP 403.: give'),
      ({'/commit/': 403}, ValueError, 'may not write to somebody/.* .HTTP 403.: give'),
      ({'/commit/': 409}, OSError, 'HTTP 409: the tests say 409.* as it was; give'),
      ({'/create': 500}, OSError, 'HTTP 500: the tests say 500.* as it was; give'),
      ({'/commit/': 500}, OSError, 'HTTP 500: the tests say 500.* as it was; give'),
      ({'/objects/': 400}, OSError, 'HTTP 400: .* as it was; give'),
      ({'/create': None}, OSError, 'was silent for 0.5 seconds: give the same'),
      ({'/commit/': None}, OSError, 'was silent for 0.5 seconds: give the same'),
      ({'/create': 200}, OSError, 'cannot be reached, or is no Hub .KeyError'),
    ],
  )
  def test_a_hub_that_fails_ends_it_with_a_line(self, hub, answers, kind, message):
    hub.answers = answers
    files = {'README.md': b'---\n---\n', 'model.safetensors': bytes(5000)}
    with pytest.raises(kind, match=message) as caught:
      push(hub, files, seconds=0.5 if None in answers.values() else 30.0)
    assert '\n' not in str(caught.value) and not hub.commits

  def test_no_hub(self, hub):
    closed = hub_server.Hub()
    closed.server_close()
    with pytest.raises(OSError, match='cannot be reached.*Connect.*HF_ENDPOINT'):
      push(closed, {})


def run(workdir, *arguments, **environment):
  command = [sys.executable, '-m', 'experiments.publish', f'--workdir={workdir}']
  return subprocess.run(
    [*command, *arguments],
    env=os.environ | environment,
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_the_command_writes_a_card_keeps_it_and_uploads(hub, workdir, tmp_path):
  card = workdir / 'model_card.md'
  card.write_text('---\n---\n\n# USER/NAME\n\nMine.\n')
  said = run(
    workdir,
    f'--repo={REPOSITORY}',
    HF_ENDPOINT=hub.address,
    HF_TOKEN=hub_server.TOKEN,
    HF_HOME=str(tmp_path / 'home'),
    HF_HUB_OFFLINE='0',
    HF_HUB_DISABLE_XET='1',
  )
  assert said.returncode == 0, said.stderr
  sent = hub.repositories[REPOSITORY]
  assert sent['README.md'].decode() == f'---\n---\n\n# {REPOSITORY}\n\nMine.\n'
  listed = re.findall(r'^ *([\d,]+) bytes  (\S+)$', said.stdout, re.M)
  sizes = {name: int(size.replace(',', '')) for size, name in listed}
  assert sizes == {n: len(x) for n, x in sent.items() if n != '.gitattributes'}
  assert f'uploads to {REPOSITORY} (private):' in said.stdout
  assert f'{hub.address}/{REPOSITORY}/commit/' in said.stdout.splitlines()[-1]


class TestMistakes:
  """Nothing is written or sent."""

  def test_without_a_repository_the_card_is_all(self, hub, workdir, capsys):
    publishing.publish(workdir)
    text = (workdir / 'model_card.md').read_text()
    assert text == model_card.write(read(workdir)) and not hub.requests
    assert 'Nothing was uploaded: --repo' in capsys.readouterr().out

  def test_a_card_older_than_its_model(self, workdir, refused):
    card = workdir / 'model_card.md'
    card.write_text('mine')
    os.utime(card, (1, 1))
    with refused('--rewrite'):
      publishing.publish(workdir)
    assert card.read_text() == 'mine'
    publishing.publish(workdir, rewrite=True)
    assert card.read_text() != 'mine'

  def test_no_run(self, tmp_path, refused):
    with refused('--workdir'):
      publishing.publish(tmp_path / 'nosuch')
    assert not (tmp_path / 'nosuch').exists()

  def test_a_run_that_has_not_written_its_model(self, workdir, refused):
    (workdir / 'model' / 'model.safetensors').unlink()
    with refused('5 of 5 are done'):
      publishing.publish(workdir)

  def test_a_run_without_adapters(self, workdir, refused):
    with refused('model.lora_rank'):
      publishing.publish(workdir, part='adapter')

  def test_a_run_that_is_still_going_on(self, workdir):
    with workdir_lib.lock(workdir):
      with pytest.raises(
        ValueError, match='is in use by another run .process .* end tha'
      ):
        publishing.publish(workdir)
    assert not (workdir / 'model_card.md').exists()

  def test_a_damaged_file(self, workdir, refused):
    (workdir / 'made_of.json').write_text('{')
    with refused('made_of.json'):
      publishing.publish(workdir)
