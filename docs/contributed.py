"""Shows the pages of contributed folders in the site, though they lie outside docs/."""

import pathlib
import posixpath
import re

from mkdocs.structure import files as files_lib

_CONTRIB = 'agent_r1_jax/contrib'
_FOLDER = pathlib.Path(__file__).parents[1] / _CONTRIB


def on_config(config):
  """Adds a section with the README and the guide of each folder to the contents."""
  section: list = ['contrib/README.md']
  for readme in sorted(_FOLDER.glob('*/README.md')):
    pages = [page for page in (readme, readme.with_name('guide.md')) if page.exists()]
    section.append({readme.parent.name: [_site_path(page) for page in pages]})
  config.nav.append({'Contributed': section})
  return config


def on_files(files, config):
  """Adds the pages, as if they lay in docs/contrib."""
  for page in sorted([*_FOLDER.glob('*.md'), *_FOLDER.glob('*/*.md')]):
    path = _site_path(page)
    files.append(files_lib.File.generated(config, path, abs_src_path=str(page)))
  return files


def on_page_markdown(markdown, *, page, **_):
  """Turns links between the two places, which are right on GitHub, into the site's."""
  here = page.file.src_uri
  # In the search, what a page says comes before signatures and measurements.
  if here.startswith(('api/', 'results/', 'contrib/')):
    page.meta.setdefault('search', {'boost': 0.2})
  source = f'agent_r1_jax/{here}' if here.startswith('contrib/') else f'docs/{here}'

  def rewrite(match):
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
    for prefix, place in ((f'{_CONTRIB}/', 'contrib/'), ('docs/', '')):
      if target.startswith(prefix):
        path = posixpath.relpath(place + target[len(prefix) :], posixpath.dirname(here))
        return f']({path}{match[2]})'
    return match[0]

  return re.sub(r'\]\(([^)#:\s]+\.md)(#[^)\s]*|)\)', rewrite, markdown)


def _site_path(page: pathlib.Path) -> str:
  return f'contrib/{page.relative_to(_FOLDER).as_posix()}'
