"""What texts have in common is computed once, and texts come and go in few rows."""

import asyncio

import clients
import numpy as np
import tiny

from agent_r1_jax.engine import request as request_lib

# Room for 64 texts of a long system prompt.
_LARGE = {'rows': 64, 'slots': 512, 'prefill_rows': 16, 'prefill_tokens': 64}
_LARGE |= {'bucket': 512, 'narrow': False}
_SYSTEM = clients.tokens(1000, 400)


def _run(engine, *coroutines):
  return tiny.within(engine.run, coroutines)


def _distinct(texts):
  """Tokens that must be computed, of all tokens before the last: a tree's nodes."""
  return len({text[:i].tobytes() for text in texts for i in range(1, len(text))})


def _task(number):
  """A task's prompt, after the system's; no two begin alike."""
  return np.concatenate([[30 + number], clients.tokens(number, 19)]).astype(np.int32)


class TestPrefilled:
  def test_a_groups_prompt_longer_than_a_prefill_is_computed_once(self, engine):
    played = clients.run(engine, range(24, 30), group=3)
    prompts = [len(clients.prompt(group)) for group in (8, 9)]
    given = sum(int((~s.action_mask).sum()) for s in played.values())
    # The last token of a prompt is computed by the decode; later a reply's last instead.
    assert engine.stats.prefilled == given - 2 * sum(prompts) - 2
    assert engine.stats.shared == 2 * (sum(prompts) - 2)
    sampled = sum(int(s.action_mask.sum()) for s in played.values())
    assert engine.stats.sampled == sampled

  def test_a_late_comer_copies_from_a_row_that_has_gone_on(self, family, engine):
    arrived, prompt = asyncio.Event(), clients.prompt(4)

    async def late():
      await arrived.wait()
      return await clients.play(engine, 17, turns=1)

    async def early():
      first = engine.submit(clients.request(prompt))
      await first
      await engine.submit(clients.request(clients.tokens(1, 9), first.sequence))
      arrived.set()
      await engine.submit(clients.request(clients.tokens(2, 9), first.sequence))

    _, segment = _run(engine, early(), late())
    assert engine.stats.shared == len(prompt) - 1
    tiny.assert_on_policy(clients.params(), [segment])

  def test_samples_of_tasks_of_one_system_prompt_compute_each_distinct_token_once(self):
    """Exactly 1.00 over distinct tokens."""
    engine = clients.engine(**_LARGE)
    prompts = [np.concatenate([_SYSTEM, _task(n)]) for n in range(8)]

    async def play(task, sample):
      key = (task, sample)
      reply = await engine.submit(clients.request(prompts[task], None, 4, key))
      return clients.segment([(prompts[task],), reply[:3]])

    played = _run(engine, *(play(task, s) for s in range(8) for task in range(8)))
    assert engine.stats.prefilled == _distinct(prompts) == 399 + 1 + 8 * 19
    tiny.assert_on_policy(clients.params(), played[::9])

  def test_forks_in_the_midst_of_texts_compute_what_they_append_alone(self, family):
    """Four at turn 2 of each, of which two are told the same."""
    engine = clients.engine(**_LARGE)

    async def play(number):
      text, ends = None, []
      for turn in range(3):
        given = np.concatenate([[30 + number], clients.tokens(50 + turn, 24)])
        request = clients.request(given.astype(np.int32), text, 20, number)
        generation = engine.submit(request)
        await generation
        text = generation.sequence
        ends.append(len(text))
      forks = []
      for branch in range(4):
        given = np.array([40 + branch // 2, *clients.tokens(7, 20)], np.int32)
        fork = request_lib.Fork(text, ends[1])
        forks.append(engine.submit(clients.request(given, fork, 6, (number, branch))))
      replies = await asyncio.gather(*forks)
      assert replies[0].tokens.tolist() != replies[1].tokens.tolist()
      return [
        (g.sequence.tokens, ends[1] + 21, r) for g, r in zip(forks, replies, strict=True)
      ]

    played = _run(engine, *(play(number) for number in range(4)))
    # Of a new text all but the last token; where it goes on, a reply's last one instead.
    # A state has not seen the last token of a reply either.
    more = 20 + (family != 'llama')
    assert engine.stats.prefilled == 4 * (3 * 25 - 1) + 4 * 2 * more
    tiny.assert_on_policy(clients.params(), _continued(played))


def _continued(played):
  """Segments of which only the last reply counts, of (tokens, its start, reply)."""
  return [
    clients.segment([(tokens[:start],), reply[:3]])
    for texts in played
    for tokens, start, reply in texts
  ]


class TestEviction:
  def test_clients_that_hold_texts_without_a_reserve_all_come_to_their_ends(self):
    """More open texts than rows, all at the same time; they lose their rows in turns."""
    engine = clients.engine(rows=3, **clients.EXACT)
    met = asyncio.Barrier(12)

    async def play(number):
      parts, given, text = [], clients.prompt(number // 4), None
      for _ in range(3):
        generation = engine.submit(clients.request(given, text, 12, number))
        answer, text = await generation, generation.sequence
        parts += [(given,), answer[:3]]
        given = clients.tokens(
          int(answer.tokens.sum()), 1 + int(answer.tokens.sum()) % 11
        )
        await met.wait()  # Every text is held by its client here.
      return clients.segment(parts)

    played = _run(engine, *(play(number) for number in range(12)))
    clients.assert_reference(dict(enumerate(played)))
    given = sum(int((~s.action_mask).sum()) for s in played)
    assert engine.stats.prefilled > given  # Some were computed again.

  def test_closed_texts_lose_their_rows_first(self):
    engine = clients.engine(rows=3, **clients.EXACT)

    async def play():
      held = []
      for n in range(3):
        generation = engine.submit(clients.request(clients.tokens(n, 20), None, 5))
        await generation
        held.append(generation.sequence)
      held[1].close()
      await engine.submit(clients.request(clients.tokens(5, 20), None, 5))
      before = engine.stats.prefilled
      for text in (held[0], held[2]):
        await engine.submit(clients.request(clients.tokens(6, 4), text, 5))
      assert engine.stats.prefilled - before == 2 * 4
      # Also a closed text may be forked, from wherever its tokens are.
      fork = request_lib.Fork(held[1], 18)
      generation = engine.submit(clients.request(clients.tokens(7, 3), fork, 9))
      reply = await generation
      return [(generation.sequence.tokens, 21, reply)]

    tiny.assert_on_policy(clients.params(), _continued(_run(engine, play())))

  def test_a_text_of_an_earlier_run_goes_on(self, engine):
    texts = []
    given = clients.tokens(0, 30), clients.tokens(1, 5)

    async def begin():
      generation = engine.submit(clients.request(given[0], None, 9))
      texts.append(generation.sequence)
      return await generation

    async def go_on():
      return await engine.submit(clients.request(given[1], texts[0], 9))

    (first,) = _run(engine, begin())
    (second,) = _run(engine, go_on())
    parts = [(given[0],), first[:3], (given[1],), second[:3]]
    tiny.assert_on_policy(clients.params(), [clients.segment(parts)])

  def test_reserve_lets_no_more_clients_in_than_there_are_rows(self):
    engine, inside, most = clients.engine(rows=3, **clients.EXACT), set(), []

    async def play(number):
      async with engine.reserve(number):
        inside.add(number)
        most.append(len(inside))
        await asyncio.sleep(0)
        inside.remove(number)

    _run(engine, *(play(number) for number in range(9)))
    assert max(most) == 3 and len(most) == 9

  def test_clients_of_several_rows_never_wait_for_each_other(self):
    """Of several policies, whose clients would each take a part of the rows."""
    engine, left, least = clients.engine(rows=4, **clients.EXACT), [4], []

    async def play(rows, policy):
      async with engine.reserve(policy=policy, rows=rows):
        left[0] -= rows
        least.append(left[0])
        try:
          await asyncio.sleep(0)
        finally:
          left[0] += rows

    async def everybody():
      policies = [None, *(engine.make_policy(clients.params(), n) for n in (1, 2))]
      plays = [play(rows, policy) for rows in (3, 4, 1, 2) for policy in policies]
      late = asyncio.ensure_future(play(4, None))
      await asyncio.sleep(0)
      late.cancel()
      await asyncio.gather(*plays)

    tiny.within(_run, engine, everybody(), seconds=60)
    assert min(least) == 0 and left == [4] and len(least) in (12, 13)

  def test_policies_that_wait_are_let_in_by_turns(self):
    """Of one policy, whoever came first is first."""
    engine, began = clients.engine(rows=1, **clients.EXACT), []

    async def play(name, policy=None):
      async with engine.reserve(policy=policy):
        began.append(name)
        await asyncio.sleep(0)

    async def everybody():
      policy = engine.make_policy(clients.other_params(), 3)
      rollouts = [play(number) for number in range(6)]
      evaluations = [play('abc'[number], policy) for number in range(3)]
      await asyncio.gather(*rollouts, *evaluations)

    _run(engine, everybody())
    assert began == [0, 1, 'a', 2, 'b', 3, 'c', 4, 5]
