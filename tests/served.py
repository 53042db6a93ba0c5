"""A server that the tests of a file share, and what clients ask of it."""

import httpx2
import openai
import pytest
import serving

TOOLS = [serving.search_tool().schema]
ASKED = {'model': 'policy', 'messages': serving.tasks()[0].messages}
GREEDY = {**ASKED, 'temperature': 0}


def call(name):
  return {'id': 'a', 'function': {'name': name, 'arguments': ''}}


def metric(url, name):
  text = httpx2.get(f'{url}/metrics').text
  return sum(float(s.split()[-1]) for s in text.split('\n') if s.startswith(name))


@pytest.fixture(scope='module')
def url():
  with serving.serve() as url:
    yield url


@pytest.fixture
def client(url):
  with openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0) as client:
    yield client
