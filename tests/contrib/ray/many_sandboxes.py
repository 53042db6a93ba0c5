"""Plays many episodes with a shell each on a local cluster of Ray, and counts.

python tests/contrib/ray/many_sandboxes.py EPISODES AT_A_TIME MACHINES [kill]

Half way it kills a machine, if asked to, and adds another one. Each episode writes a file
with one command and reads it a second later with another.
"""

import asyncio
import collections
from concurrent import futures
import json
import pathlib
import sys
import time

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.contrib import ray
from agent_r1_jax.host import workers
from agent_r1_jax.tools import shell


class ShellEnv(env_lib.BaseEnv):
  """Runs each reply in a shell, and ends with the second."""

  def __init__(self):
    self._shell, self._turns = shell.Shell(), 0

  def reset(self, task):
    return task.messages

  def step(self, reply):
    self._turns += 1
    text = self._shell.run(reply).text
    answer = [{'role': 'user', 'content': text}]
    return types.Step(answer, reward=float(len(text)), done=self._turns == 2)

  def close(self):
    self._shell.close()


def play(cluster, episodes, at_a_time, machines, kills=False):
  """Plays episodes; returns how many were right, how often played, and the memory."""
  cluster.keep(machines)
  place = {'num_cpus': 0, 'resources': {'place': 1}, 'address': cluster.address}
  make_env = ray.environments(ShellEnv, machines, **place)
  made, held, memory = collections.Counter(), [], []

  async def play_once(number):
    made[number] += 1
    env = await asyncio.to_thread(make_env)
    try:
      await env.reset(types.Task(str(number), []))
      await env.step(f'echo {number} > kept')
      step = await env.step('sleep 1; cat kept; rm kept')
      return step.messages[0]['content'].split() == [str(number)]
    finally:
      await env.close()

  async def play_all():
    threads = futures.ThreadPoolExecutor(at_a_time)
    asyncio.get_running_loop().set_default_executor(threads)
    room, ended = asyncio.Semaphore(at_a_time), []

    async def play_one(number):
      async with room:
        while True:
          try:
            right = await play_once(number)
            break
          except workers.LostCallError:
            continue
      ended.append(right)
      if len(ended) * 10 % episodes == 0:
        held.append(make_env.measure()['held'])
        memory.append(round(cluster.measure_memory() / 1e6))
      if kills and len(ended) == episodes // 2:
        await asyncio.to_thread(cluster.kill, cluster.nodes[0])
        await asyncio.to_thread(cluster.add)

    await asyncio.gather(*map(play_one, range(episodes)))
    return sum(ended)

  began = time.monotonic()
  right = asyncio.run(play_all())
  counts = make_env.measure()
  make_env.close()
  return {
    'right': right,
    'replayed': sum(made.values()) - episodes,
    'seconds': round(time.monotonic() - began, 1),
    **counts,
    'held': held,
    'megabytes': memory,
  }


if __name__ == '__main__':
  import local_cluster

  episodes, at_a_time, machines = map(int, sys.argv[1:4])
  here = pathlib.Path(__file__).parent
  with local_cluster.LocalCluster(here, here.parents[1]) as made_cluster:
    print(
      json.dumps(play(made_cluster, episodes, at_a_time, machines, 'kill' in sys.argv))
    )
