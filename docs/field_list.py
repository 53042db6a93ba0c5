"""Writes the list of the configuration's fields into its page."""

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields


def on_page_markdown(markdown, *, page, **_):
  """Adds a table of the fields of each part to api/fields.md."""
  if page.file.src_uri != 'api/fields.md':
    return markdown
  lines, part = [markdown], None
  for line in fields.explain(config_lib.Config()):
    name, _, rest = line.partition('=')
    value, _, meaning = rest.partition(': ')
    if (room := name.rpartition('.')[0] or 'run') != part:
      part = room
      lines += [f'\n## {part}\n', '| field | default | meaning |', '| --- | --- | --- |']
    lines.append(f'| `{name}` | `{value}` | {meaning.replace("|", "&#124;")} |')
  return '\n'.join(lines) + '\n'
