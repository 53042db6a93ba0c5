"""Agent-R1 on one page: `python -m experiments.one_page` teaches an agent to search.

It is GRPO, bit for bit as `train.run`; the comments say what else a run does.
"""

from collections.abc import Callable
import itertools
import re

from absl import app, logging
import numpy as np

from agent_r1_jax import ToolEnv, config, tool, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer, transcript
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms, credit, learner, minibatch, optimizers, packing
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.train import curriculum
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

CONFIG = config.Config(
  model=shapes.CONFIG.model,
  schedule=config.Schedule(steps=40, tasks=16, samples=8),
  limits=config.Limits(max_turns=5, max_turn_tokens=80),
  engine=config.Engine(  # A run chooses sizes that are left out.
    rows=128,
    slots=448,
    decode_steps=16,
    prefill_rows=32,
    prefill_tokens=32,
    bucket=448,  # With one bucket and width, tool speed affects no number.
    narrow=False,
    replicas=1,  # A run has one per CPU core, and one or more on each chip.
  ),
  batch=config.Batch(row_tokens=448, microbatch=4),
  optimizer=config.Optimizer(learning_rate=2e-4),
)


def make_env(find: Callable[[str], str]) -> ToolEnv:
  """Makes an environment: a tool reports what happened, the reward what it is worth."""

  @tool
  def search(query: str) -> str:
    """Searches an encyclopedia and returns the passages that fit best.

    Args:
      query: What to search for.
    """
    return find(query)

  def reward(task: types.Task, messages: list[types.Message]) -> float:
    answers = re.findall('<answer>(.*?)</answer>', messages[-1]['content'])
    return float(answers[0].strip() in task.answer) if len(answers) == 1 else -0.5

  return ToolEnv([search], reward)


async def play(trajectory, env, engine, chat, limits, **options) -> types.Trajectory:
  """Plays an episode; `options` are its requests' random key and sampling."""
  stop = chat.stop_automaton(engine.config.vocab_size)  # A run adds guides and grammars.
  past, partial = None, None
  record = transcript.Transcript()  # Holds the tokens and the action mask.
  passage = record.begin()  # A run's context may restart or fork.
  trajectory.messages = await env.reset(trajectory.task)  # A run limits all users' code.
  ids = chat.encode_prompt(trajectory.messages, [tool.schema for tool in env.tools])
  async with engine.reserve(trajectory.group) as replica:  # A row of the cache.
    for _ in range(limits.max_turns):
      room = min(engine.sizes.slots - len(past or ()) - len(ids), limits.max_turn_tokens)
      if room < 1:
        break
      asked = request.Request(ids, past, max_tokens=room, automata=(stop,), **options)
      generation = replica.submit(asked)  # A jitted loop, until a stop token.
      past, reply = generation.sequence, await generation
      trajectory.turns.append(record.add_turn(passage, ids, reply))
      said = chat.decode(reply.tokens.tolist())
      trajectory.messages.append({'role': 'assistant', 'content': str(said)})
      if not reply.stopped:
        partial = said
        break
      step = await env.step(said)  # Tools run in Python; other episodes keep sampling.
      trajectory.turns[-1].reward += step.reward  # A run marks an error instead.
      history = trajectory.messages
      trajectory.messages = history + step.messages
      if step.done:
        trajectory.status = types.Status.DONE
        break
      ids = chat.encode_delta(step.messages, int(reply.tokens[-1]), history=history)
    else:
      trajectory.status = types.Status.OUT_OF_TURNS
    if trajectory.status != types.Status.DONE and trajectory.turns:  # Out of budget.
      trajectory.turns[-1].reward += (await env.finish(trajectory.status, partial)).reward
  trajectory.segments, trajectory.turns = record.collect()
  return trajectory


def train(cfg: config.Config, tasks, dev, make_env):
  """Samples, estimates advantages and updates, step by step; returns the parameters."""
  model, params = weights.load(cfg.model.path, dtype='float32')  # On one device.
  chat = chat_lib.Chat(tokenizer.load(cfg.model.path))
  engine = engine_lib.Engine(model, params, **vars(cfg.engine))
  algorithm = algorithms.grpo(kl_coef=0.0)  # A = (R - mean R) / (std R + ε) in a group.
  loss = learner.objective(algorithm)  # -min(ratio A, clip(ratio) A), on actions.
  optimizer = optimizers.make(cfg.optimizer, cfg.optimizer.learning_rate)
  state = learner.init(params, optimizer)  # A run may have a critic and a reference, too.
  shape = packing.MicrobatchShape(cfg.batch.microbatch, cfg.batch.row_tokens)
  stream = curriculum.TaskStream(cfg.curriculum, tasks, seed=cfg.seed)

  def sample(tasks, samples, number, sampling):  # A run plays ahead, on many hosts.
    episodes = []
    for group, n in itertools.product(range(len(tasks)), range(samples)):
      status = types.Status.OUT_OF_TOKENS  # Unless it ends otherwise.
      trajectory = types.Trajectory(tasks[group], group, n, [], [], [], status)
      key = request.make_key(cfg.seed, number, trajectory.task.id, n, 0)
      options = {'key': key, 'sampling': sampling}
      episodes.append(play(trajectory, make_env(), engine, chat, cfg.limits, **options))
    return engine.run(episodes)  # All concurrently.

  for step in range(cfg.schedule.steps):  # A run saves, resumes, evaluates and logs.
    engine.sync_weights(state.params, step)
    drawn = stream.start_rollout(cfg.schedule.tasks)
    played = sample(drawn, cfg.schedule.samples, step, cfg.sampling)
    stream.finish_rollout([])  # A run tells the curriculum the groups' rewards.
    tokens, _ = credit.estimate(table_lib.build(played), algorithm)  # A run scores first.
    order = np.random.default_rng([cfg.seed, step, 0]).permutation(len(played)).tolist()
    batches, _ = minibatch.make_policy(tokens, order, algorithm, shape=shape)
    gradients = learner.forward_backward(state.params, batches, config=model, loss=loss)
    state, metrics = learner.optim_step(state, gradients, optimizer=optimizer)
    reward, entropy = np.mean([t.reward for t in played]), metrics['entropy']
    print(f'step {step + 1}: mean reward {reward:.3f}, entropy {entropy:.3f}')
  engine.sync_weights(state.params, cfg.schedule.steps)
  greedy = sample(dev, 1, 0, config.GREEDY)
  print(f'{np.mean([t.reward == 1 for t in greedy]):.3f} of {len(dev)} right, greedily')
  return state.params


def main(_):
  logging.set_verbosity(logging.WARNING)
  find = miniwiki.make_search(miniwiki.corpus(0, 'train') + miniwiki.corpus(0, 'dev'))
  dev = miniwiki.test_set('miniwiki-hotpot', 100, 0, 'dev')  # Names unseen in training.
  train(CONFIG, miniwiki.train_tasks(0, 4096), dev, lambda: make_env(find))


if __name__ == '__main__':
  app.run(main)
