"""What a world has to offer so that a small policy can be made for it and learn in it.

`learn.py` is the command. A world replaces the data and the weights of a real task, and
nothing else: environments, tools and graders are those of agent_r1_jax.tasks.
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
  """A whole conversation, and whether its prompt offers the world's tools.

  Attributes:
    messages: Ends with the assistant's last reply.
    tools: Whether the tools are in the prompt.
    kind: What is practised or shown, for tests.
  """

  messages: list[types.Message]
  tools: bool = True
  kind: str = ''


class World(NamedTuple):
  """A world: what its base policy practises, its tasks, and how they are played.

  Attributes:
    examples: Seed -> what the base policy practises, without end.
    text: An example -> the texts that the tokenizer is trained on.
    schemas: Makes the schemas of the tools, for prompts of examples that offer them.
    tasks: (seed, n) -> tasks to train on.
    held_out: (seed, n, split) -> held-out tasks by the name of their set; the split is
      'dev' for choosing settings, 'test' for numbers to report.
    methods: Held-out tasks -> how they are asked and played, by the keys of `labels`;
      'tools' is the one that is trained.
    labels: The names of the methods in the tables.
    score: The metric that is 1 where the task is solved.
    kinds: Kinds of tasks, for the tables.
    config: The configuration of the training.
    base: The configuration of the base policy's training.
    vocab: The most entries of the vocabulary.
    more_tokens: Texts that are one token each, such as the marks of an action.
    options: Makes what else the episodes depend on, such as the values of flags.
    also: Keys of methods that the trained policy plays too, besides 'tools'.
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
  """Returns an example of one question and its reply, without tools."""
  return Example([{'role': 'user', 'content': asked}, say(reply)], tools=False, kind=kind)


def texts_of(example: Example) -> list[str]:
  """Returns each message with its role before it, as the chat template writes it."""
  role = {'tool': 'user'}
  return [f'{role.get(m["role"], m["role"])}\n{m["content"]}' for m in example.messages]
