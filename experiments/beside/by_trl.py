r"""The experiment by TRL: GRPOTrainer with the search function as its tool.

  pip install --requirement experiments/beside/requirements-trl.txt
  taskset --cpu-list 0 python -m experiments.beside.by_trl --workdir=runs/trl-0 --seed=0

It gets this project's policy, tasks in their order, passages and reward. The policy's
chat template renders a call as part of the message's content; TRL wants to see that it
renders `tool_calls`, and gets a line for it. Started again, it goes on at its last
checkpoint.
"""

# pyright: reportMissingImports=false
import asyncio
import json
import pathlib
import re
from typing import Any

from absl import app
import datasets
import torch
import transformers
import trl
from trl import chat_template_utils

from agent_r1_jax import config as config_lib
from agent_r1_jax.agent import tool
from agent_r1_jax.tasks import qa
from experiments.beside import shared

# What stands between two replies: the end of a turn, what the tool said, a new turn.
_BETWEEN = re.compile(
  r'(?:<\|im_end\|>)?\n<\|im_start\|>user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n',
  re.DOTALL,
)
_CALLS = (
  "message.content }}{% for call in message.tool_calls or [] %}{{ '<tool_call>' + "
  "(call.function | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
)


def load_tokenizer(path: str) -> transformers.PreTrainedTokenizerBase:
  """Loads the policy's tokenizer, with a template and a parser of calls for TRL."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side='left')
  plain = "message.content + '<|im_end|>\\n' }}"
  assert tokenizer.chat_template.count(plain) == 1
  tokenizer.chat_template = tokenizer.chat_template.replace(plain, _CALLS)
  tokenizer.response_template = chat_template_utils.qwen3_template
  return tokenizer


def make_arguments(config: config_lib.Config, workdir: str) -> trl.GRPOConfig:
  """Translates this project's configuration into TRL's."""
  schedule, limits, optimizer = config.schedule, config.limits, config.optimizer
  return trl.GRPOConfig(
    output_dir=workdir,
    seed=config.seed,
    max_steps=schedule.steps,
    # Four micro-batches, whose gradients are added.
    per_device_train_batch_size=schedule.tasks * schedule.samples // 4,
    gradient_accumulation_steps=4,
    num_generations=schedule.samples,
    shuffle_dataset=False,
    # A reply has max_turn_tokens; all replies and results together what a row leaves.
    generation_kwargs={'max_new_tokens': limits.max_turn_tokens},
    max_completion_length=config.engine.slots - 40,
    max_tool_calling_iterations=limits.max_turns - 1,
    temperature=1.0,
    loss_type='dapo',  # The mean over the tokens of all episodes.
    scale_rewards='group',
    reward_weights=[1.0, 0.0],
    epsilon=0.2,
    beta=0.0,
    learning_rate=optimizer.learning_rate,
    lr_scheduler_type='constant',
    weight_decay=optimizer.weight_decay,
    adam_beta1=optimizer.adam_b1,
    adam_beta2=optimizer.adam_b2,
    adam_epsilon=optimizer.adam_eps,
    max_grad_norm=optimizer.clip_norm,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    logging_steps=1,
    save_steps=10,
    save_total_limit=1,
    report_to=[],
    disable_tqdm=True,
  )


class Episodes:
  """The reward of this project, on the tokens that were trained; keeps a step's episodes.

  Attributes:
    texts: What followed the prompt in each episode of the last step.
    distinct: The tokens of these episodes, a group's prompt counted once.
  """

  def __init__(self, tokenizer, tools, samples: int):
    self._tokenizer, self._tools, self._samples = tokenizer, tools, samples
    self.texts, self.distinct = [], 0
    self.__name__ = 'paper_reward'

  def __call__(self, prompts, completion_ids, place, **_) -> list[float]:
    """The paper's reward of each episode."""
    ids = self._tokenizer.apply_chat_template(
      prompts, tools=self._tools, add_generation_prompt=True, return_dict=False
    )
    self.distinct = sum(map(len, ids)) // self._samples + sum(map(len, completion_ids))
    self.texts = self._tokenizer.batch_decode(completion_ids)
    return self._score(qa.paper_reward, place)

  def em(self, place, **_) -> list[float]:
    """Exact match, which has weight 0 in the reward."""
    return self._score(qa.em_reward, place)

  def _score(self, reward, places) -> list[float]:
    tasks = shared.train_tasks()
    pairs = zip(self.texts, places, strict=True)
    return [reward(tasks[place], split_turns(text)) for text, place in pairs]


def split_turns(text: str) -> list[dict[str, str]]:
  """Splits what followed the prompt into messages, as they were sampled."""
  parts = _BETWEEN.split(text.removesuffix('<|im_end|>'))
  roles = ('assistant', 'tool')
  return [{'role': roles[i % 2], 'content': part} for i, part in enumerate(parts)]


class Watch(transformers.TrainerCallback):
  """Counts the tokens that sampling computes, and records each step."""

  def __init__(self, record: shared.Record, episodes: Episodes, workdir: pathlib.Path):
    self._record, self._episodes, self._workdir = record, episodes, workdir
    self._prefilled = 0

  def count(self, model, args, kwargs) -> None:
    """Counts the tokens of a forward pass that fills the cache."""
    ids = kwargs.get('input_ids')
    if ids is not None and ids.shape[1] > 1 and not torch.is_grad_enabled():
      self._prefilled += int((ids != model.config.pad_token_id).sum())

  def on_log(self, args, state, control, logs: Any = None, **_):
    """Writes the numbers of a step."""
    if 'reward' not in logs:
      return
    sampled = logs['completions/mean_length'] * len(self._episodes.texts)
    self._record.add(
      step=state.global_step,
      em=logs['rewards/em/mean'],
      reward=logs['reward'],
      computed=self._prefilled + round(sampled),
      distinct=self._episodes.distinct,
      truncated=logs['completions/clipped_ratio'],
      failed_calls=logs['tools/failure_frequency'],
      **self._record.lap(),
    )
    self._prefilled = 0
    with (self._workdir / 'episodes.jsonl').open('a') as file:
      file.write(json.dumps(self._episodes.texts[:8]) + '\n')


def main(_):
  config, workdir = shared.make_config(), pathlib.Path(shared.WORKDIR.value)
  search_tool, tasks = shared.make_search_tool(), shared.train_tasks()
  places = {task.id: place for place, task in enumerate(tasks)}
  rows = [
    {'prompt': task.messages, 'place': places[task.id]}
    for task in shared.draw_tasks(config)
  ]

  def search(query: str) -> str:
    """Searches an encyclopedia and returns the passages that fit best.

    Args:
      query: What to search for.
    """
    return asyncio.run(tool.call(search_tool, {'query': query})).text

  tokenizer = load_tokenizer(config.model.path)
  record = shared.Record()
  episodes = Episodes(tokenizer, [search], config.schedule.samples)
  watch = Watch(record, episodes, workdir)
  trainer = trl.GRPOTrainer(
    transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype='float32'),
    [episodes, episodes.em],
    make_arguments(config, str(workdir)),
    datasets.Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[watch],
    tools=[search],
  )
  trainer.model.register_forward_pre_hook(watch.count, with_kwargs=True)
  trainer.train(resume_from_checkpoint=any(workdir.glob('checkpoint-*')))
  trainer.save_model(str(workdir / 'model'))
  record.finish(trl=trl.__version__)


if __name__ == '__main__':
  app.run(main)
