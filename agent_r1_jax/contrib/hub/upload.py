"""Uploads a run's model, or its adapters, and their card to the Hugging Face Hub."""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import fnmatch
import json
import pathlib
import re
from typing import Any

from agent_r1_jax.contrib.hub import model_card, run_record

# An upload replaces all of these: leftover files of an earlier one would be read too.
_WEIGHTS = ('model*.safetensors', 'model.safetensors.index.json')
_SECONDS = 120.0


def collect(
  record: run_record.RunRecord, card: str, repository: str, base: str = ''
) -> dict[str, pathlib.Path | bytes]:
  """Returns the files of a repository by their names there, as paths or bytes.

  Args:
    record: The run; its part is published.
    card: The text of the model card.
    repository: USER/NAME.
    base: The repository of the adapters' base model, which replaces this machine's
      directory in their configuration.

  Raises:
    ValueError: The base model of adapters is unknown.
  """
  files: dict[str, pathlib.Path | bytes] = {
    path.name: path
    for path in sorted(record.folder.iterdir())
    if path.is_file() and not path.name.startswith('.')
  }
  files['README.md'] = card.replace(model_card.REPOSITORY, repository).encode()
  if record.part == 'adapter':
    if not base:
      raise ValueError(
        'adapter_config.json names a directory of this machine as the base model, which '
        'nobody else has: give --base_model=USER/NAME, its repository on the Hub'
      )
    path = record.folder / 'adapter_config.json'
    settings = json.loads(path.read_text()) | {'base_model_name_or_path': base}
    files[path.name] = (json.dumps(settings, indent=2) + '\n').encode()
  return files


def measure(content: pathlib.Path | bytes) -> int:
  """Returns the size of a file of `collect`, in bytes."""
  return len(content) if isinstance(content, bytes) else content.stat().st_size


def push(
  repository: str,
  files: Mapping[str, pathlib.Path | bytes],
  *,
  public: bool = False,
  message: str = 'Upload a policy trained by agent_r1_jax',
  seconds: float = _SECONDS,
  endpoint: str | None = None,
  token: str | None = None,
) -> str:
  """Uploads files in one commit; creates the repository if necessary.

  If the files include model weights, weights of earlier uploads are deleted in the same
  commit.

  Args:
    repository: USER/NAME.
    files: The files by their names in the repository, as from `collect`.
    public: Whether everybody may read a repository that is created or already exists.
    message: The title of the commit.
    seconds: How long the Hub may be silent. The library's own client would wait forever:
      it gets this limit, for the process.
    endpoint: The address of the Hub; None is the library's, which reads HF_ENDPOINT.
    token: The user's token; None is the library's, which reads HF_TOKEN and the token
      that `hf auth login` has saved.

  Returns:
    The address of the commit.

  Raises:
    ValueError: The name is wrong, there is no token, the token may not write, or the
      repository is public and `public` is not set. Nothing has been uploaded.
    OSError: The Hub is unreachable, silent or fails. The repository is unchanged, or
      empty.
  """
  import huggingface_hub

  _check_name(repository)
  api = huggingface_hub.HfApi(endpoint=endpoint, token=token)
  if not (token or huggingface_hub.get_token()):
    raise ValueError(
      'there is no token for the Hub: run `hf auth login`, or set HF_TOKEN to one that '
      f'may write, from {api.endpoint}/settings/tokens'
    )
  _bound_silence(seconds)
  with _explain_errors(repository, api.endpoint, seconds):
    api.create_repo(repository, private=not public, exist_ok=True)
    info = api.model_info(repository)
  if not (info.private or public):
    raise ValueError(
      f'{repository} exists and is public: everybody could read what is uploaded. Give '
      '--public if that is intended, or another name'
    )
  there = [file.rfilename for file in info.siblings or ()]
  operations: list[Any] = [
    *map(huggingface_hub.CommitOperationDelete, _find_old_weights(there, files)),
    *(huggingface_hub.CommitOperationAdd(*file) for file in files.items()),
  ]
  with _explain_errors(repository, api.endpoint, seconds):
    return api.create_commit(repository, operations, commit_message=message).commit_url


def _find_old_weights(there: Iterable[str], files: Iterable[str]) -> list[str]:
  """Returns the weights in a repository that new files replace."""
  find = lambda names: {x for kind in _WEIGHTS for x in fnmatch.filter(names, kind)}
  new = find(files)
  return sorted(find(there) - new) if new else []


def _check_name(repository: str) -> None:
  from huggingface_hub import errors, utils

  with contextlib.suppress(errors.HFValidationError):
    utils.validate_repo_id(repository)
    if '/' in repository:
      return
  raise ValueError(
    f'{repository!r} is no name of a repository: give USER/NAME, of letters, digits, -, '
    '_ and ., without two of these signs side by side'
  )


def _bound_silence(seconds: float) -> None:
  """Gives the library's client, and its replacements, a time-out."""
  import huggingface_hub

  session = huggingface_hub.get_session()
  kind, hooks = type(session), session.event_hooks
  huggingface_hub.set_client_factory(
    lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=seconds)
  )


@contextlib.contextmanager
def _explain_errors(repository: str, endpoint: str, seconds: float) -> Iterator[None]:
  """Replaces the library's errors inside `with` by one-line errors."""
  try:
    yield
  except Exception as error:
    # Errors of the library, its HTTP client and its uploader, and of a bad answer.
    raise _explain(error, repository, endpoint, seconds) from error


def _explain(
  error: Exception, repository: str, endpoint: str, seconds: float
) -> Exception:
  """Returns an error that says in one line what happened, and what to do."""
  chain: list[BaseException] = [error]
  while cause := chain[-1].__cause__:
    chain.append(cause)
  text = re.sub(r'\s+', ' ', str(chain[-1]))[:300]
  response = next((r for e in chain if (r := getattr(e, 'response', None))), None)
  if response is None:
    name = type(chain[-1]).__name__
    if 'Timeout' in name:
      return OSError(
        f'{endpoint} was silent for {seconds:g} seconds: give the same command again '
        'later, and look whether HF_ENDPOINT and the proxies are right'
      )
    return OSError(
      f'{endpoint} cannot be reached, or is no Hub ({name}: {text}): look at the '
      'network, HF_ENDPOINT and the proxies, and give the same command again'
    )
  status = response.status_code
  if status == 401:
    return ValueError(
      f'{endpoint} does not accept the token (HTTP 401): make one that may write at '
      f'{endpoint}/settings/tokens, and set HF_TOKEN to it'
    )
  if status == 403:
    return ValueError(
      f'the token may not write to {repository} (HTTP 403): give --repo with your own '
      f'user name, or a token that may, from {endpoint}/settings/tokens'
    )
  said = getattr(chain[0], 'server_message', None) or text
  return OSError(
    f'{endpoint} refused the upload to {repository} (HTTP {status}: {said}). The '
    'repository is as it was; give the same command again, later if the Hub is busy'
  )
