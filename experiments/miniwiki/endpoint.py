"""The quickstart with an agent that knows only the address of an endpoint.

  python -m experiments.miniwiki.endpoint --agent=openai --workdir=runs/openai
  python -m experiments.miniwiki.endpoint --agent=pydantic_ai --workdir=runs/pydantic_ai

The agents are in experiments/miniwiki/agents.py; docs/endpoint.md compares them with the
native environment.
"""

import pathlib

from absl import app, flags

from agent_r1_jax.host import runtime
from agent_r1_jax.report import summary
from agent_r1_jax.serve import program
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments import comparison
from experiments.miniwiki import agents
from experiments.miniwiki import search as quickstart
from experiments.miniwiki import tasks as miniwiki

_AGENTS = {'openai': agents.with_openai, 'pydantic_ai': agents.with_pydantic_ai}
flags.adopt_module_key_flags(quickstart)  # for --help
_AGENT = flags.DEFINE_enum('agent', 'openai', [*_AGENTS], 'The agent that is trained.')


def main(_):
  runtime.quiet_logging()
  f = flags.FLAGS
  workdir = pathlib.Path(f.workdir)
  run = _AGENTS[_AGENT.value](search.search_tool(miniwiki.index(f.world), k=1))
  make_env = lambda: program.Program(run, qa.paper_reward, qa.metrics)
  numbers, seconds = comparison.run(
    f.config,
    workdir,
    quickstart.make_play(workdir),
    {'tools': (quickstart.questions(f.questions, f.split), make_env)},
    tasks=miniwiki.train_tasks(f.world, 4096),
    evals=comparison.watch(quickstart.questions(f.watched, 'dev')),
    algorithm=comparison.make_grpo(f.config, 0.0),
    label=f'GRPO, {_AGENT.value}',
  )
  print('\n' + summary.write_tables(numbers, workdir))
  print(f'{seconds["training"]:.0f} seconds of training.')


if __name__ == '__main__':
  app.run(main)
