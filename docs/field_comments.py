"""Shows the comment above a field of a class as the field's docstring in the API pages."""

import griffe


class FieldComments(griffe.Extension):
  """Reads the lines of comments that end above a field."""

  def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
    """Gives a field without docstring the comment above it."""
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
