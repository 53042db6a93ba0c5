"""What pyproject.toml cannot say: a wheel holds the scripts inside of the package.

experiments/ and third_party/ become agent_r1_jax/scripts/experiments and so on, where
`agent-r1-jax NAME` finds them; at the top of site-packages they would hide a user's own.
"""

import setuptools

INSIDE = 'agent_r1_jax.scripts'
folders = setuptools.find_namespace_packages(
  include=['experiments', 'experiments.*', 'third_party']
)
setuptools.setup(
  packages=[
    *setuptools.find_packages(include=['agent_r1_jax*']),
    *(f'{INSIDE}.{folder}' for folder in folders),
  ],
  package_dir={f'{INSIDE}.{folder}': folder.replace('.', '/') for folder in folders},
)
