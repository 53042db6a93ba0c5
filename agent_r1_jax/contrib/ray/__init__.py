"""Samplers that come and go, and remote environments, on Ray; see README.md.

train.run(..., samplers=ray.samplers(minimum=1, maximum=8, num_gpus=1))
train.run(..., make_env=ray.environments(make_env, maximum=4))
"""

from collections.abc import Callable, Mapping
from typing import Any

from agent_r1_jax.contrib.ray import cluster, pool, remote_env


def samplers(
  minimum: int = 1,
  maximum: int = 1,
  *,
  num_cpus: float = 1.0,
  num_gpus: float = 0.0,
  resources: Mapping[str, float] | None = None,
  address: str | None = None,
  wait_seconds: float = 1800.0,
  silence_seconds: float = 60.0,
  twice: bool = True,
) -> cluster.RaySamplers:
  """Makes the `samplers` of train.run.

  Args:
    minimum: With fewer samplers for `wait_seconds`, the run is saved and ends. Before
      that, it continues with the samplers it has.
    maximum: The maximum number of samplers. As many actors are requested, and each plays
      as soon as the cluster has a machine with room for it.
    num_cpus: The CPUs of each sampler, which are counted but not enforced.
    num_gpus: The GPUs of each sampler.
    resources: Other resources of each sampler, such as {'TPU': 4}, by Ray's names.
    address: The cluster's address; None uses RAY_ADDRESS, or this machine's cluster.
    wait_seconds: How long a run continues with fewer samplers than `minimum`. Within half
      of it a sampler must load and compile, or receive new parameters.
    silence_seconds: A sampler that does not answer for this long is lost.
    twice: Whether idle samplers also play others' long-running episodes; the first result
      counts. Tools are then called twice as well.
  """
  takes = {'num_cpus': num_cpus, 'num_gpus': num_gpus, 'resources': dict(resources or {})}
  options = pool.Options(minimum, maximum, wait_seconds, silence_seconds, twice)
  return cluster.RaySamplers(options, takes, address)


def environments(
  make_env: Callable[[], Any],
  maximum: int = 1,
  *,
  num_cpus: float = 1.0,
  resources: Mapping[str, float] | None = None,
  address: str | None = None,
  wait_seconds: float = 600.0,
  silence_seconds: float = 60.0,
) -> remote_env.Environments:
  """Makes a `make_env` whose environments, and their tools, are on other machines.

  Args:
    make_env: Makes an environment there. It is pickled, with everything it refers to.
    maximum: The maximum number of actors. As many are requested, and each holds
      environments as soon as the cluster has a machine with room for it.
    num_cpus: The CPUs of each actor, which are counted but not enforced.
    resources: Other resources of each actor, such as {'sandbox': 1}, by Ray's names.
    address: The cluster's address; None uses RAY_ADDRESS, or this machine's cluster.
    wait_seconds: How long a new environment waits for an actor. It counts towards
      limits.reset_seconds, too.
    silence_seconds: An actor that does not answer for this long is lost.
  """
  takes = {'num_cpus': num_cpus, 'resources': dict(resources or {})}
  return remote_env.Environments(
    make_env, maximum, takes, address, wait_seconds, silence_seconds
  )
