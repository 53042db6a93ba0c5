"""Reads docstrings for the API pages as they are written here."""

import re
import textwrap

import griffe


class Docstrings(griffe.Extension):
  """Takes comments above fields as docstrings, and marks examples as code."""

  def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
    """Gives a field of a class without docstring the comment above it."""
    if (
      attr.docstring or attr.lineno is None or not (attr.parent and attr.parent.is_class)
    ):
      return
    lines = attr.lines_collection[attr.filepath]
    comment: list[str] = []
    for line in reversed(lines[: attr.lineno - 1]):
      text = line.strip()
      if not text.startswith('#'):
        break
      comment.insert(0, text.lstrip('# '))
    if comment:
      attr.docstring = griffe.Docstring('\n'.join(comment), parent=attr)

  def on_instance(self, *, obj: griffe.Object, **_) -> None:
    """Indents examples, two spaces after an empty line, by the four of Markdown."""
    if obj.docstring:
      parts = re.split(r'(\n\n+)', obj.docstring.value)
      parts = [textwrap.indent(p, '  ') if p[:2] == '  ' else p for p in parts]
      obj.docstring.value = ''.join(parts)
