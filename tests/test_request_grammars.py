"""The automata of requests: made once, in processes with limits, whoever asks."""

import asyncio
from concurrent import futures
import functools

import httpx2
import pytest
import serving
import test_automata
import tiny
import waiting

from agent_r1_jax.grammars import byte_grammars, compiler
from agent_r1_jax.host import isolated
from agent_r1_jax.serve import request_grammars, requests
from agent_r1_jax.web import http

_ASKED = {'messages': [{'role': 'user', 'content': 'Hello'}], 'max_tokens': 4}
UNSUPPORTED = {
  'type': 'object',
  'properties': {'n': {'type': 'integer', 'multipleOf': 3}},
}
ENDLESS = {'type': 'string', 'pattern': '^(a{1,300}){1,300}$'}


def with_schema(schema, **more):
  form = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
  return _ASKED | {'response_format': form} | more


def _post(url, body):
  return httpx2.post(f'{url}/v1/chat/completions', json=body, timeout=120)


class TestGrammars:
  def _grammars(self):
    return request_grammars.Grammars(tiny.chat(), tiny.VOCAB)

  def _make(self, making, body):
    return making.make(http.check_fields(requests.ChatRequest, body), restrict=True)

  async def test_equal_requests_share_an_automaton_that_is_made_once(self, monkeypatch):
    made, compile_grammar = [], compiler.compile_grammar

    async def count(*args):
      made.append(args)
      return await compile_grammar(*args)

    monkeypatch.setattr(compiler, 'compile_grammar', count)
    making = self._grammars()
    asked = with_schema({'type': 'integer'}, stop=['a', 'ab' * 500])
    one, two, other = await asyncio.gather(
      self._make(making, asked),
      self._make(making, asked),
      self._make(making, with_schema({'type': 'boolean'})),
    )
    assert one[0] is two[0] and one[1] is two[1] and one[1] is not other[1]
    assert (await self._make(making, asked))[1] is one[1] and len(made) == 3
    assert len(one[0].table) == 2 and other[0] is tiny.chat().stop_automaton(tiny.VOCAB)

  async def test_the_keys_of_an_object_have_the_order_of_the_schema(self):
    schema = {'properties': {'b': {'type': 'null'}, 'a': {'type': 'null'}}}
    schema = {'type': 'object', 'required': ['a', 'b']} | schema
    _, grammar = await self._make(self._grammars(), with_schema(schema))
    fits = lambda text: test_automata._walk(grammar, test_automata._encode(text)) >= 0
    assert fits('{"b": null, "a": null}') and not fits('{"a"')

  async def test_what_fails_is_refused_each_time_and_not_kept(self, refused):
    making = self._grammars()
    for _ in range(2):
      with refused('response_format', http.RefusedError) as e:
        await self._make(making, with_schema({'type': 'object', 'properties': 3}))
      assert e.value.status == 400
    assert not making._made

  @pytest.mark.parametrize('in_tool', [True, False])
  async def test_what_no_grammar_says_is_refused_by_its_keyword(self, refused, in_tool):
    """In schemas of replies and of tools that must be called."""
    function = {'name': 'f', 'parameters': UNSUPPORTED}
    schema = {'type': 'json_schema', 'json_schema': {'schema': UNSUPPORTED}}
    asked = (
      {'tools': [{'function': function}], 'tool_choice': 'required'}
      if in_tool
      else {'response_format': schema}
    )
    with refused('no grammar', http.RefusedError) as error:
      await self._make(self._grammars(), _ASKED | asked)
    assert error.value.status == 400

  async def test_old_and_large_ones_are_forgotten(self, monkeypatch):
    making = self._grammars()
    schemas = [{'const': f'value {i}'} for i in range(4)]
    make = lambda i: self._make(making, with_schema(schemas[i]))
    first = await make(0)
    monkeypatch.setattr(request_grammars, '_MOST_KEPT', 2)
    await make(1)
    assert (await make(0))[1] is first[1]  # Now the other one is the oldest.
    await make(2)
    assert len(making._made) == 2 and (await make(0))[1] is first[1]
    monkeypatch.setattr(request_grammars, '_MOST_BYTES', 1)
    await make(3)
    assert not making._made

  async def test_too_many_at_a_time_are_refused_and_a_late_one(
    self, refused, monkeypatch
  ):
    """Nobody waits for ever, and what one waits for goes on for the others."""
    go_on, making = asyncio.Event(), self._grammars()

    async def wait(*args):
      await go_on.wait()
      return tiny.stop()

    monkeypatch.setattr(compiler, 'compile_grammar', wait)
    monkeypatch.setattr(request_grammars, '_MOST_UNDER_WAY', 1)
    first = asyncio.create_task(self._make(making, with_schema({'type': 'null'})))
    await waiting.soon(lambda: making._made, 'the first grammar')
    with refused('1 grammars are being', http.RefusedError) as error:
      await self._make(making, with_schema({'type': 'integer'}))
    assert error.value.status == 429
    monkeypatch.setattr(request_grammars, '_SECONDS', 0.001)
    with refused('not made within 0.001', http.RefusedError) as error:
      await self._make(making, with_schema({'type': 'null'}))
    assert error.value.status == 429
    go_on.set()
    assert len(await first) == 2

  async def test_without_restriction_nothing_is_made(self):
    making = self._grammars()
    asked = http.check_fields(requests.ChatRequest, with_schema(ENDLESS))
    assert len(await making.make(asked, restrict=False)) == 1 and not making._made


@pytest.fixture(scope='module')
def url():
  with serving.serve() as url:
    yield url


class TestServer:
  def test_what_takes_for_ever_delays_nobody(self, url, monkeypatch):
    """It is refused, and its process is gone; meanwhile others are answered."""
    make = functools.partial(
      isolated.in_subprocess, byte_grammars.make_encoded, processes=2
    )
    monkeypatch.setattr(compiler, '_compile', make(**compiler._LIMITS))
    monkeypatch.setattr(byte_grammars, 'PROCESSOR_SECONDS', 1)
    choice = [f'{i * 7919 % 100_003}xyz{i}' for i in range(20_000)]
    hostile: list[dict] = [ENDLESS]
    hostile.append({'type': 'string', 'pattern': '^(a|b)*a(a|b){18}$'})
    hostile.append({'enum': choice})
    before = test_automata._children()
    with futures.ThreadPoolExecutor() as pool:
      asked = [pool.submit(_post, url, with_schema(schema)) for schema in hostile]
      at_work = lambda: len(test_automata._children() - before) == 2
      waiting.until(at_work, 'that two grammars are made')
      processes = test_automata._children() - before
      assert httpx2.get(f'{url}/health').status_code == 200
      assert _post(url, _ASKED).status_code == 200
      assert _post(url, _ASKED | {'stop': 'x' * 2000}).status_code == 400
      answers = [future.result() for future in asked]
    for answer in answers:
      assert answer.status_code == 400
      error = answer.json()['error']['message']
      assert 'states, and' in error or 'takes more than 1 s' in error, error
    # The one that took too long was killed.
    assert processes - test_automata._children()
    assert _post(url, with_schema({'type': 'integer'})).status_code == 200

  def test_a_long_string_is_restricted(self, url):
    answer = _post(url, with_schema({'type': 'string', 'maxLength': 1000}, max_tokens=8))
    assert answer.status_code == 200
    assert answer.json()['choices'][0]['message']['content'].startswith('"')

  def test_stop_strings_of_any_shape_are_found_or_refused(self, url):
    for stop, status in ((['ab' * 500], 200), (['a' * 64] * 16, 200), (['é' * 513], 400)):
      answer = _post(url, _ASKED | {'stop': stop})
      assert answer.status_code == status
    assert '1 stop strings have 1,026 bytes' in answer.json()['error']['message']
