"""The lists of requirements agree with each other and with the rules."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]


def requirements(name: str) -> list[str]:
  lines = (line.split(' #')[0].strip() for line in (ROOT / name).read_text().splitlines())
  return [line for line in lines if line and not line.startswith('#')]


def test_every_requirement_is_pinned_and_says_what_for():
  for name in ('requirements.txt', 'requirements-test.txt'):
    for line in (ROOT / name).read_text().splitlines():
      if not line.startswith('#'):
        assert re.match(
          r'[\w.-]+==[\w.]+(; python_version [<>=]+ "3.12")? +# \w', line
        ), line


def test_extras_agree_with_the_files():
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project'][
    'optional-dependencies'
  ]
  assert extras['test'] == requirements('requirements-test.txt')
  jax = [line for line in requirements('requirements.txt') if line.startswith('jax==')]
  assert len(jax) == 2
  for extra in ('cuda', 'tpu'):
    plain = [re.sub(r'\[.*\]', '', line).replace("'", '"') for line in extras[extra]]
    assert plain == jax, extra
