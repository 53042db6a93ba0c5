"""The worlds by name, for the commands that take one."""

from collections.abc import Mapping

from experiments.worlds import arithmetic, forensics, grid, lake, programs, terminal
from experiments.worlds import world as world_lib

WORLDS: Mapping[str, world_lib.World] = {
  'arithmetic': arithmetic.WORLD,
  'forensics': forensics.WORLD,
  'grid': grid.WORLD,
  'lake': lake.WORLD,
  'programs': programs.WORLD,
  'terminal': terminal.WORLD,
}
