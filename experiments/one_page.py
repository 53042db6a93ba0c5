"""Agent-R1 on one page: an agent learns to search, by GRPO over several turns.

  python -m experiments.one_page --rollouts=40

The quickstart's policy answers multi-hop questions by a search tool. `train.run` makes
the same parameters bit for bit (tests/test_one_page.py), and is fit for runs of days.
"""

from collections.abc import Callable
import itertools
import re

from absl import app, flags
import numpy as np

from agent_r1_jax import ToolEnv, config, tool, types
from agent_r1_jax.agent import transcript
from agent_r1_jax.engine import request
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, credit, learner, minibatch, optimizers, packing
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.train import curriculum
from agent_r1_jax.train.plan import setup
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

CONFIG = config.Config(
  model=shapes.CONFIG.model,
  schedule=config.Schedule(steps=40, tasks=16, samples=8),
  limits=config.Limits(max_turns=5, max_turn_tokens=80),
  # One program of each kind: then no number depends on how fast a tool is.
  engine=config.Engine(128, 448, 16, 32, 32, bucket=448, narrow=False, replicas=1),
  batch=config.Batch(row_tokens=448, microbatch=4),
  optimizer=config.Optimizer(learning_rate=2e-4),
)
_SET = 'miniwiki-hotpot'  # Questions about names that training does not have.
_STEPS = flags.DEFINE_integer('rollouts', 40, 'Each with one optimizer step.')


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


async def play(t, env, engine, chat, limits, **options) -> types.Trajectory:
  """Plays an episode into `t`; `options` are the key and sampling of its requests."""
  stop = chat.stop_automaton(engine.config.vocab_size)
  text, length, unfinished = None, 0, None
  record = transcript.Transcript()  # Holds the tokens and the action mask.
  passage = record.begin()
  t.messages = await env.reset(t.task)
  ids = chat.encode_prompt(t.messages, [tool.schema for tool in env.tools])
  async with engine.reserve(t.group) as replica:  # A row of the cache, to the end.
    for _ in range(limits.max_turns):
      room = min(engine.sizes.slots - length - len(ids), limits.max_turn_tokens)
      if room < 1:
        break
      # A jitted loop appends `ids` to the cached text and samples until a stop token.
      generation = replica.submit(
        request.Request(ids, text, max_tokens=room, automata=(stop,), **options)
      )
      text, reply = generation.text, await generation
      length = len(text)
      t.turns.append(record.add_turn(passage, ids, reply))
      said = chat.decode(reply.tokens.tolist())
      t.messages.append({'role': 'assistant', 'content': str(said)})
      if not reply.stopped:
        unfinished = said
        break
      # Control is with Python: tools run, while other episodes go on sampling.
      step = await env.step(said)
      t.turns[-1].reward += step.reward
      said, t.messages = t.messages, t.messages + step.messages
      if step.done:
        t.status = types.Status.DONE
        break
      ids = chat.encode_delta(step.messages, int(reply.tokens[-1]), history=said)
    else:
      t.status = types.Status.OUT_OF_TURNS
    if t.status != types.Status.DONE and t.turns:  # A budget ended the episode.
      t.turns[-1].reward += (await env.finish(t.status, unfinished)).reward
  t.segments, t.turns = record.collect()
  return t


def train(cfg: config.Config, tasks, dev, make_env) -> decoder.Params:
  """Samples, estimates advantages and updates, step by step; returns the parameters."""
  model, params, chat = setup.load(cfg.model, cfg.chat)
  engine = setup.make_engine(cfg, model, params)
  algorithm = algorithms.grpo(kl_coef=0.0)  # A = (R - mean R) / (std R + ε) in a group.
  loss = learner.objective(algorithm)  # -min(ratio A, clip(ratio) A), on actions.
  optimizer = optimizers.make(cfg.optimizer, cfg.optimizer.learning_rate)
  state = learner.init(params, optimizer)
  shape = packing.MicrobatchShape(cfg.batch.microbatch, cfg.batch.row_tokens)
  stream = curriculum.TaskStream(cfg.curriculum, tasks, seed=cfg.seed)

  def sample(tasks, samples, number, sampling):
    """Plays all episodes at the same time."""
    episodes = []
    for group, n in itertools.product(range(len(tasks)), range(samples)):
      t = types.Trajectory(tasks[group], group, n, [], [], [], types.Status.OUT_OF_TOKENS)
      key = request.make_key(cfg.seed, number, t.task.id, n, 0)
      options = {'key': key, 'sampling': sampling}
      episodes.append(play(t, make_env(), engine, chat, cfg.limits, **options))
    return engine.run(episodes)

  for step in range(cfg.schedule.steps):
    engine.sync_weights(state.params, step)
    drawn = stream.start_rollout(cfg.schedule.tasks)
    played = sample(drawn, cfg.schedule.samples, step, cfg.sampling)
    stream.finish_rollout([])
    tokens, _ = credit.estimate(table_lib.build(played), algorithm)
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
  runtime.quiet_logging()
  CONFIG.schedule.steps = _STEPS.value
  find = miniwiki.make_search(miniwiki.corpus(0, 'train') + miniwiki.corpus(0, 'dev'))
  tasks, dev = miniwiki.train_tasks(0, 4096), miniwiki.test_set(_SET, 100, 0, 'dev')
  train(CONFIG, tasks, dev, lambda: make_env(find))


if __name__ == '__main__':
  app.run(main)
