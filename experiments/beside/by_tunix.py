r"""The experiment by tunix: its agentic GRPO learner, an agent and an environment.

  pip install --requirement experiments/beside/requirements-tunix.txt   # Python 3.12
  taskset --cpu-list 0 python -m experiments.beside.by_tunix --workdir=runs/tunix-0 \
    --steps=2

It gets this project's policy, tasks in their order, passages and reward. `Rollout`
corrects what its own one does wrong here, and --nofix leaves that as it is.
"""

# pyright: reportMissingImports=false
import asyncio
import copy
import itertools
import json
import pathlib
from typing import Any

from absl import app, flags
import jax
import numpy as np
import optax
import transformers
from tunix.generate import tokenizer_adapter
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.agentic import agentic_grpo_learner as grpo
from tunix.rl.agentic.agents import agent_types, base_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.rollout import base_rollout, vanilla_rollout

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls, tool
from agent_r1_jax.tasks import qa
from experiments.beside import shared

_FIX = flags.DEFINE_bool('fix', True, 'Whether to correct the sampling.')


class Rollout(vanilla_rollout.VanillaRollout):
  """tunix's rollout, with a seed for each reply, the end token, and one shape.

  As it is, all replies have the seed 0, so that a group consists of copies; the token
  that ended a reply is left out of what is trained; and each number of tokens that an
  episode has left is a program to compile.
  """

  seeds = itertools.count()
  replies = changed = 0  # How many there were, and of how many the text has other tokens.
  limits = config_lib.Limits()

  def __init__(self, *, rollout_actor, tokenizer, mesh, rollout_config):
    shape, size = rollout_actor.config, rollout_config.kv_cache_size
    cache = base_rollout.CacheConfig(
      size, shape.num_layers, shape.num_kv_heads, shape.head_dim
    )
    super().__init__(rollout_actor, tokenizer, cache)

  def generate(self, prompts, rollout_config, **_) -> base_rollout.RolloutOutput:
    """Samples a reply of at most limits.max_turn_tokens."""
    most = self.limits.max_turn_tokens
    out = self._sampler(
      input_strings=prompts,
      max_generation_steps=most,
      max_prompt_length=rollout_config.kv_cache_size // 2,
      temperature=rollout_config.temperature,
      top_p=1.0,
      seed=next(self.seeds),
      eos_tokens=rollout_config.eos_tokens,
    )
    encode = lambda text: self._sampler.tokenizer.encode(text, add_special_tokens=False)
    for text, ids in zip(out.text, out.tokens, strict=True):
      Rollout.replies += 1
      Rollout.changed += encode(text) != ids.tolist()
    tokens = [
      np.append(ids, self.eos_id()) if len(ids) < most else ids for ids in out.tokens
    ]
    return base_rollout.RolloutOutput(
      text=out.text,
      logits=None,
      tokens=tokens,
      left_padded_prompt_tokens=out.padded_prompt_tokens[
        :, -rollout_config.max_prompt_length :
      ],
      logprobs=None,
    )


class Parser:
  """Renders messages by the policy's chat template."""

  def __init__(self, tokenizer):
    self._tokenizer = tokenizer

  def parse(self, messages, add_generation_prompt=False, is_first_msg=False) -> str:
    """A whole conversation, or what follows a reply."""
    tools = [{'function': {'name': 'search'}}] if is_first_msg else None
    text = self._tokenizer.apply_chat_template(
      messages, tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    return text if is_first_msg else '\n' + text


def find_task(row) -> types.Task:
  """Finds the task of a row of the data, of which tunix makes arrays."""
  return shared.train_tasks()[int(np.ravel(row['prompts'])[0])]


class Agent(base_agent.ConversationAgentBase):
  """Keeps the conversation."""

  def _init_messages(self, system_prompt):
    self._messages = []

  def _observation_to_messages(self, observation, reward, done, info):
    # The first observation is the task, which tunix goes on to read.
    first = isinstance(observation, dict)
    self._messages += find_task(observation).messages if first else observation

  def update_from_model(self, response, **_) -> agent_types.Action:
    """Adds a reply, which is the action."""
    self._messages.append({'role': 'assistant', 'content': response})
    step = agent_types.Step(
      chat_completions=copy.deepcopy(self._messages),
      action=agent_types.Action(action=response),
      model_response=response,
    )
    self._trajectory.steps.append(step)
    return agent_types.Action(action=response)


class Environment(base_environment.BaseTaskEnv):
  """A question and the search tool."""

  scores, texts = [], []  # Of all episodes since the last step.
  search: Any = None

  def _initial_observation(self):
    self._task, self._messages = find_task(self.task), []
    return self.task

  def _step_impl(self, action):
    reply = getattr(action, 'action', action)
    found = call_formats.HERMES.parse(reply)
    results = [_answer(call, self.search) for call in found]
    self._messages += [{'role': 'assistant', 'content': reply}, *results]
    done, reward = not found or self.step_count == self.max_steps, 0.0
    if done:
      reward = qa.paper_reward(self._task, self._messages)
      self.scores.append((qa.em_reward(self._task, self._messages), reward))
      self.texts.append([m['content'] for m in self._messages])
    return base_environment.EnvStepResult(results, reward, done, {})


def _answer(call, search_tool) -> dict[str, str]:
  if isinstance(call, calls.CallError):
    text = f'Error: {call.message}'
  else:
    text = asyncio.run(tool.call(search_tool, call.arguments)).text
  return {'role': 'tool', 'name': 'search', 'content': text}


def load_policy(path: str, mesh: jax.sharding.Mesh) -> llama.Llama3:
  """Loads this project's export."""
  hf = json.loads((pathlib.Path(path) / 'config.json').read_text())
  shape = llama.ModelConfig(
    num_layers=hf['num_hidden_layers'],
    vocab_size=hf['vocab_size'],
    embed_dim=hf['hidden_size'],
    hidden_dim=hf['intermediate_size'],
    num_heads=hf['num_attention_heads'],
    head_dim=hf['head_dim'],
    num_kv_heads=hf['num_key_value_heads'],
    rope_theta=hf['rope_theta'],
    norm_eps=hf['rms_norm_eps'],
    weight_tying=True,
  )
  return llama_params.create_model_from_safe_tensors(path, shape, mesh)


def make_learner(config: config_lib.Config, tokenizer, mesh) -> grpo.GRPOLearner:
  """Translates this project's configuration into tunix's."""
  limits, schedule, adam = config.limits, config.schedule, config.optimizer
  slots = config.engine.slots
  optimizer = optax.chain(
    optax.clip_by_global_norm(adam.clip_norm),
    optax.adamw(adam.learning_rate, b1=adam.adam_b1, b2=adam.adam_b2, weight_decay=0.0),
  )
  Rollout.limits, Rollout.seeds = limits, itertools.count(1_000_000 * config.seed)
  cluster = rl_cluster.RLCluster(
    actor=load_policy(config.model.path, mesh),
    tokenizer=tokenizer_adapter.TokenizerAdapter(tokenizer),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
      rollout_engine=Rollout if _FIX.value else 'vanilla',
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer,
        eval_every_n_steps=10**9,
        max_steps=schedule.steps,
        mini_batch_size=schedule.tasks,
        # All 16 tasks at once were killed for memory on a machine of 24 GB.
        train_micro_batch_size=min(4, schedule.tasks),
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=slots,
        max_prompt_length=64,
        kv_cache_size=1024,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[tokenizer.eos_token_id],
        return_logprobs=not _FIX.value,
      ),
    ),
  )
  return grpo.GRPOLearner(
    cluster,
    grpo.GRPOConfig(
      num_generations=schedule.samples,
      max_response_length=slots,
      max_concurrency=1,
      beta=0.0,
      epsilon=0.2,
      loss_agg_mode='token-mean',
      use_rollout_logps=not _FIX.value,
    ),
    chat_parser=Parser(tokenizer),
    agent_class=Agent,
    env_class=Environment,
    env_kwargs={'max_steps': limits.max_turns},
  )


def main(_):
  config, workdir = shared.make_config(), pathlib.Path(shared.WORKDIR.value)
  Environment.search = shared.make_search_tool()
  places = {task.id: place for place, task in enumerate(shared.train_tasks())}
  drawn = [places[task.id] for task in shared.draw_tasks(config)]
  tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1])[None], ('fsdp', 'tp'))
  learner, record = make_learner(config, tokenizer, mesh), shared.Record()

  def batches():
    for step in range(config.schedule.steps):
      if step:
        write(step)
      n = config.schedule.tasks
      yield {'prompts': [str(place) for place in drawn[step * n : (step + 1) * n]]}

  def write(step: int):
    em, reward = np.mean(Environment.scores, axis=0)
    record.add(step=step, em=float(em), reward=float(reward), **record.lap())
    with (workdir / 'episodes.jsonl').open('a') as file:
      file.write(json.dumps(Environment.texts[: config.schedule.samples]) + '\n')
    Environment.scores.clear()
    Environment.texts.clear()

  with mesh:
    learner.train(batches())
  write(config.schedule.steps)
  record.finish(replies=Rollout.replies, changed=Rollout.changed)


if __name__ == '__main__':
  app.run(main)
