"""A task in a folder, with the changes that a test asks for."""

# The agent has to write 42 into /app/out.txt; half of it is worth a half.
FILES = {
  'task.toml': '[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 20.0\n',
  'instruction.md': 'Write the number of `/app/in.txt` to `/app/out.txt`.\n',
  'environment/Dockerfile': (
    '# A comment.\nFROM python:3-slim\nRUN pip install --no-cache-dir \\\n  pytest\n'
    'WORKDIR /app\nCOPY in.txt .\nCOPY more /data/\nCMD ["bash"]\n'
  ),
  'environment/in.txt': '42\n',
  'environment/more/deep/where.sh': '#!/bin/sh\necho /data/deep is $(pwd)\n',
  'tests/test.sh': '#!/bin/bash\npython3 /tests/grade.py > /logs/verifier/reward.txt\n',
  'tests/grade.py': (
    'import pathlib\n'
    "path = pathlib.Path('/app/out.txt')\n"
    "text = path.read_text() if path.is_file() else ''\n"
    "print({'42': 1, '21': .5}.get(text.strip(), 0))\n"
  ),
  'solution/solve.sh': 'cat /app/in.txt > /app/out.txt\n',
}
SOLVE = 'echo 42 > /app/out.txt'


def write(folder, changes=None):
  """Writes the task with changed files, where None removes one; returns its folder."""
  for name, text in (FILES | (changes or {})).items():
    if text is not None:
      path = folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
  return folder
