"""What a world provides to make a small policy for it and train it there.

`learn.py` is the command. A world replaces only the data and the weights of a real task:
environments, tools and graders are those of agent_r1_jax.tasks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import pictures
from agent_r1_jax.rollout import rollout
from experiments import comparison


@dataclasses.dataclass(frozen=True)
class Example:
  """A complete conversation, and whether its prompt offers the world's tools.

  Attributes:
    messages: End with the assistant's last reply.
    tools: Whether the tools are in the prompt.
    kind: The kind of practice or demonstration, for tests.
  """

  messages: list[types.Message]
  tools: bool = True
  kind: str = ''


class World(NamedTuple):
  """A world: the practice of its base policy, its tasks, and how to play them.

  Attributes:
    examples: From a seed to endless practice examples of the base policy.
    text: From an example to the texts that train the tokenizer.
    schemas: Makes the schemas of the tools, for prompts of examples that offer them.
    tasks: (seed, n) -> tasks to train on.
    held_out: (seed, n, split) -> held-out tasks by the name of their set; the split is
      'dev' for choosing settings, 'test' for reported numbers.
    methods: From held-out tasks to how they are asked and played, by the keys of
      `labels`; 'tools' is trained.
    labels: The names of the methods in the tables.
    score: The metric that is 1 if the task is solved.
    kinds: Kinds of tasks, for the tables.
    config: The configuration of the training.
    base: The configuration of the base policy's training.
    vocab: The maximum size of the vocabulary.
    more_tokens: Texts that become one token each, such as the tags of an action.
    options: Makes what else the episodes depend on, such as the values of flags.
    also: Keys of further methods for the trained policy, besides 'tools'.
    reader: Reads the pictures of its messages; None if there are none.
  """

  examples: Callable[[int], Iterator[Example]]
  text: Callable[[Example], Sequence[str]]
  schemas: Callable[[], Sequence[dict[str, Any]]]
  tasks: Callable[[int, int], list[types.Task]]
  held_out: Callable[[int, int, str], dict[str, list[types.Task]]]
  methods: Callable[[comparison.Sets], Mapping[str, comparison.Method]]
  labels: Mapping[str, str]
  score: str
  kinds: Mapping[str, Callable[[types.Task], bool]]
  config: config_lib.Config
  base: sft.Config
  vocab: int = 512
  more_tokens: Sequence[str] = ()
  options: Callable[[], dict[str, Any]] = dict
  also: Sequence[str] = ()
  reader: pictures.Reader | None = None


def practise(world: World, seed: int, n: int) -> tuple[list[types.Task], rollout.MakeEnv]:
  """Makes n tasks of a world that no policy is trained on, and their environment."""
  return world.tasks(seed + 1_000_000, n), world.methods({})['tools'][1]


def say(content: str) -> types.Message:
  """Returns a reply of the assistant."""
  return {'role': 'assistant', 'content': content}


def talk(asked: str, reply: str, kind: str) -> Example:
  """Makes an example of one question and its reply, without tools."""
  return Example([{'role': 'user', 'content': asked}, say(reply)], tools=False, kind=kind)


def texts_of(example: Example) -> list[str]:
  """Returns each message preceded by its role, as the chat template writes it."""
  role = {'tool': 'user'}
  return [f'{role.get(m["role"], m["role"])}\n{m["content"]}' for m in example.messages]
