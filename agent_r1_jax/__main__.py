"""The command `agent-r1-jax`: finds a script and runs it, as `python -m` would.

In a checkout the scripts are in experiments/ and third_party/. A wheel has them in
agent_r1_jax/scripts/ (setup.py), so that it installs no package with a common name.
"""

import pathlib
import runpy
import sys

import agent_r1_jax

SCRIPTS = {
  'quickstart': ('experiments.miniwiki.search', 'train an agent to search, on a CPU'),
  'doctor': ('experiments.doctor', 'check machine, configuration and task before a run'),
  'report': ('experiments.report', 'write one HTML page of a run'),
  'evaluate': ('experiments.evaluate', 'measure a policy on held-out tasks'),
  'serve': ('experiments.serve', "serve a policy behind OpenAI's and Anthropic's APIs"),
  'tinker': ('experiments.serve_tinker', 'serve a model to clients of the Tinker API'),
  'build-index': ('experiments.build_index', 'index passages for search'),
  'retriever': ('experiments.serve_retriever', 'serve such indexes over HTTP'),
  'convert': ('experiments.convert_episodes', 'write episodes as ATIF or Inspect logs'),
  'publish': ('experiments.publish', 'write a model card, and upload to the Hub'),
  'fetch': ('third_party.fetch', 'download data, models and indexes, and verify them'),
  'compile-for': (
    'experiments.bench.compile_for',
    'compile a run for chips that are not here: does it fit, what does it cost',
  ),
}


def find_root() -> pathlib.Path:
  """Returns the folder that contains experiments/ and third_party/."""
  package = pathlib.Path(__file__).resolve().parent
  installed = package / 'scripts'
  return installed if installed.is_dir() else package.parent


def find_script(module: str) -> bool:
  """Whether the project has such a module, or a package that can be run."""
  folder, *rest = module.split('.')
  path = find_root().joinpath(folder, *rest)
  is_ours = folder in ('experiments', 'third_party')
  return is_ours and (
    path.with_suffix('.py').is_file() or (path / '__main__.py').is_file()
  )


def describe() -> str:
  """Returns the command's help text."""
  width = max(map(len, SCRIPTS))
  lines = (f'  {name:{width}}  {what}' for name, (_, what) in SCRIPTS.items())
  return '\n'.join(
    [
      f'agent-r1-jax {agent_r1_jax.__version__}: reinforcement learning of agents in JAX',
      '',
      'usage: agent-r1-jax NAME [FLAGS]      (agent-r1-jax NAME --help lists the flags)',
      '',
      *lines,
      '',
      'NAME may also be the module of any script, such as experiments.worlds.learn.',
    ]
  )


def main() -> None:
  """Runs the script that the command line names.

  Raises:
    SystemExit: There is no such script; the message lists all scripts.
  """
  name, *flags = sys.argv[1:] or ['--help']
  module, _ = SCRIPTS.get(name, (name, ''))
  if name in ('-h', '--help', 'help'):
    print(describe())
  elif name == '--version':
    print(agent_r1_jax.__version__)
  elif find_script(module):
    # As with `python -m`, the current folder's modules are found too.
    sys.path[:0] = [str(find_root()), '']
    sys.argv[1:] = flags
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  else:
    sys.exit(f'agent-r1-jax {name}: there is no such script.\n\n{describe()}')


if __name__ == '__main__':
  main()
