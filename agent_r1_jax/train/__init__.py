"""The training loop and its parts: train.run(config, workdir, ...)."""

from agent_r1_jax.train.loop import run as run
from agent_r1_jax.train.plan.setup import load as load
from agent_r1_jax.train.plan.setup import make_engine as make_engine
from agent_r1_jax.train.plan.setup import make_mesh as make_mesh
