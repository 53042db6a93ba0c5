"""mini-swe-agent, unchanged and as a process, as the agent of task directories.

  run = mini_swe_agent.make_run('/path/to/its/environment/bin/mini')
  train.run(..., make_env=lambda: program.Program(run))

mini-swe-agent is installed in its own environment (tests/packages/mini-swe-agent.txt). It
calls the endpoint through litellm, and runs its commands by the docker substitute of
containers.py, so in the confined workspace of the task.
"""

from collections.abc import Sequence
import pathlib

from agent_r1_jax import types
from agent_r1_jax.contrib.harbor import containers, directories

# Its own prompts have 1,500 tokens; these are for small policies.
SHORT = pathlib.Path(__file__).with_name('mini.yaml')
_VARIABLES = {
  'MSWEA_CONFIGURED': 'true',  # Else it asks for a model and a key.
  'MSWEA_COST_TRACKING': 'ignore_errors',  # The endpoint's policy has no price.
  'MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT': '1',  # A refusal of the endpoint is final.
  'MSWEA_SILENT_STARTUP': '1',
  'LITELLM_LOCAL_MODEL_COST_MAP': 'True',  # Else litellm fetches prices.
}


def make_run(program: str, prompts: str | pathlib.Path = 'mini.yaml', **options):
  """Makes a Program's `run` that plays tasks with mini-swe-agent.

  Args:
    program: The path of its command `mini`.
    prompts: Its configuration: one of its own, or a file such as SHORT.
    **options: See `containers.WorkspaceRun`.
  """

  def command(task: types.Task, docker: str) -> Sequence[str]:
    folder = pathlib.Path(docker).parent  # Of this episode alone.
    variables = {**_VARIABLES, 'MSWEA_GLOBAL_CONFIG_DIR': folder / 'mini'}
    configs = [
      prompts,
      'environment.environment_class=docker',
      f'environment.executable={docker}',
      'environment.image=workspace',
      f'environment.cwd={task.info["workdir"]}',
      'model.model_name=openai/policy',
    ]
    return [
      'env',
      *(f'{name}={value}' for name, value in variables.items()),
      program,
      '--yolo',
      '--exit-immediately',
      *(word for config in configs for word in ('-c', str(config))),
      '-o',
      str(folder / 'episode.json'),
      '-t',
      task.messages[-1]['content'],
    ]

  return containers.WorkspaceRun(command, directories.open_workspace, **options)
