"""A judge that is a model of ours: it answers through an engine, as a policy does.

judge = agent.judge.Judge(judge_model.ask_engine(engine, chat), PROMPT)
"""

import asyncio

from agent_r1_jax import config as config_lib
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.guided import judge


def ask_engine(
  engine: engine_lib.Engine,
  chat: chat_lib.Chat,
  *,
  policy: replica_lib.Policy | None = None,
  max_tokens: int = 128,
) -> judge.Ask:
  """Makes the function that asks a model in an engine, which must be open meanwhile.

  It may be the engine of the rollouts. No row is reserved for the judge: episodes that
  wait for its score hold all rows, and it would wait for theirs. It takes the row of a
  text that waits, whose episode then prefills it again.

  Args:
    engine: The engine, with the judge's parameters or those of `policy`.
    chat: Encodes the prompt with the judge's tokenizer.
    policy: The judge, from Engine.make_policy; None is the engine's own policy.
    max_tokens: The most tokens of an answer, which is greedy.
  """
  stops = chat.stop_automaton(engine.config.vocab_size)

  async def reply(request: request_lib.Request) -> str:
    generation = engine.submit(request)
    try:
      return str(chat.decode((await generation).tokens.tolist()))
    finally:
      generation.text.close()

  async def ask(prompt: str) -> str:
    request = request_lib.Request(
      chat.encode_prompt([{'role': 'user', 'content': prompt}], []),
      max_tokens=max_tokens,
      sampling=config_lib.GREEDY,
      automata=(stops,),
      policy=policy,
    )
    # Rewards run in an event loop of their own; a late call is cancelled in the engine's.
    (text,) = await asyncio.wrap_future(engine.start([reply(request)]))
    return text

  return ask
