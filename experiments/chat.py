"""Talk to a trained agent in the terminal; its tools are called as in training.

  python -m experiments.chat                                   # after make quickstart
  python -m experiments.chat --config.model.path=DIR --tools=none

Replies are streamed. Each question begins a new conversation, as in the quickstart's
training; with --remember it continues the previous one. Ctrl-C stops a reply, Ctrl-D
ends.
"""

import sys

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import clients, request
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.host import runtime, terminal
from agent_r1_jax.tools import search
from agent_r1_jax.train.plan import setup, sizes
from experiments import model_formats
from experiments.miniwiki import tasks as miniwiki

_TOOLS = flags.DEFINE_enum('tools', 'miniwiki', ['miniwiki', 'none'], 'The tools.')
_REMEMBER = flags.DEFINE_bool('remember', False, 'Continue the conversation before.')
_CFG = fields.define_flags(
  config_lib.Config(
    model=config_lib.Model(path='runs/quickstart/model'),
    evaluation=config_lib.Sampling(temperature=0.0),
    engine=config_lib.Engine(rows=1, slots=2048, decode_steps=4, replicas=1),
  )
)
_DIM, _PLAIN = '\033[2m', '\033[0m'


class Conversation:
  """A conversation; the policy's tokens stay as they were sampled."""

  def __init__(self, engine: engine_lib.Engine, chat: chat_lib.Chat, tools, config):
    self._engine, self._chat, self._tools, self._config = engine, chat, tools, config
    self._sequence: request.Sequence | None = None
    self._said: list[types.Message] = []  # Messages of the user and the tools.

  async def ask(self, question: str):
    """Answers a question, with as many tool calls as the policy makes."""
    messages = [{'role': 'user', 'content': question}]
    env = env_lib.ToolEnv(self._tools, reward=lambda task, messages: 0.0)
    await env.reset(types.Task('chat', messages))
    for _ in range(self._config.limits.max_turns):
      reply = await self._reply(messages)
      if reply is None:
        return
      step = await env.step(reply)
      if step.done:
        return
      messages = step.messages
      for message in messages:
        _write(message['content'].strip() + '\n', _DIM, _PLAIN)

  async def _reply(self, messages: list[types.Message]) -> str | None:
    """Samples and shows a reply; None if it was cut."""
    chat, schemas = self._chat, [tool.schema for tool in self._tools]
    if self._sequence is None:
      self._said = []
      ids = chat.encode_prompt(messages, schemas)
    else:
      last, given = (
        int(self._sequence.tokens[-1]),
        {'history': self._said, 'tools': schemas},
      )
      ids = chat.encode_delta(messages, last, **given)
    room = self._engine.sizes.slots - len(self._sequence or ()) - len(ids)
    if room < 1:
      self._sequence = None
      return _write('The conversation is full; the next question begins a new one.\n')
    generation = self._engine.submit(
      request.Request(
        ids,
        self._sequence,
        max_tokens=min(room, self._config.limits.max_turn_tokens),
        sampling=self._config.evaluation,
        automata=[chat.stop_automaton(self._engine.config.vocab_size)],
      )
    )
    self._sequence, tokens, shown = generation.sequence, [], ''
    self._said = [*self._said, *messages]
    async for chunk in generation:
      tokens += chunk.tokens.tolist()
      text = str(chat.decode(tokens)).rstrip('\ufffd')
      _write(text[len(shown) :])
      shown = text
    _write('\n')
    stopped = generation.chunks[-1].stopped
    return chat.decode(tokens) if stopped else None

  def forget(self):
    """Makes the next question begin a new conversation."""
    self._sequence = None


def _write(text: str, before: str = '', after: str = ''):
  text = terminal.printable(text, sys.stdout.encoding)
  sys.stdout.write(f'{before}{text}{after}')
  sys.stdout.flush()


def main(_):
  runtime.quiet_logging()
  config = sizes.resolve(model_formats.add(_CFG.value), None, None)
  model, params, chat = setup.load(config.model, config.chat)
  engine = setup.make_engine(config, model, params)
  tools = []
  if _TOOLS.value == 'miniwiki':
    tools = [search.search_tool(miniwiki.index(0), k=1)]
  engine.warm_up(automata=[chat.stop_automaton(model.vocab_size)])
  conversation = Conversation(engine, chat, tools, config)
  with engine.open():
    while True:
      try:
        question = input('> ').strip()
      except (EOFError, KeyboardInterrupt):
        return _write('\n')
      if not question:
        continue
      if not _REMEMBER.value:
        conversation.forget()
      answer = engine.start([conversation.ask(question)])
      try:
        clients.wait(answer).result()
      except KeyboardInterrupt:
        answer.cancel()
        conversation.forget()
        _write('\n')


if __name__ == '__main__':
  app.run(main)
