"""A judge as a reward function: another model reads the conversation and scores it.

judge = Judge(openai_endpoint(URL, 'judge-7b'), PROMPT, budget=5000)
reward = rewards.hybrid(outcome=(1.0, qa.em_reward), judge=(0.2, judge))
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable
import hashlib
import re
import ssl
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.host import workers

# From a prompt to the judge's answer.
Ask = Callable[[str], Awaitable[str]]
# The last match in the judge's answer counts.
_SCORE = re.compile(r'score:?\s*\**\s*(-?\d+(?:\.\d+)?)', re.IGNORECASE)


class JudgeError(RuntimeError):
  """The judge gave no score."""


def openai_endpoint(
  url: str, model: str, *, key: str = '', max_tokens: int = 512, seconds: float = 30.0
) -> Ask:
  """Makes the function that asks a chat model behind an OpenAI-compatible endpoint.

  `url` is the endpoint's base, such as 'http://localhost:8000/v1', `model` the model's
  name there. Each phase of a request may take `seconds`.
  """
  headers = {'Authorization': f'Bearer {key}'} if key else {}
  # A client per call works in any event loop; certificates are read once.
  context = ssl.create_default_context()

  async def ask(prompt: str) -> str:
    import httpx2

    body = {
      'model': model,
      'messages': [{'role': 'user', 'content': prompt}],
      'max_tokens': max_tokens,
      'temperature': 0.0,
    }
    async with httpx2.AsyncClient(
      headers=headers, timeout=seconds, verify=context
    ) as client:
      response = await client.post(f'{url.rstrip("/")}/chat/completions', json=body)
    response.raise_for_status()
    return response.json()['choices'][0]['message']['content']

  return ask


class Judge:
  """A reward function that asks a judge, once for equal conversations.

  A late, broken or out-of-range answer is a failure. Failures are counted and raise, so
  that the trajectory is masked as an error and not scored 0; with a `fallback` they get
  that score instead.

  Attributes:
    counts: 'calls', 'cached', 'failures' and 'refused' (beyond the budget), so far.
  """

  def __init__(
    self,
    ask: Ask,
    prompt: str,
    *,
    low: float = 0.0,
    high: float = 1.0,
    seconds: float = 30.0,
    budget: int | None = None,
    parallel: int = 16,
    fallback: float | None = None,
    remember: int = 10_000,
  ):
    """Checks the prompt; asks nothing yet.

    Args:
      ask: Asks the judge: `openai_endpoint`, or any async function.
      prompt: The question to the judge, with the fields {question}, {answer} (the golden
        answer) and {conversation}. It should end with 'Write "Score: " and a number ...'.
      low: The lowest score.
      high: The highest score.
      seconds: Time limit of a call, including the time in the queue.
      budget: The maximum number of calls of this process; None is no limit.
      parallel: The maximum number of concurrent calls.
      fallback: The score of a failure; None raises JudgeError.
      remember: How many scores to cache; the oldest are dropped first. Each takes some
        200 bytes, however long its conversation is.
    """
    try:
      prompt.format(question='', answer='', conversation='')
    except (KeyError, IndexError, ValueError) as error:
      raise ValueError(
        f'prompt: {error!r}; its fields are {{question}}, {{answer}}, {{conversation}}.'
      ) from error
    self._ask, self._prompt = ask, prompt
    self._low, self._high, self._fallback = low, high, fallback
    self._seconds, self._budget, self._parallel = seconds, budget, parallel
    self._running, self._remember = 0, remember
    # By the sha256 of the prompt, since conversations are long and many.
    self._scores: dict[bytes, float] = {}
    # The calls in progress, by event loop and the same digest.
    self._calls: dict[tuple, asyncio.Task[float]] = {}
    self.counts: collections.Counter[str] = collections.Counter()

  async def __call__(self, task: types.Task, messages: list[types.Message]) -> float:
    """Returns the judge's score of a conversation."""
    replies = messages[len(task.messages) :]
    prompt = self._prompt.format(
      question='\n'.join(_to_text(m.get('content') or '') for m in task.messages),
      answer=task.answer,
      conversation='\n\n'.join(f'{m["role"]}: {_to_text(m["content"])}' for m in replies),
    )
    digest = hashlib.sha256(prompt.encode(errors='surrogatepass')).digest()
    key = asyncio.get_running_loop(), digest
    if digest in self._scores or key in self._calls:
      self.counts['cached'] += 1
    if digest in self._scores:
      return self._scores[digest]
    if key not in self._calls:
      call = self._calls[key] = asyncio.ensure_future(self._find_score(prompt, digest))
      call.add_done_callback(lambda call: self._forget_call(key, call))
    # Others may wait for this call too, so it outlives a time-out of this conversation.
    return await asyncio.shield(self._calls[key])

  def _forget_call(self, key, call: asyncio.Task[float]):
    del self._calls[key]
    if not call.cancelled():
      call.exception()  # If nobody waits for it, asyncio would warn.

  async def _find_score(self, prompt: str, digest: bytes) -> float:
    """Asks within the time limit; caches a score, and counts a failure."""
    try:
      score = await workers.call(self._judge, prompt, name='judge', seconds=self._seconds)
    except Exception as error:
      self.counts['failures'] += 1
      if self._fallback is None:
        raise JudgeError(f'the judge gave no score: {error!r:.300}') from error
      return self._fallback
    self._scores[digest] = score
    while len(self._scores) > self._remember:
      del self._scores[next(iter(self._scores))]
    return score

  async def _judge(self, prompt: str) -> float:
    # A semaphore would be bound to one event loop; rewards may move to another.
    while self._running >= self._parallel:
      await asyncio.sleep(0.01)
    if self._budget is not None and self.counts['calls'] >= self._budget:
      self.counts['refused'] += 1
      raise JudgeError(f'its budget of {self._budget} calls is used')
    self.counts['calls'] += 1
    self._running += 1
    try:
      text = await self._ask(prompt)
    finally:
      self._running -= 1
    if not (numbers := _SCORE.findall(text)):
      raise ValueError(f"no 'Score: NUMBER' in {text[-200:]!r}")
    if not self._low <= (score := float(numbers[-1])) <= self._high:
      raise ValueError(f'the score {score} is not within {self._low} and {self._high}')
    return score


def _to_text(content: str | list[dict[str, Any]]) -> str:
  """Converts content to text, with [picture] for pictures."""
  if isinstance(content, str):
    return content
  return '\n'.join(part.get('text', '[picture]') for part in content)
