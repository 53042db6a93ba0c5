"""Settings of chats and of episodes."""

import dataclasses
import datetime

from agent_r1_jax import fields

# Those of agent/call_formats.py, and 'auto'.
TOOL_FORMATS = (
  'auto',
  'hermes',
  'qwen3_coder',
  'mistral',
  'llama3',
  'search_r1',
  'retool',
  'react',
)


@dataclasses.dataclass
class Chat:
  """How tasks and tools become the text that the policy reads.

  Attributes:
    max_tool_tokens: The most tokens of a tool's message; longer ones are cut.
    tools_in_prompt: What describes the tools to the model: with 'default' its chat
      template, or if that supports none in the format, a text in the system message;
      'refuse' refuses such a template; with 'own' the tasks' own messages do.
    tool_format: How the model writes tool calls: 'auto' is as its chat template does, or
      'hermes' if that shows no known format. The others are in docs/tools.md.
    long_prompts: What happens to tasks whose prompt leaves no room for a reply: 'refuse'
      ends the run before it begins; 'skip' leaves them out of training, and evaluations
      count them as unanswered.
    stop_strings: Strings that end a reply, like the template's end of turn, as a JSON
      list: '["Observation:"]'.
    template: Options of the chat template, as a JSON object:
      '{"enable_thinking": false}'.
    date: The day that templates write, such as '2026-11-27'; '' is the day on which the
      run begins, and stays that when it is resumed.
  """

  max_tool_tokens: int = 1024
  tools_in_prompt: str = 'default'
  tool_format: str = 'auto'
  long_prompts: str = 'refuse'
  stop_strings: str = '[]'
  template: str = '{}'
  date: str = ''

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.parse_json('chat.stop_strings', self.stop_strings, list)
    fields.parse_json('chat.template', self.template, dict)
    choices = {
      'tools_in_prompt': ('default', 'refuse', 'own'),
      'tool_format': TOOL_FORMATS,
      'long_prompts': ('refuse', 'skip'),
    }
    fields.check(self, 'chat', at_least_1=('max_tool_tokens',), choices=choices)
    try:
      datetime.date.fromisoformat(self.date or '2026-11-27')
    except ValueError:
      text = f"chat.date is {self.date!r}; give a day such as '2026-11-27', or ''."
      raise ValueError(text) from None


@dataclasses.dataclass
class Limits:
  """The budgets of one episode.

  Attributes:
    max_turns: The most replies of an episode.
    max_turn_tokens: The most tokens of a reply.
    reset_seconds: The most seconds of the environment's reset, and of make_env.
    step_seconds: The most seconds of each step of the environment, tools and rewards
      included.
    close_seconds: The most seconds of the environment's close.
    episode_seconds: The most seconds of an episode, its time in the engine included. Late
      episodes are masked as errors.
  """

  max_turns: int = 5
  max_turn_tokens: int = 1024
  reset_seconds: float = 60.0
  step_seconds: float = 300.0
  close_seconds: float = 10.0
  episode_seconds: float = 3600.0

  def check(self) -> None:
    """Raises ValueError for a wrong value; the message names the field."""
    fields.check(
      self,
      'limits',
      at_least_1=('max_turns', 'max_turn_tokens'),
      above_0=('reset_seconds', 'step_seconds', 'close_seconds', 'episode_seconds'),
    )
