"""Formats of tool calls in chats and rollouts: they are found, described and answered."""

import functools
import pathlib
import re

import call_replies
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.grammars import byte_grammars, compiler
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import evaluate, rollout
from agent_r1_jax.train import preflight
from agent_r1_jax.train.plan import setup
from experiments import train_tokenizer

_TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or () %}{% set call = call.function %}CALL{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
_WRITTEN = {
  'hermes': """{{ '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
  {{- call.arguments | tojson + '}\n</tool_call>' }}""",
  'llama3': """{{ '{"name": "' + call.name + '", "parameters": ' }}
  {{- call.arguments | tojson + '}' }}""",
  'qwen3_coder': """{{ '<tool_call>\n<function=' + call.name + '>\n' }}
  {%- for k, v in call.arguments | items %}
  {{- '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{% endfor %}
  {{- '</function>\n</tool_call>' }}""",
}


def _chat(directory, written, **options):
  template = _TEMPLATE.replace('CALL', written)
  train_tokenizer.train(
    tiny.TEXTS, vocab_size=tiny.VOCAB, directory=directory, chat_template=template
  )
  return chat_lib.Chat(tokenizer_lib.load(directory), **options)


class TestChat:
  @pytest.mark.parametrize('name', _WRITTEN)
  def test_the_format_is_that_of_the_template(self, name, tmp_path):
    chat = _chat(tmp_path, _WRITTEN[name])
    assert (
      chat.format is chat.detected is call_replies.FORMATS[name] and chat.supports_tools
    )

  @pytest.mark.parametrize(
    'written', ['', '[{{ call.name }}]', "{{ raise_exception('') }}"]
  )
  def test_a_template_without_a_known_format_is_parsed_as_hermes_and_says_so(
    self, written, tmp_path
  ):
    chat = _chat(tmp_path, written)
    assert (
      chat.detected is None and chat.format is call_formats.HERMES and chat.supports_tools
    )
    said = preflight.describe_tool_prompt(
      chat, env_lib.ToolEnv([call_replies.search], lambda *_: 0.0)
    )
    assert said and 'they are parsed as hermes. chat.tool_format changes that.' in said

  @pytest.mark.parametrize('model', ['qwen2.5', 'qwen3'])
  def test_the_templates_of_qwen_are_detected_as_hermes(self, model, data_dir):
    tokenizer = tokenizer_lib.load(data_dir / 'models' / model)
    assert chat_lib.Chat(tokenizer).detected is call_formats.HERMES
    forced = chat_lib.Chat(tokenizer, tool_format=call_formats.LLAMA3)
    prompt = forced.encode_prompt(
      [{'role': 'user', 'content': 'x'}], call_replies.SCHEMAS
    )
    text = forced.decode_exactly(prompt)
    assert '"parameters": {"an argument"' in text and '<tool_call>' not in text

  @pytest.mark.parametrize('name', call_replies.FORMATS)
  def test_a_chosen_format_is_described(self, name):
    tokenizer = tiny.chat().tokenizer
    chat = chat_lib.Chat(tokenizer, tool_format=call_replies.FORMATS[name])
    assert chat.supports_tools == (name == 'hermes')
    only = {'search_r1': call_replies.search, 'retool': call_replies.python}.get(
      name, call_replies.edit
    )
    text = call_replies.FORMATS[name].describe([only.schema])
    if only is call_replies.edit:
      assert '"line": {"type": "integer"' in text
    else:
      with pytest.raises(ValueError, match=f'go to a tool .{only.name}., and the tools'):
        chat.encode_prompt([{'role': 'user', 'content': 'x'}], call_replies.SCHEMAS)
    prompt = chat.encode_prompt([{'role': 'user', 'content': 'x'}], [only.schema])
    assert (str(text) in chat.decode_exactly(prompt)) == (name != 'hermes')

  def test_a_stop_string_may_be_a_control_token(self):
    tokenizer = tiny.chat().tokenizer
    chat = chat_lib.Chat(tokenizer, stop_strings=['<|endoftext|>'])
    stops = chat.stop_automaton(tiny.VOCAB)
    (token,) = tokenizer.encode('<|endoftext|>', add_special_tokens=False)
    assert token not in chat.stop_ids
    assert stops.ends[stops.table[0, stops.classes[token]]]

  def test_answers_are_one_message_of_the_user(self):
    chat = chat_lib.Chat(tiny.chat().tokenizer, tool_format=call_formats.REACT)
    answers = [{'role': 'tool', 'content': c} for c in ('a <|im_end|>', 'b')]
    told = [*answers, {'role': 'user', 'content': 'Go on.'}]
    ids = chat.encode_delta(told)
    text = 'user\nObservation: a <|im_end|>\nObservation: b<|im_end|>'
    assert text in chat.decode_exactly(ids)
    assert ids.tolist().count(chat.stop_ids[0]) == 2  # Not the one in the data.


def test_tool_format_is_checked_loaded_and_refused_with_a_grammar(tmp_path):
  assert config_lib.TOOL_FORMATS == ('auto', *call_replies.FORMATS)
  with pytest.raises(ValueError, match="tool_format is 'xml'; give one of 'auto', 'herm"):
    config_lib.Chat(tool_format='xml').check()
  model = config_lib.Model(path=tiny.save(tmp_path))
  _, _, chat = setup.load(model, config_lib.Chat(tool_format='react'))
  assert chat.format is call_formats.REACT
  env = env_lib.ToolEnv([call_replies.search], lambda *_: 0.0)
  sampling, engine = config_lib.Sampling(tool_grammar=True), tiny.engine(_params())
  with pytest.raises(
    ValueError, match='react have no grammar; make it False, or chat.to'
  ):
    evaluate.make_decoding(sampling, engine, chat, env)


@functools.cache
def _params():
  # So that some replies begin with '<'.
  (opening,) = tiny.chat().tokenizer.encode('<', add_special_tokens=False)
  return tiny.params(tiny.config(), likely={opening: 0.5})


_SAID = {
  'search_r1': (
    '<search> [ab]{1,3} </search>|b <answer>[ab]</answer>',
    'found [ab]{1,3}',
  ),
  'react': (
    'Action: search\nAction Input: [ab]{1,3}\nObservation:|Final Answer: [ab]',
    'found [ab]{1,3}',
  ),
  'llama3': (
    '\\{"name": "search", "parameters": \\{"query": "[ab]"\\}\\}|[ab]',
    'found [ab]',
  ),
  'qwen3_coder': (
    '<tool_call>\n<function=search>\n<parameter=query>\n[ab]\n</parameter>\n'
    '<parameter=top_k>\n(x|1)\n</parameter>\n</function>\n</tool_call>|[ab]',
    "found [ab]|Error: search: argument 'top_k': 'x' is not of type 'integer'",
  ),
}


@pytest.mark.parametrize('name', _SAID)
def test_a_policy_that_calls_in_the_format_is_answered(name, tmp_path):
  """From the logits to the reward: nothing but the chat names the format."""
  if name in _WRITTEN:
    chat = _chat(tmp_path, _WRITTEN[name], tools_in_prompt='own')
  else:
    options = {'tool_format': call_replies.FORMATS[name], 'tools_in_prompt': 'own'}
    chat = chat_lib.Chat(tiny.chat().tokenizer, **options)
  said, answered = _SAID[name]
  pieces = tokenizer_lib.token_bytes(chat.tokenizer)
  grammar = compiler.compile_and_wait(
    byte_grammars.regex, [said], chat.stop_ids, pieces, tiny.VOCAB
  )
  engine = tiny.engine(_params(), slots=512, bucket=512)
  task = types.Task('t', [{'role': 'user', 'content': 'Who?'}])
  played = tiny.within(
    rollout.collect,
    engine,
    chat,
    [task],
    lambda: env_lib.ToolEnv([call_replies.search], lambda *_: 1.0),
    samples=6,
    limits=config_lib.Limits(max_turns=3, max_turn_tokens=120),
    decoding=decoding_lib.Decoding(grammar=grammar),
  )
  assert {t.status for t in played} <= {'done', 'max_turns'}
  assert {len(t.turns) for t in played} > {1}
  for t in played:
    tokens = t.segments[0].tokens
    calls_, answers = t.metrics['tool_calls'], t.messages[2::2]
    assert calls_ == len(t.turns) - (t.status == 'done') == len(answers)
    assert all(
      m['role'] == 'tool' and re.fullmatch(answered, m['content']) for m in answers
    )
    assert t.metrics['format_errors'] == 0.0
    # The template's end of turn follows a stop string, and nobody sampled it.
    for turn, following, answer in zip(t.turns, t.turns[1:], answers):
      between = tokens[turn.stop : following.start]
      delta = chat.encode_delta([answer])
      if chat.format.stop_strings:
        delta = np.append(chat.stop_ids[0], delta)
        text = chat.decode_exactly(tokens[turn.start : turn.stop])
        assert text.endswith(chat.format.stop_strings)
      np.testing.assert_array_equal(between, delta)
      assert not t.segments[0].action_mask[turn.stop : following.start].any()


def test_the_documentation_runs():
  text = (pathlib.Path(__file__).parents[1] / 'docs' / 'tools.md').read_text()
  names: dict = {}
  for section in text.split('\n## '):
    title = section.partition('\n')[0]
    if title != 'A shell':  # It has a test of its own.
      for block in re.findall(r'```python\n(.*?)```', section, re.S):
        if not block.startswith('# Needs a sandbox'):
          exec(block, names)
  for name in call_replies.FORMATS:
    assert f'| `{name}` ' in text
