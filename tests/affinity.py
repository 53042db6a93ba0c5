"""Gives a worker of pytest-xdist the files whose tests run the same programs.

A program is traced and lowered in each process that runs it, which takes longer than its
compilation, whose result other processes find. So a worker goes on with files that import
the same helper, and begins another's only where no other worker has them.
"""

import functools
import pathlib
import re

from xdist.scheduler import loadfile

# Each has a policy, an engine or runs of one size for the files that import it.
SHARED = ('serving', 'tinker_service', 'runs', 'rollouts', 'clients', 'plain')
_IMPORTS = re.compile(rf'^import ({"|".join(SHARED)})\b', re.MULTILINE)


@functools.cache
def find_group(path: pathlib.Path) -> str:
  """The helper that a file shares with others; '' if none."""
  return min(_IMPORTS.findall(path.read_text()), key=SHARED.index, default='')


def choose(groups: dict[str, str], own: str, others: set[str]) -> str:
  """The first file of the own group, else of one that no other worker has, else any."""

  def rank(file):
    group = groups[file]
    return not group or group != own, bool(group) and group in others

  return min(groups, key=rank)


class Scheduling(loadfile.LoadFileScheduling):
  """Gives out whole files, in their order within a group."""

  def __init__(self, config, log=None):
    super().__init__(config, log)
    self._root, self._group_of = config.rootpath, {}

  def _assign_work_unit(self, node):
    groups = {file: find_group(self._root / file) for file in self.workqueue}
    others = {group for other, group in self._group_of.items() if other is not node}
    file = choose(groups, self._group_of.get(node, ''), others)
    self._group_of[node] = groups[file]
    self.workqueue.move_to_end(file, last=False)
    super()._assign_work_unit(node)
