"""What others write cannot control the terminal that shows it."""

import re
import unicodedata

import script as script_lib

from agent_r1_jax.checks import doctor
from agent_r1_jax.host import terminal

ATTACK = '\x1b]52;c;eA==\x07'


def test_control_characters_are_shown_as_pictures():
  plain = ''.join(map(chr, [9, 10, *range(32, 127), *range(160, 800)])) + '␛漢🙂'
  assert terminal.printable(plain) == plain
  assert terminal.printable(ATTACK + '\0\r\x7f\x9b') == '␛]52;c;eA==␇␀␍␡\ufffd'
  assert terminal.printable('é\x1b\ud800', 'ascii') == '???'
  codes = [code for code in range(0x110000) if chr(code) not in '\n\t']
  shown = terminal.printable(''.join(map(chr, codes)))
  assert not re.search(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]', shown)
  assert shown.splitlines() == [shown]


def test_no_mark_changes_the_order_in_which_text_is_shown():
  assert terminal.printable('safe \u202egpj.exe\u2066') == 'safe \ufffdgpj.exe\ufffd'
  marks = {'LRE', 'RLE', 'LRO', 'RLO', 'PDF', 'LRI', 'RLI', 'FSI', 'PDI', 'B', 'WS'}
  for char in map(chr, range(0x110000)):
    if unicodedata.bidirectional(char) in marks and not char.isspace():
      assert terminal.printable(char) == '\ufffd', hex(ord(char))
  assert terminal.printable('\u061c\u200e\u200f') == 3 * '\ufffd'


_LOGS = """
import logging, sys, warnings
from agent_r1_jax.host import runtime
for _ in range(2): runtime.quiet_logging()
logging.warning('close failed: %s', sys.argv[1])
warnings.warn('skipped: ' + sys.argv[1])
raise RuntimeError('the answer is ' + sys.argv[1])
"""


def test_logs_warnings_and_a_scripts_last_error_show_no_control_character():
  run = script_lib.run('-c', _LOGS, ATTACK)
  assert run.returncode == 1 and '\x1b' not in run.stderr and '\x07' not in run.stderr
  for text in ('close failed', 'skipped', 'the answer is'):
    assert re.search(f'{text}:? ␛]52;c;eA==␇', run.stderr), run.stderr


def test_findings_of_the_doctor_show_no_control_character(capsys):
  doctor.show([doctor.Finding('environment', 'fail', f'reset: {ATTACK}', ATTACK)])
  shown = capsys.readouterr().out
  assert shown.count('␛]52;c;eA==␇') == 2 and '\x1b' not in shown


_CHAT = """
import asyncio, sys
from agent_r1_jax import config
from agent_r1_jax.agent import tool
from experiments import chat
@tool.tool
def look() -> str:
  "Looks."
  return sys.argv[1]
class Conversation(chat.Conversation):
  async def _reply(self, messages):
    chat._write(sys.argv[1])
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    return call if messages[-1]['role'] == 'user' else 'Done.'
asyncio.run(Conversation(None, None, [look], config.Config()).ask('What?'))
"""


def test_a_chat_shows_no_control_character():
  run = script_lib.run('-c', _CHAT, ATTACK)
  assert run.returncode == 0, run.stderr
  assert run.stdout.count('␛]52;c;eA==␇') == 3, run.stdout
  text = re.sub(r'\x1b\[[02]m', '', run.stdout)
  assert '\x1b' not in text and '\x07' not in text
