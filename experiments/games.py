r"""Multi-turn RL on text games and generated problems.

  python -m experiments.games --kind=textworld --name=runs/games \
    --config.model.path=Qwen2.5-0.5B-Instruct

Trains an instruct model in Hugging Face layout by GRPO. `--name` is the game:

  textworld       a folder, in which `--tasks` games are made
  files           a folder with games of TextWorld (.z8) or ALFWorld (.tw-pddl)
  gymnasium       the id of a Gymnasium environment of texts, such as my_module:Mine-v0
  reasoning-gym   one of its data sets, such as chain_sum

`--watched` of the tasks are evaluated every `--config.schedule.eval_every` steps instead
of trained on. Needs `pip install agent_r1_jax[environments]`.
"""

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from experiments import comparison, task_list

_KIND = flags.DEFINE_enum(
  'kind', None, task_list.GAMES, 'Where the tasks are from.', required=True
)
_NAME = flags.DEFINE_string('name', None, 'What is played; see above.', required=True)
_TASKS = flags.DEFINE_integer('tasks', 200, 'Tasks to make.')
_WATCHED = flags.DEFINE_integer('watched', 20, 'Tasks to watch the training with.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/games', 'Where the run writes.')
_CFG = fields.define_flags(
  config_lib.Config(
    schedule=config_lib.Schedule(steps=100, tasks=16, samples=8, eval_every=20),
    limits=config_lib.Limits(max_turns=12, max_turn_tokens=256),
    optimizer=config_lib.Optimizer(learning_rate=1e-6),
  )
)


def main(_):
  tasks, make_env = task_list.load_games(_KIND.value, _NAME.value, _TASKS.value)
  comparison.train_on_rest(_CFG.value, _WORKDIR.value, tasks, make_env, _WATCHED.value)


if __name__ == '__main__':
  app.run(main)
