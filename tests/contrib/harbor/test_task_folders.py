"""Folders of tasks: what is read of them, and what cannot be played."""

import os

import directory_tasks
import pytest

from agent_r1_jax.contrib.harbor import directories, task_folders

REFUSED = {
  'no TOML': ({'task.toml': 'x = ['}, 'task.toml: it is no TOML'),
  'deep TOML': ({'task.toml': 'x = ' + '[' * 20_000}, 'task.toml: it is no TOML'),
  'no table': ({'task.toml': 'agent = 3'}, r'agent is 3; make it a table'),
  'a text': ({'task.toml': '[agent]\ntimeout_sec = "9"'}, 'agent.timeout_sec is '),
  'a truth': ({'task.toml': '[agent]\ntimeout_sec = true'}, 'agent.timeout_sec is '),
  'NaN': ({'task.toml': '[verifier]\ntimeout_sec = nan'}, 'verifier.timeout_sec is nan'),
  'for ever': ({'task.toml': '[verifier]\ntimeout_sec = inf'}, 'at most 86400'),
  'an image': ({'task.toml': '[environment]\ndocker_image = "x"'}, 'docker_image is set'),
  'a GPU': ({'task.toml': '[environment]\ngpus = 1'}, 'environment.gpus is set'),
  'steps': ({'task.toml': '[[steps]]\nname = "a"'}, 'steps is set, which needs more'),
  'keys': ({'task.toml': '[verifier]\nenv = {A = "b"}'}, 'verifier.env is set'),
  'no prompt': ({'instruction.md': ' \n'}, 'instruction.md: it is missing or empty'),
  'no tests': ({'tests/test.sh': None}, 'tests/test.sh: it is missing or empty'),
  'compose': ({'environment/compose.yaml': 'x'}, 'compose.yaml: there are no containers'),
  'too large': ({'environment/x': 'x' * (1 << 22)}, 'at most 2000 files and 4 MiB'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_be_played_is_refused(tmp_path, name):
  changes, match = REFUSED[name]
  directory_tasks.write(tmp_path / 'x', changes)
  with pytest.raises(ValueError, match=f'1 tasks cannot be played:\n.*{match}'):
    directories.load(tmp_path)


LINES = {
  'FROM alpine': 'the image is another one',
  'FROM python:3-slim\nFROM python:3-slim': 'line 2: .*: the image is another one',
  'FROM python:3.5': 'the Python here is 3',
  'RUN apt-get update': "line 1: 'RUN apt-get update': a command would have to be run",
  'RUN pip install pytest && rm x': '&& is not installed',
  'RUN pip install pytest==0.1': r'pytest==0.1 is not installed here \([1-9]',
  'RUN pip install no-such-package-x': 'is not installed here .in no version',
  'RUN \\\n  pip install': 'line 1: ',
  'ENV A=b': 'ENV is not among what can be done',
  'USER me': 'USER is not among',
  'COPY --from=x a /app/': 'flags, variables',
  'COPY $X /app/': 'flags, variables',
  'COPY nothing /app/': 'nothing is not in environment/',
  'COPY ../task.toml /app/': 'task.toml is not in environment/',
  'COPY in.txt': 'it has 1 words',
  'COPY in.txt /etc/passwd': "would be among the system's files",
  'COPY in.txt /tests/x': 'the layout has its own files',
  'COPY in.txt /app/../../usr/bin/sh': "would be among the system's files",
  'WORKDIR /usr/lib': "would be among the system's files",
  'WORKDIR': 'it has 0 words',
  'COPY "in.txt /app/': 'No closing quotation',
  'COPY in.txt /data/x': 'a line such as WORKDIR /app is missing',
}  # fmt: skip


@pytest.mark.parametrize('lines', LINES)
def test_a_dockerfile_that_needs_an_image_is_refused_by_its_line(tmp_path, lines):
  folder = directory_tasks.write(tmp_path, {'environment/Dockerfile': lines})
  with pytest.raises(ValueError, match=LINES[lines]):
    task_folders.read(folder)


def test_what_copy_makes(tmp_path):
  folder = directory_tasks.write(
    tmp_path,
    {
      'environment/Dockerfile': (
        'FROM debian\nWORKDIR /usr/src/x\nCOPY in.txt a\nCOPY in.txt ./b/\n'
        'COPY more/deep deep\nCOPY in.txt more/deep/where.sh deep\nWORKDIR sub\n'
        'COPY more .\n'
      )
    },
  )
  read = task_folders.read(folder)
  names = ('a', 'b/in.txt', 'deep/where.sh', 'deep/in.txt', 'sub/deep/where.sh')
  assert {*read.files} == {f'/usr/src/x/{name}' for name in names}
  assert read.workdir == '/usr/src/x/sub' and '/usr/src' in read.places


def test_links_and_what_is_no_file_are_refused(tmp_path):
  for name, make in {
    'file': lambda path: path.symlink_to('/etc/passwd'),
    'folder': lambda path: path.symlink_to('/etc'),
    'pipe': lambda path: os.mkfifo(path),
  }.items():
    folder = directory_tasks.write(tmp_path / name)
    make(folder / 'environment' / 'x')
    with pytest.raises(ValueError, match=r'x: it is a link or no regular file'):
      task_folders.read(folder)
  (tmp_path / 'linked').symlink_to(directory_tasks.write(tmp_path / 'real'))
  with pytest.raises(ValueError, match='linked: it is a link; copy the folder'):
    task_folders.read(tmp_path / 'linked')
  with pytest.raises(ValueError, match='neither it nor a folder in it'):
    directories.load(tmp_path / 'file' / 'environment')


def test_a_dockerfile_of_very_many_lines_is_read():
  """In a time that is proportional to its length."""
  lines = ['RUN pip install \\', *['  a \\'] * 200_000, '', '# b', '  c', 'CMD d']
  (number, run), last = task_folders._split_lines('\n'.join(lines))
  assert number == 1 and run == f'RUN pip install {"a " * 200_000}c'
  assert last == (200_005, 'CMD d')
