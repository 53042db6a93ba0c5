"""A cluster of Ray on this machine, whose nodes can be killed as machines are.

Run as a script, it starts the nodes: for that, Ray forks, which a process with JAX's
threads must not.
"""

import contextlib
import json
import mmap
import os
import pathlib
import signal
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[3]
_QUIET = {'RAY_USAGE_STATS_ENABLED': '0', 'RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO': '0'}
# What the script is asked for, and the resource of each node.
_ADD, PLACE = 'add', 'place'


class LocalCluster:
  """A cluster inside `with`; each node but its head has room for one sampler.

  A node is the list of the processes that Ray starts for it.

  Attributes:
    address: What ray.samplers takes as address.
    path: Where its processes find modules.
    nodes: The nodes that were not killed, without the head.
    pids: All processes that were seen.
  """

  def __init__(self, *folders: pathlib.Path, **environment: str):
    """Takes folders with further modules, and environment variables of the nodes."""
    self.path = os.pathsep.join(map(str, (_ROOT, *folders)))
    self._environment = _QUIET | environment | {'PYTHONPATH': self.path}
    self.nodes: list[list[int]] = []
    self.pids = set[int]()

  def __enter__(self):
    self._host = subprocess.Popen(
      [sys.executable, __file__],
      env=os.environ | self._environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    assert self._host.stdin and self._host.stdout
    self._requests, self._answers = self._host.stdin, self._host.stdout
    self.address = self._read()
    return self

  def __exit__(self, *_):
    self._list_tree([self._host.pid])
    self._host.communicate()

  def add(self) -> list[int]:
    """Adds a node."""
    print(_ADD, file=self._requests, flush=True)
    self.nodes.append(self._read())
    return self.nodes[-1]

  def kill(self, node: list[int]) -> None:
    """Ends all processes of a node with SIGKILL, as if its machine were gone."""
    self.nodes = [other for other in self.nodes if other != node]
    for pid in self._list_tree(node):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def keep(self, count: int) -> None:
    """Has so many nodes, the newest ones and perhaps new ones."""
    for node in self.nodes[: len(self.nodes) - count]:
      self.kill(node)
    while len(self.nodes) < count:
      self.add()

  def list_samplers(self, node: list[int]) -> list[int]:
    """Lists the processes that sample on a node."""
    return [pid for pid in self._list_tree(node) if 'Sampler' in _read_command(pid)]

  def measure_memory(self) -> int:
    """Returns the bytes of pages that are of one process of the nodes alone."""
    found = [pid for node in self.nodes for pid in self._list_tree(node)]
    return sum(map(_read_memory, found))

  def _list_tree(self, found: list[int]) -> list[int]:
    """Lists the processes and all that they have started."""
    found = [*found]
    for pid in found:
      found += _list_children(pid)
    self.pids |= {*found}
    return found

  def _read(self):
    return json.loads(self._answers.readline())


def _list_children(pid: int) -> list[int]:
  tasks = pathlib.Path(f'/proc/{pid}/task')
  try:
    lines = [path.read_text() for path in tasks.glob('*/children')]
  except (FileNotFoundError, ProcessLookupError):
    return []
  return [int(child) for line in lines for child in line.split()]


def _read_memory(pid: int) -> int:
  """Returns the bytes of a process's pages that no file backs and nobody shares."""
  try:
    _, resident, shared, *_ = pathlib.Path(f'/proc/{pid}/statm').read_text().split()
  except (FileNotFoundError, ProcessLookupError):
    return 0
  return (int(resident) - int(shared)) * mmap.PAGESIZE


def _read_command(pid: int) -> str:
  try:
    return pathlib.Path(f'/proc/{pid}/cmdline').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return ''


def main() -> None:
  """Adds a node for each line of standard input; ends all of them with it."""
  from ray import cluster_utils

  # Ray's own lines must not come between the answers.
  answers, sys.stdout = sys.stdout, sys.stderr
  options = {'include_dashboard': False, 'object_store_memory': 80 << 20}
  cluster = cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 0} | options
  )
  print(json.dumps(cluster.address), file=answers, flush=True)
  for _ in sys.stdin:
    node = cluster.add_node(wait=False, num_cpus=1, resources={PLACE: 1}, **options)
    infos = [info for infos in node.all_processes.values() for info in infos]
    print(json.dumps([x.process.pid for x in infos]), file=answers, flush=True)
  cluster.shutdown()


if __name__ == '__main__':
  main()
