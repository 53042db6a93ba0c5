r"""An agent learns to search through the Tinker API; the quickstart's task.

  python -m experiments.doors.tinker_data --out=runs/tinker/miniwiki.json
  python -m experiments.serve_tinker --config.model.path=experiments/miniwiki/model \
    --name=miniwiki --workdir=runs/tinker &
  python -m experiments.doors.tinker_recipe --data=runs/tinker/miniwiki.json \
    --tokenizer=experiments/miniwiki/model --url=http://localhost:8000

The last command runs where `tinker` is installed, and needs no JAX: the loop, the tool
and the reward are in this process, and the model is in the server's. With a group's mean
reward as the baseline, the loss is importance sampling.
"""

# pyright: reportMissingImports=false
import argparse
import dataclasses
import json
import re
import time

import numpy as np
import tinker
import transformers

from agent_r1_jax.retrieval import documents
from experiments.miniwiki import hashing

MAX_TURNS, TURN_TOKENS, MAX_TOKENS = 5, 80, 447
_CALL = re.compile('<tool_call>(.*?)</tool_call>', re.S)


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description='An agent learns to search.')
  parser.add_argument('--url', default='http://localhost:8000')
  parser.add_argument('--key', default='tml-any', help='the client wants one')
  parser.add_argument('--model', default='miniwiki')
  parser.add_argument('--data', required=True)
  parser.add_argument('--tokenizer', required=True, help='a folder')
  parser.add_argument('--steps', type=int, default=40)
  parser.add_argument('--tasks', type=int, default=16, help='of a step')
  parser.add_argument('--samples', type=int, default=8, help='of a task')
  parser.add_argument('--rank', type=int, default=32)
  parser.add_argument('--learning_rate', type=float, default=4e-4)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--test', type=int, default=300, help='questions of each test set')
  return parser.parse_args()


class World:
  """The tokenizer, the search tool and the chat template."""

  def __init__(self, content: dict, tokenizer: str):
    self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
    self.tool = content['tool']
    self.passages = [documents.Document(**passage) for passage in content['passages']]
    texts = [passage.contents for passage in self.passages]
    self.encoder = hashing.HashingEncoder().fit(texts)
    self.vectors = self.encoder.encode(texts)
    said = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'said'}]
    tool = {'role': 'tool', 'content': '§'}
    # What stands between the end of a reply and the next one.
    end = f'said{self.tokenizer.eos_token}'
    text = self.render([*said, tool])
    self.before, self.after = text[text.index(end) + len(end) :].split('§')

  def render(self, messages: list[dict]) -> str:
    """Writes messages as the model's template does."""
    return self.tokenizer.apply_chat_template(
      messages, tools=[self.tool], add_generation_prompt=True, tokenize=False
    )

  def encode(self, text: str) -> list[int]:
    """Encodes what the template has written."""
    return self.tokenizer.encode(text, add_special_tokens=False)

  def search(self, query: str) -> str:
    """Searches the passages: what the tool answers."""
    best = int(np.argmax(self.vectors @ self.encoder.encode([query])[0]))
    return documents.render([documents.Hit(self.passages[best], 1.0)])


@dataclasses.dataclass
class Episode:
  """A conversation: all tokens, and for each whether it was sampled, and its log-prob."""

  task: dict
  tokens: list[int]
  sampled: list[bool]
  logprobs: list[float]
  reward: float = -0.5
  right: bool = False
  done: bool = False

  def add(self, tokens: list[int], logprobs: list[float] | None = None):
    """Adds tokens; those with log-probs were sampled."""
    self.tokens += tokens
    self.sampled += [logprobs is not None] * len(tokens)
    self.logprobs += logprobs or [0.0] * len(tokens)


def step(episode: Episode, said: str, world: World):
  """Plays the tool and the reward for one complete reply."""
  calls = _CALL.findall(said)
  if not calls:
    answers = re.findall('<answer>(.*?)</answer>', said, re.S)
    if len(answers) == 1:
      episode.right = answers[0].strip() in episode.task['answers']
      episode.reward = float(episode.right)
    episode.done = True
    return
  try:
    call = json.loads(calls[0])
    assert call['name'] == 'search'
    found = world.search(str(call['arguments']['query']))
  except (ValueError, KeyError, TypeError, AssertionError):
    found = 'The call is malformed.'
  episode.add(world.encode(world.before + found + world.after))


def play(sampler, world: World, tasks: list[dict], samples: int, **params):
  """Plays all episodes side by side, turn by turn."""
  episodes = []
  for task in tasks:
    ids = world.encode(world.render(task['messages']))
    for _ in range(samples):
      episodes.append(Episode(task, [*ids], [False] * len(ids), [0.0] * len(ids)))
  stop = world.tokenizer.eos_token_id
  for _ in range(MAX_TURNS):
    waiting = []
    for episode in episodes:
      room = min(MAX_TOKENS - len(episode.tokens), TURN_TOKENS)
      if episode.done or room < 1:
        continue
      options = tinker.SamplingParams(max_tokens=room, stop=[stop], **params)
      prompt = tinker.ModelInput.from_ints(episode.tokens)
      waiting.append((episode, sampler.sample(prompt, 1, options)))
    for episode, future in waiting:
      (reply,) = future.result(timeout=600).sequences
      episode.add(reply.tokens, reply.logprobs)
      if reply.stop_reason != 'stop':
        episode.done = True  # It ran out of tokens.
      else:
        step(episode, world.tokenizer.decode(reply.tokens[:-1]), world)
    if not waiting:
      break
  return episodes


def make_data(episodes: list[Episode], samples: int) -> list[tinker.Datum]:
  """Makes the data of a step; groups without a difference teach nothing."""
  data = []
  for start in range(0, len(episodes), samples):
    group = episodes[start : start + samples]
    rewards = np.array([episode.reward for episode in group])
    if np.ptp(rewards) == 0:
      continue
    advantages = (rewards - rewards.mean()) / rewards.std()
    for episode, advantage in zip(group, advantages, strict=True):
      # A tool's last answer may be longer than what fits; it has no loss.
      tokens = episode.tokens[: MAX_TOKENS + 1]
      sampled = np.array(episode.sampled[1 : len(tokens)], np.float32)
      inputs = {
        'target_tokens': np.array(tokens[1:]),
        'logprobs': np.array(episode.logprobs[1 : len(tokens)], np.float32),
        'advantages': (advantage * sampled).astype(np.float32),
      }
      text = tinker.ModelInput.from_ints(tokens[:-1])
      data.append(tinker.Datum(model_input=text, loss_fn_inputs=inputs))
  return data


def main():
  args = parse_args()
  with open(args.data) as file:
    content = json.load(file)
  world = World(content, args.tokenizer)
  service = tinker.ServiceClient(base_url=args.url, api_key=args.key)
  client = service.create_lora_training_client(
    args.model, rank=args.rank, seed=args.seed
  ).result()
  adam = tinker.AdamParams(learning_rate=args.learning_rate, grad_clip_norm=1.0)
  rng, order, begin = np.random.default_rng(args.seed), [], time.time()
  sampler = client.save_weights_and_get_sampling_client().result()
  for number in range(args.steps):
    if len(order) < args.tasks:
      order = rng.permutation(len(content['train'])).tolist()
    tasks = [content['train'][order.pop()] for _ in range(args.tasks)]
    episodes = play(sampler, world, tasks, args.samples)
    if data := make_data(episodes, args.samples):
      scale = sum(sum(episode.sampled) for episode in episodes)
      for datum in data:  # The mean over the sampled tokens of the step.
        inputs = datum.loss_fn_inputs
        inputs['advantages'] = tinker.TensorData.from_numpy(
          inputs['advantages'].to_numpy() / scale
        )
      passed = client.forward_backward(data, 'importance_sampling')
      stepped = client.optim_step(adam)
      loss, norm = passed.result().metrics['loss:sum'], stepped.result().metrics
      sampler = client.save_weights_and_get_sampling_client().result()
      reward = np.mean([episode.reward for episode in episodes])
      print(
        f'step {number + 1}: reward {reward:.3f}, loss {loss:.4f}, '
        f'{norm}, {time.time() - begin:.0f} s',
        flush=True,
      )
  print(client.save_state('last', overwrite=True).result().path)
  for name, tasks in content['test'].items():
    played = play(sampler, world, tasks[: args.test], 1, temperature=0.0)
    right = sum(episode.right for episode in played)
    print(f'{name}: {right / len(played):.3f} ({right}/{len(played)})', flush=True)
  service.close('success').result()


if __name__ == '__main__':
  main()
