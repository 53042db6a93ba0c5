"""An engine that samples on servers, over HTTP.

train.run(config, workdir, ..., make_engine=http_engine.connect(
['http://gpu-1:8000', 'http://gpu-2:8000'], '/shared/policy'))
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
import logging
import os
import pathlib
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax.contrib.external import dialects
from agent_r1_jax.contrib.external import server as server_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.host import processes
from agent_r1_jax.models.files import weights
from agent_r1_jax.web import bounded_http

_LOGGER = logging.getLogger(__name__)


def connect(
  urls: Sequence[str],
  directory: str | os.PathLike,
  *,
  dialect: dialects.Dialect = dialects.VLLM,
  model: str = '',
  rows: int = 64,
  seconds: float = 600.0,
  patience: float = 60.0,
) -> Callable[..., 'HttpEngine']:
  """Returns the make_engine argument of train.run.

  Args:
    urls: The servers' addresses without a path, such as http://10.0.0.7:8000.
    directory: Where the policy is written before each rollout. All servers see it under
      this name, and have been started with the model in it.
    dialect: The servers' API.
    model: Their name for the policy; '' lets them choose.
    rows: How many episodes play on each server at a time.
    seconds: Time limit of a reply, and of a weight update.
    patience: For how many seconds to retry a failing call, on another server if there is
      one.
  """
  if isinstance(urls, str) or not urls:
    raise ValueError(f'urls is {urls!r}; give a list of addresses.')
  addresses = [bounded_http.check_url(url) for url in urls]
  options = server_lib.Options(dialect, model, seconds, patience)

  def make(config: config_lib.Config, shape, params, mesh=None, guides=(), **adapters):
    target = pathlib.Path(directory).resolve()
    _check(config, shape, guides, target)
    sizes, stats = server_lib.Sizes(rows, config.engine.slots), protocol.Stats()
    servers = [server_lib.Server(url, shape, sizes, stats, options) for url in addresses]
    for server in servers:
      server.others = servers
    save = functools.partial(
      weights.save,
      target,
      shape,
      dtype=config.model.dtype,
      tokenizer_from=config.model.path,
    )
    return HttpEngine(shape, mesh, servers, stats, save, str(target))

  return make


def _check(
  config: config_lib.Config, shape: Any, guides: Iterable, directory: pathlib.Path
):
  """Raises ValueError for settings that this engine does not support."""
  if config.model.path and directory == pathlib.Path(config.model.path).resolve():
    raise ValueError(
      f'directory is model.path, {config.model.path}: each step would overwrite the '
      'policy that the run starts from. Copy it, and start the servers with the copy.'
    )
  wrong = {
    'schedule.ahead': config.schedule.ahead,
    'model.batch_invariant': config.model.batch_invariant,
    'batch.replay': config.batch.replay and shape.num_experts,
    'sampling.tool_grammar': config.sampling.tool_grammar,
    'evaluation.tool_grammar': config.evaluation.tool_grammar,
    'guides': list(guides),
    'a model that sees pictures': shape.vision,
    'several processes': processes.is_distributed(),
  }
  if names := [name for name, value in wrong.items() if value]:
    raise ValueError(f'make_engine: an external engine excludes {", ".join(names)}.')


class HttpEngine(protocol.AnyEngine):
  """Servers that sample from one policy, the last one synced."""

  replicas: Sequence[server_lib.Server]

  def __init__(self, config, mesh, servers, stats, save: Callable[..., None], path: str):
    """Sends nothing yet; `save` writes parameters to the directory `path`."""
    super().__init__(config, mesh, servers, stats)
    self.sizes = servers[0].sizes
    self._save, self._path = save, path
    self._synced, self._versions = None, itertools.count(1)
    self._version = 0

  def sync_weights(self, params, policy_step):
    """Writes the parameters, and makes all servers load them.

    A server that fails is left out until it loads later parameters.

    Raises:
      server_lib.LostServerError: All servers failed.
    """
    if params is not self._synced:
      self._synced = None
      # The servers' models have no value head.
      self._save({name: x for name, x in params.items() if name != 'value_head'})
      self._version = next(self._versions)
      failed = [
        f'{s.url}: {error}' for s in self.replicas if (error := s.update(self._path))
      ]
      if len(failed) == len(self.replicas):
        text = f'no server has loaded {self._path}: {"; ".join(failed)}'
        raise server_lib.LostServerError(text)
      for line in failed:
        _LOGGER.warning('Left out until it loads the weights: %s', line)
      self._synced = params
    for server in self.replicas:
      server.step = policy_step

  def make_policy(self, params, policy_step):
    """Names the synced policy; the servers have no other."""
    if params is not self._synced:
      raise ValueError('An external engine has one policy at a time: sync it first.')
    return protocol.Policy([], policy_step, self._version)

  def warm_up(self, on_done=lambda done, all: None, automata=()):
    """Does nothing: a server that has loaded the weights is ready."""
