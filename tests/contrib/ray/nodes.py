"""Nodes of Ray on this machine, which can be killed as machines are.

Run as a script, it starts them: to do that, Ray forks, which a process with JAX must not.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import waiting

_HERE = pathlib.Path(__file__).parent
# Where nodes find this package and the modules of its tests.
PATH = os.pathsep.join(map(str, (_HERE.parents[2], _HERE.parents[1], _HERE)))


class Cluster:
  """A cluster inside `with`; each node but its head has room for one sampler."""

  def __enter__(self):
    quiet = {'RAY_USAGE_STATS_ENABLED': '0', 'RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO': '0'}
    quiet['AGENT_R1_TEST_NODE'] = '1'  # See coded.py.
    self._host = subprocess.Popen(
      [sys.executable, __file__],
      env=os.environ | quiet | {'PYTHONPATH': PATH},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._seen, self._nodes = set[int](), list[list[int]]()
    self.address, self._head = self._read()
    return self

  def __exit__(self, *_):
    self._list_tree([self._host.pid])
    self._host.communicate()

  def add(self) -> list[int]:
    """Adds a node, which is the processes that Ray starts for it."""
    self._host.stdin.write('add\n')
    self._host.stdin.flush()
    self._nodes.append(self._read())
    return self._nodes[-1]

  def keep_one(self) -> list[int]:
    """Kills all nodes but the head and the newest one, which it returns."""
    for node in self._nodes[:-1]:
      self.kill(node)
    del self._nodes[:-1]
    return self._nodes[0] if self._nodes else self.add()

  def kill(self, node: list[int]):
    """Ends all processes of a node with SIGKILL, as if its machine were gone."""
    for pid in self._list_tree(node):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def list_samplers(self, node: list[int]) -> list[int]:
    """The processes that sample on a node."""
    return [pid for pid in self._list_tree(node) if 'Sampler' in _read_command(pid)]

  def check_ended(self):
    """Asserts that no process of the cluster is left."""
    waiting.until(lambda: all(map(waiting.has_ended, self._seen)), 'the end of all')

  def _list_tree(self, found: list[int]) -> list[int]:
    """The processes and all that they have started."""
    found = [*found]
    for pid in found:
      found += _list_children(pid)
    self._seen |= {*found}
    return found

  def _read(self):
    return json.loads(self._host.stdout.readline())


def _list_children(pid: int) -> list[int]:
  tasks = pathlib.Path(f'/proc/{pid}/task')
  try:
    lines = [path.read_text() for path in tasks.glob('*/children')]
  except (FileNotFoundError, ProcessLookupError):
    return []
  return [int(child) for line in lines for child in line.split()]


def _read_command(pid: int) -> str:
  try:
    return pathlib.Path(f'/proc/{pid}/cmdline').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return ''


def _host_nodes():
  """Adds a node for each line of standard input; ends all of them with it."""
  from ray import cluster_utils

  # Ray's own lines must not come between the answers.
  answers, sys.stdout = sys.stdout, sys.stderr
  options = {'include_dashboard': False, 'object_store_memory': 80 << 20}
  cluster = cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 0} | options
  )
  answer = lambda value: print(json.dumps(value), file=answers, flush=True)
  list_pids = lambda node: [
    info.process.pid for infos in node.all_processes.values() for info in infos
  ]
  answer([cluster.address, list_pids(cluster.head_node)])
  for _ in sys.stdin:
    room = {'num_cpus': 1, 'resources': {'place': 1}}
    answer(list_pids(cluster.add_node(wait=False, **room, **options)))
  cluster.shutdown()


if __name__ == '__main__':
  _host_nodes()
