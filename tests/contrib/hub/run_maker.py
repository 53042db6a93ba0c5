"""Workdirs as finished runs leave them, without the training."""

import dataclasses
import json
import pathlib

import jax
import runs
import tiny

from agent_r1_jax.models import lora
from agent_r1_jax.models.files import peft_files, weights
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train import fingerprint, metrics, run_files


def make(workdir: pathlib.Path, base: str, *, rank: int = 0, **kwargs) -> pathlib.Path:
  """Makes the files of a run of five steps that began with the model at `base`."""
  config = runs.config(base, lora_rank=rank, **kwargs)
  run_files.check_config(dataclasses.asdict(config), workdir, write=True)
  made_of = fingerprint.describe_run(
    algorithms.grpo(kl_coef=0.01), runs.make_env(), runs.tasks()
  )
  (workdir / 'made_of.json').write_text(json.dumps(made_of))
  metrics.write(workdir, 0, {'eval/dev/reward': 0.125, 'eval/dev/turns': 2})
  for step in range(1, 6):
    metrics.write(workdir, step, {'rollout/reward': step / 8, 'train/loss': 0.5})
  metrics.write(workdir, 5, {'eval/dev/reward': 0.875, 'eval/dev/episodes': 3})
  shape = tiny.config(layers=1)
  params = tiny.params(shape)
  if rank:
    params = lora.add(params, rank, ('q', 'v'), 4.0, jax.random.key(0))
    peft_files.save(workdir / 'adapter', params, base, shape)
  weights.save(workdir / 'model', shape, params, tokenizer_from=tiny.tokenizer_dir())
  return workdir


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}
