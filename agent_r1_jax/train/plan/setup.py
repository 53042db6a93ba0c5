"""Loads the player's side of a run: mesh, model, chat and engine."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.agent import call_formats, pictures
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.host import memory, runtime
from agent_r1_jax.models import (
  batch_invariant,
  decoder,
  four_bits,
  quantization,
  sharding,
)
from agent_r1_jax.models.files import weights

# Makes an engine; the default is `make_engine`.
MakeEngine = Callable[..., protocol.AnyEngine]


def make_mesh(config: config_lib.Mesh) -> Mesh | None:
  """Returns the mesh of the training chips; None for a single chip."""
  runtime.initialize()
  mesh, samplers = split_chips(config)
  if mesh:
    sharding.make_replica_meshes(mesh, samplers)  # Raises if these chips cannot sample.
  return mesh


def split_chips(
  config: config_lib.Mesh, absent: Sequence[Any] = ()
) -> tuple[Mesh | None, list[Any]]:
  """Returns the training mesh, None for a single chip, and this process's samplers.

  `absent` chips, of one process, replace the actual chips for ahead-of-time compilation;
  a single absent chip gets a mesh too.

  Raises:
    ValueError: The axes do not multiply to the number of chips.
  """
  if absent:
    cut = len(absent) - config.samplers
    devices, samplers = list(absent[:cut]), list(absent[cut:])
  else:
    devices, samplers = sharding.split_devices(config.samplers)
  axes = config.axes(len(devices))
  alone = len(devices) == math.prod(axes.values()) == 1 and not samplers
  if alone and not absent:
    return None, []
  return sharding.make_mesh(**axes, devices=devices), samplers


def load(
  config: config_lib.Model,
  chat: config_lib.Chat,
  mesh: Mesh | None = None,
  frozen: str = 'float32',
) -> tuple[decoder.DecoderConfig, decoder.Params, chat_lib.Chat]:
  """Loads the shape, the float32 parameters and the chat of the model in `config.path`.

  Parameters are sharded over a mesh as they are read, and stored in 8 bits if `frozen` is
  such a format; see quantization.freeze_leaf. Experts keep their 4 bits wherever
  `config.frozen` says so.
  """
  chat.check()
  runtime.initialize()
  # An earlier run in this process may have left its engine in a reference cycle.
  memory.release_freed_memory(cycles=True)
  place, scales = sharding.make_placer(mesh), {}

  def place_frozen(path: str, x: np.ndarray) -> Any:
    leaf, scale = quantization.freeze_leaf(path, place(path, x), config.dtype, frozen)
    if scale is not None:
      scales[path] = scale
    return leaf

  packed = config.frozen == four_bits.FORMAT
  frozen = config.frozen if packed else frozen
  rounds = frozen != 'float32'
  shape, params = weights.load(
    config.path,
    dtype='float32',
    place=place_frozen if rounds else place,
    formats=config.formats,
    packed=packed,
  )
  if rounds:
    params = quantization.add_scales(params, scales)
    if mesh:  # Programs may have placed their results elsewhere.
      params = jax.device_put(params, sharding.make_shardings(params, mesh))
  shape = dataclasses.replace(
    shape,
    dtype=config.dtype,
    remat=config.remat or 'none',
    ops=batch_invariant.INVARIANT if config.batch_invariant else None,
  )
  return (
    shape,
    params,
    chat_lib.Chat(
      tokenizer_lib.load(config.path),
      max_tool_tokens=chat.max_tool_tokens,
      tools_in_prompt=chat.tools_in_prompt,
      tool_format=call_formats.FORMATS.get(chat.tool_format),
      stop_strings=fields.parse_json('chat.stop_strings', chat.stop_strings, list),
      template_kwargs=fields.parse_json('chat.template', chat.template, dict),
      date=chat.date,
      pictures=shape.vision
      and pictures.load(
        config.path, shape.vision.token_size, shape.vision.colours, shape.vision.films
      ),
    ),
  )


def make_engine(
  config: config_lib.Config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  mesh: Mesh | None = None,
  guides: Iterable[guide_lib.Guide] = (),
  **adapters: Any,
) -> engine_lib.Engine:
  """Makes an engine with the sizes in `config.engine` on the chips of this process.

  Requests may use the guides, which have no parameters. `adapters` and `adapter_rank` are
  passed to Engine, whose default is no room for adapters.
  """
  sizes = dataclasses.asdict(config.engine)
  sizes['replicas'] = sizes['replicas'] or 1
  return engine_lib.Engine(
    model,
    params,
    guides=dict.fromkeys(guides),
    mesh=mesh,
    chips=sharding.split_devices(config.mesh.samplers)[1],
    **sizes,
    **adapters,
  )
