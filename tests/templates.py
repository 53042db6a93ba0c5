"""Chat templates in the forms that the families publish, written anew and small.

What matters is in them: the control tokens of a turn, the roles that are known, what is
left out or refused, and what a turn derives from earlier messages.
"""

import json

import tiny

from agent_r1_jax.agent import tokenizer as tokenizer_lib
from experiments import train_tokenizer

_LLAMA = """\
{{- bos_token }}{% set h = '<|start_header_id|>' %}{% set e = '<|end_header_id|>\n\n' %}
{%- if date_string is not defined %}
{%- set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- set first = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}
{{- h + 'system' + e + ('Environment: ipython\n' if tools else '') }}
{{- 'Today Date: ' + date_string + '\n\n' + first + '<|eot_id|>' }}
{%- if tools %}
{{- h + 'user' + e + 'Respond in the format {"name": ..., "parameters": ...}.\n\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}
{{- messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('single tool-calls only') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- h + 'assistant' + e + '{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{ h + 'ipython' + e + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ h + m.role + e + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ h + 'assistant' + e }}{% endif %}
"""

_MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set loop_messages = messages[1:] if system is not none else messages %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(i=0) %}
{%- for m in loop_messages if m.role != 'tool' and m.tool_calls is not defined %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}
{{- raise_exception('conversation roles must alternate user/assistant') }}{% endif %}
{%- set ns.i = ns.i + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}
{{- '[AVAILABLE_TOOLS]SP' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]SP' + (system + '\n\n' if loop.last and system is not none else '') }}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}{{ '[TOOL_CALLS]SP[' }}
{%- for c in m.tool_calls %}
{%- if c.id is not defined or c.id | length != 9 %}
{{- raise_exception('ids of 9') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}
{{- ']' if loop.last else ', ' }}
{%- endfor %}{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ 'SP' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS]SP{"content": ' + m.content | string + ', "call_id": "' }}
{{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}
"""

_SMOLLM3 = """\
{%- set mode = '/think' if enable_thinking | default(true) else '/no_think' %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if '/no_think' in system %}{% set mode = '/no_think' %}
{%- elif '/think' in system %}{% set mode = '/think' %}{% endif %}
{{- '<|im_start|>system\nToday Date: ' + strftime_now('%d %B %Y') }}
{{- '\nReasoning Mode: ' + mode + '\n\n' }}
{{- system.replace('/no_think', '').replace('/think', '').rstrip() + '\n\n' }}
{%- if tools %}{{ '### Tools\n\n<tools>\n' }}
{%- for t in tools %}{{ t | string + '\n' }}{% endfor %}
{{- '</tools>\n\nWithin XML tags:\n<tool_call>\n{"name": <n>, "arguments": <a>}\n' }}
{{- '</tool_call>\n\n<|im_end|>\n' }}{% endif %}
{%- set empty = '' if mode == '/think' else '<think>\n\n</think>\n' %}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'tool' %}
{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + empty + m.content.lstrip('\n') + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + empty }}{% endif %}
"""

_PHI4 = """\
{%- for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""

PHI3 = """\
{%- for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}
{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
"""

_OLMO2 = """\
{{- bos_token }}{% for m in messages %}
{%- if m.role in ['system', 'user'] %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\n' + m.content + eos_token + ('' if loop.last else '\n') }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
{%- endfor %}
"""

_OLMO3 = """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\nYou have no functions. <functions></functions><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role in ['system', 'user', 'environment'] %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + (m.content or '') }}
{{- eos_token if loop.last else '<|im_end|>\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
{%- endfor %}
"""

_GEMMA = """\
{{- bos_token }}{% set first = '' %}
{%- if messages[0].role == 'system' %}SYSTEM{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

_HARMONY = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if first or tools %}{{ '<|start|>developer<|message|>' + first }}
{%- for t in tools or [] %}{% set f = t.function %}
{{- '\n// ' + f.description + '\ntype ' + f.name + ' = ' + f.parameters | tojson }}
{%- endfor %}{{ '<|end|>' }}{% endif %}
{%- set ns = namespace(name=none) %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('channels') }}{% endif %}
{%- if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}
{%- endif %}
{%- set thought = m.content or m.thinking %}{% set f = m.tool_calls[0].function %}
{%- if thought %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json' }}
{{- '<|message|>' + f.arguments | tojson + '<|call|>' }}{% set ns.name = f.name %}
{%- else %}{% set last = loop.last and not add_generation_prompt %}
{%- if last and m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if last else '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{%- if ns.name is none %}{{ raise_exception('no call') }}{% endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary' }}
{{- '<|message|>' + m.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

_QWEN35 = """\
{%- set first = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if tools %}{{ '<|im_start|>system\n# Tools\n\n<tools>' }}
{%- for t in tools %}{{ '\n' + t | tojson }}{% endfor %}
{{- '\n</tools>\n\n<tool_call>\n<function=name>\n<parameter=of>\nvalue\n</parameter>' }}
{{- '\n</function>\n</tool_call>' + ('\n\n' + first if first else '') + '<|im_end|>\n' }}
{%- elif first %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}
{%- else %}{{ raise_exception('No user query found in messages.') }}{% endfor %}
{%- for m in messages %}{% set content = (m.content or '') | trim %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\n' + thought | trim + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for c in m.tool_calls or [] %}
{{- '\n\n' if loop.first and content else '' if loop.first else '\n' }}
{{- '<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for key, x in c.function.arguments | items %}
{%- set y = x | tojson if x is mapping or (x is sequence and x is not string) else x %}
{{- '<parameter=' + key + '>\n' + y | string }}
{{- '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}
{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif not loop.first %}{{ raise_exception('System message must be first.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{{- '<think>\n' if enable_thinking | default(true) else '<think>\n\n</think>\n\n' }}
{%- endif %}
"""

_GEMMA4 = """\
{%- macro say(x) %}{% if x is string %}{{ '<|"|>' + x + '<|"|>' }}
{%- elif x is boolean %}{{ 'true' if x else 'false' }}
{%- elif x is mapping %}{{ '{' }}{% for key, y in x | dictsort %}
{{- key + ':' + say(y) + (',' if not loop.last else '') }}{% endfor %}{{ '}' }}
{%- elif x is sequence %}[{% for y in x %}{{ say(y) + (',' if not loop.last else '') }}
{%- endfor %}]{% else %}{{ x }}{% endif %}{% endmacro %}
{{- bos_token }}{% set thinks = enable_thinking | default(false) %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if thinks or tools or system %}
{{- '<|turn>system\n' + ('<|think|>\n' if thinks else '') + system }}
{%- for t in tools or [] %}{{ '<|tool>declaration:' + t.function.name }}
{{- say({'description': t.function.description, 'parameters': t.function.parameters}) }}
{{- '<tool|>' }}{% endfor %}{{ '<turn|>\n' }}{% endif %}
{%- set ns = namespace(last=none, spoke=none, asked=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.asked = messages.index(m) %}
{%- endfor %}
{%- for m in messages if m.role not in ['system', 'tool'] %}{% set ns.last = none %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{%- if not (role == 'model' and ns.spoke == 'model') %}{{ '<|turn>' + role + '\n' }}
{%- endif %}{% set ns.spoke = role %}{% set at = messages.index(m) %}
{%- if m.reasoning_content and m.tool_calls and at > ns.asked %}
{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}
{%- for c in m.tool_calls or [] %}{% set ns.last = 'call' %}
{{- '<|tool_call>call:' + c.function.name }}
{{- say(c.function.arguments) if c.function.arguments is mapping
    else '{' + c.function.arguments + '}' }}{{ '<tool_call|>' }}{% endfor %}
{%- set scan = namespace(open=m.tool_calls) %}
{%- for a in messages[at + 1:] %}{% if a.role != 'tool' %}{% set scan.open = false %}
{%- elif scan.open %}{% set who = namespace(name=a.name | default('unknown')) %}
{%- for c in m.tool_calls if c.id == a.tool_call_id %}
{%- set who.name = c.function.name %}{% endfor %}{% set ns.last = 'answer' %}
{%- set said = namespace(text=a.content, seen='') %}
{%- if a.content is not string %}{% set said.text = '' %}{% for p in a.content %}
{%- if p.type == 'image' %}{% set said.seen = said.seen + '<|image|>' %}
{%- else %}{% set said.text = said.text + p.text %}{% endif %}{% endfor %}{% endif %}
{{- '<|tool_response>response:' + who.name + '{value:' + say(said.text) + '}' }}
{{- '<tool_response|>' + said.seen }}{% endif %}{% endfor %}
{%- if m.content is string %}{{ m.content | trim }}
{%- else %}{% for p in m.content or [] %}
{{- '<|image|>' if p.type == 'image' else p.text | trim }}{% endfor %}{% endif %}
{%- if ns.last == 'call' %}{{ '<|tool_response>' }}
{%- elif ns.last != 'answer' or m.content | trim %}{{ '<turn|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.last is none %}{{ '<|turn>model\n' }}
{{- '' if thinks else '<|channel>thought\n<channel|>' }}{% endif %}
"""

_QWEN_VL = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_QWEN3_VL = """\
{%- set first = messages[0].content if messages[0].role == 'system' else none %}
{%- if tools %}{{ '<|im_start|>system\n' + (first + '\n\n' if first is string else '') }}
{{- '# Tools\n\n<tools>' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}
{{- '\n</tools>\n\n<tool_call>\n{"name": ...}\n</tool_call><|im_end|>\n' }}
{%- elif first is string %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- '\n' if m.content or not loop.first else '' }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string
    else c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_GEMMA_TOKENS = ('<bos>', '<start_of_turn>', '<end_of_turn>')
_GEMMA4_TOKENS = ('<bos>', '<|turn>', '<turn|>', '<|think|>', '<|channel>', '<channel|>')
_GEMMA4_TOKENS += ('<|tool>', '<tool|>', '<|tool_call>', '<tool_call|>', '<|"|>')
_GEMMA4_TOKENS += ('<|tool_response>', '<tool_response|>')
_GEMMA4_TOKENS += ('<|image>', '<|image|>', '<image|>')
_MISTRAL_TOKENS = ('[INST]', '[/INST]', '[TOOL_CALLS]', '[AVAILABLE_TOOLS]')
_MISTRAL_TOKENS += (
  '[/AVAILABLE_TOOLS]',
  '[TOOL_RESULTS]',
  '[/TOOL_RESULTS]',
  '<s>',
  '</s>',
)
_LLAMA_TOKENS = ('<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>', '<|begin|>')
_HARMONY_TOKENS = ('<|start|>', '<|end|>', '<|message|>', '<|channel|>', '<|constrain|>')
_HARMONY_TOKENS += ('<|return|>', '<|call|>')
_QWEN35_TOKENS = ('<think>', '</think>', '<tool_call>', '</tool_call>')
_QWEN35_TOKENS += ('<tool_response>', '</tool_response>')
_PICTURES = ('<|vision_start|>', '<|vision_end|>', '<|image_pad|>')
_REFUSES = "{{ raise_exception('System role not supported') }}"
_BEFORE_FIRST = (
  "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
)

# Template, control tokens, and the tokens that begin a text and end a turn.
TEMPLATES = {
  'llama3.2': (_LLAMA, _LLAMA_TOKENS, '<|begin|>', '<|eot_id|>'),
  'mistral-v0.3': (_MISTRAL.replace('SP', ' '), _MISTRAL_TOKENS, '<s>', '</s>'),
  'nemo': (_MISTRAL.replace('SP', ''), _MISTRAL_TOKENS, '<s>', '</s>'),
  'smollm3': (_SMOLLM3, (), None, '<|im_end|>'),
  'phi4': (_PHI4, ('<|im_sep|>',), None, '<|im_end|>'),
  'phi3': (PHI3, ('<|system|>', '<|user|>', '<|assistant|>', '<|end|>'), None, '<|end|>'),
  'olmo2': (_OLMO2, (), '<|endoftext|>', '<|endoftext|>'),
  'olmo3': (_OLMO3, (), None, '<|endoftext|>'),
  'gemma2': (_GEMMA.replace('SYSTEM', _REFUSES), _GEMMA_TOKENS, '<bos>', '<end_of_turn>'),
  'gemma3': (
    _GEMMA.replace('SYSTEM', _BEFORE_FIRST),
    _GEMMA_TOKENS,
    '<bos>',
    '<end_of_turn>',
  ),
  'gemma4': (_GEMMA4, _GEMMA4_TOKENS, '<bos>', '<turn|>'),
  'gpt-oss': (_HARMONY, _HARMONY_TOKENS, None, '<|return|>'),
  'qwen3.5': (_QWEN35, _QWEN35_TOKENS, None, '<|im_end|>'),
  'qwen2.5-vl': (_QWEN_VL, _PICTURES, None, '<|im_end|>'),
  'qwen3-vl': (_QWEN3_VL, _PICTURES + _QWEN35_TOKENS[2:], None, '<|im_end|>'),
}


def load(name: str, directory):
  """Makes a small tokenizer with the template of a family."""
  template, control, bos, eos = TEMPLATES[name]
  train_tokenizer.train(
    tiny.TEXTS,
    vocab_size=tiny.VOCAB,
    directory=directory,
    chat_template=template,
    more_tokens=control,
  )
  path = directory / 'tokenizer_config.json'
  config = json.loads(path.read_text()) | {'eos_token': eos}
  config |= {'bos_token': bos} if bos else {}
  path.write_text(json.dumps(config))
  return tokenizer_lib.load(directory)
