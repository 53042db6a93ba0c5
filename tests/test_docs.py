"""The site is built without a warning, loads nothing from a network; its code runs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The built pages; the builder checks links and anchors (mkdocs.yml: strict)."""
  folder = tmp_path_factory.mktemp('site')
  done = subprocess.run(
    [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(folder)],
    cwd=ROOT,
    env=os.environ | {'NO_MKDOCS_2_WARNING': '1', 'COLUMNS': '200'},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  return folder


def test_pages_load_nothing_from_a_network(site):
  pages = list(site.rglob('*.html'))
  assert len(pages) > 25
  for page in pages:
    text = page.read_text()
    loads = re.findall(r'(?:src|srcset)="(https?:[^"]*)"', text)
    loads += re.findall(r'<link (?!rel="canonical")[^>]*href="(https?:[^"]*)"', text)
    assert not loads, (page, loads)


def test_the_api_has_the_docstrings(site):
  assert 'id="agent_r1_jax.train.loop.run"' in (site / 'api/train.html').read_text()
  assert 'made if missing' in (site / 'api/train.html').read_text()


def test_no_page_is_left_out_of_the_table_of_contents():
  nav = (ROOT / 'mkdocs.yml').read_text()
  for page in (ROOT / 'docs').rglob('*.md'):
    assert str(page.relative_to(ROOT / 'docs')) in nav, page


def _anchors(page):
  """The anchors that GitHub and the site give to the headings of a page."""
  headings = re.findall(r'^#+ (.*)$', page.read_text(), re.MULTILINE)
  return {re.sub(r'[^\w -]', '', title).lower().replace(' ', '-') for title in headings}


@pytest.mark.parametrize(
  'path',
  [
    *('README.md', 'WORKSPACE.md', 'CONTRIBUTING.md', 'CHANGELOG.md'),
    *('AGENTS.md', 'SECURITY.md'),
  ],
)
def test_links_of_the_pages_outside_lead_somewhere(path):
  links = re.findall(r'\]\(([^)#:]*)(?:#([^)]*))?\)', (ROOT / path).read_text())
  assert links
  for target, anchor in links:
    page = ROOT / (target or path)
    assert page.exists(), target
    assert not anchor or anchor in _anchors(page), (target, anchor)


def test_the_site_shows_contributed_pages(site):
  guides = sorted(ROOT.glob('agent_r1_jax/contrib/*/guide.md'))
  assert guides
  for guide in guides:
    assert (site / f'contrib/{guide.parent.name}/guide.html').exists(), guide


def test_files_that_pages_name_exist():
  """Such as `rl/losses.py` or `test_env.py`; other names are those of a user's files."""
  contrib = ROOT / 'agent_r1_jax/contrib'
  for page in [*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'), *contrib.rglob('*.md')]:
    if page.name == 'CHANGELOG.md':
      continue
    for name in re.findall(r'`([\w./]+\.py)`', page.read_text()):
      if '/' in name or name.startswith('test_'):
        places = (ROOT, ROOT / 'agent_r1_jax', ROOT / 'tests', page.parent)
        assert any((place / name).exists() for place in places), (page, name)


def test_every_page_opens_with_a_sentence_that_says_what_it_is_for():
  """Not a table, code or a list; and short enough to be read."""
  guides = ROOT.glob('agent_r1_jax/contrib/*/guide.md')
  for page in [*ROOT.glob('docs/*.md'), *guides]:
    _, opening, *_ = page.read_text().split('\n\n')
    first = re.match(r'[A-Z].*?[.:;](?=\s|$)', opening, re.DOTALL)
    assert first and len(first[0].split()) <= 35, (page, opening)


def test_the_table_of_defaults_is_true():
  after = (ROOT / 'docs/quickstart.md').read_text().partition('\n## Defaults')[2]
  table = after.partition('\n## ')[0]
  rows = re.findall(r'\| `([\w.]+)` \| (\S+) \|$', table, re.MULTILINE)
  assert len(rows) > 15
  for name, value in rows:
    assert str(fields.get(config_lib.Config(), name)) == value, name


def test_all_fields_are_listed_in_their_page(site):
  page = (site / 'api/fields.html').read_text()
  rows = re.findall(r'<tr>\s*<td><code>([\w.]+)</code></td>', page)
  assert rows == [*fields.names(config_lib.Config)]


def test_the_tutorials_run():
  """Blocks that begin with '# Needs' are left out: a sandbox, or other libraries."""
  names: dict = {}
  text = (ROOT / 'docs/tutorials.md').read_text()
  blocks = re.findall(r'^```python\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
  run = [block for block in blocks if not block.startswith('# Needs')]
  assert len(run) >= 2
  for block in run:
    exec(block, names)
