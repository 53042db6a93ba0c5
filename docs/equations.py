"""Makes MathML of blocks of TeX when the site is built, so that pages need no script."""

from latex2mathml import converter


def on_config(config):
  """Adds the block ```math, which GitHub shows as an equation too."""
  fence = {'name': 'math', 'class': 'math', 'format': _convert}
  config.mdx_configs['pymdownx.superfences'] = {'custom_fences': [fence]}
  return config


def _convert(source: str, *_, **__) -> str:
  return f'<div class="math">{converter.convert(source, display="block")}</div>'
