"""The shell: what a session gives, its tool, and the machines that cannot confine it."""

import asyncio
import functools
import os
import pathlib
import re
import threading

import confined
import pytest

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.tools import sandbox, shell

needs_shell, layers = confined.needs_shell, confined.layers
open_session = confined.open_session
# A command that must end does so in far less; it only guards against hanging.
SECONDS = 60.0


@pytest.mark.usefixtures('needs_shell')
class TestSession:
  """What a session gives."""

  def test_files_and_the_directory_last_and_nothing_else(self, open_session):
    session = open_session()
    session.write_files({'a/names.txt': 'Ada\nBob\n', 'run': '#!/bin/sh\necho ran\n'})
    assert (
      session.run('cd a; X=1; f() { echo; }; umask 0; wc -l < names.txt').text == '2\n'
    )
    assert session.run('../run; echo "$X$(type -t f)$(umask)"; cat n*').text == (
      'ran\n0022\nAda\nBob\n'
    )
    assert session.run('exec true', SECONDS).code == 0
    assert session.run('basename "$PWD"; cd ..; rm -r a').text == 'a\n'
    assert session.read_files() == {'run': '#!/bin/sh\necho ran\n'}

  def test_a_directory_that_is_gone_is_left(self, open_session):
    session = open_session()
    session.run('mkdir d; cd d; rmdir ../d')
    assert session.run('basename "$PWD"').text == 'workspace\n'

  @pytest.mark.parametrize(
    ('command', 'text', 'code'),
    [
      ('echo out; echo err >&2; exit 3', 'out\nerr\n', 3),
      ('false', '', 1),
      ('kill -9 $$', '', 137),
      ('yes | head -2', 'y\ny\n', 0),
      ('cat << X\na b\nX\n', 'a b\n', 0),
      ("trap 'echo bye' EXIT", 'bye\n', 0),
      ('printf "%s" "-x"; -x 2> /dev/null', '-x', 127),
      ('', '', 0),
      ('# nothing', '', 0),
      ('read x || echo closed', 'closed\n', 0),
      ('echo é | sed s/é/ö/', 'ö\n', 0),
      ('echo b > b; cp b d; mkdir -p f/g; mv d f/g; ls f/g; cat f/g/d', 'd\nb\n', 0),
      ('mkfifo p; (echo a > p &); cat p', 'a\n', 0),
      ('tar cf a.tar /dev/null 2> /dev/null; tar tf a.tar; find . -name "*.tar"',
       'dev/null\n./a.tar\n', 0),
    ],
  )  # fmt: skip
  def test_what_a_command_prints_and_its_exit_status(
    self, open_session, command, text, code
  ):
    assert open_session().run(command, SECONDS) == (text, code, '')

  def test_rights_and_times_of_its_files(self, open_session, layers):
    if os.getuid() and layers == 'kernel alone':
      pytest.skip('Landlock does not keep them to the workspace')
    session = open_session()
    command = 'echo b > b; sed -i s/b/c/ b; touch -d 2020-01-02 b; cp -p b d; chmod 7 d; '
    assert session.run(f'{command} stat -c "%a %.10y" d; cat b', SECONDS) == (
      '7 2020-01-02\nc\n', 0, ''
    )  # fmt: skip

  def test_late_commands_are_ended_with_what_they_printed(self, open_session):
    session = open_session()
    late = session.run('echo began; sleep 999', 0.5)
    assert late[0] == 'began\n' and late.reason == 'it took longer than 0.5 seconds'
    assert session.run('echo next')[:2] == ('next\n', 0)

  def test_long_output_is_cut(self, open_session):
    session = open_session(max_output=100)
    cut = session.run('seq 1000; exit 2')
    assert cut.code == 2 and cut.text.endswith('\n... (the rest of the output is cut)')
    assert cut.text.startswith('1\n2\n3\n') and len(cut.text) < 150

  @pytest.mark.parametrize('command', ['a\0b', 'echo ' + 'x' * 200_000])
  def test_a_text_that_is_no_command_is_refused(self, open_session, command):
    session = open_session()
    with pytest.raises(shell.CommandError, match='at most 100000 bytes, and no NUL'):
      session.run(command)
    assert session.run('echo \ud800 next').text == '? next\n'

  @pytest.mark.parametrize('name', ['/etc/x', '../x', 'a/../../x', '', '.'])
  def test_files_outside_of_the_workspace_are_refused(self, open_session, name):
    with pytest.raises(ValueError, match='no path below the workspace'):
      open_session().write_files({name: 'x'})

  def test_two_sessions_share_nothing(self, open_session):
    first, second = open_session(), open_session()
    first.run('echo a > a; echo b > $TMPDIR/b')
    assert second.run('ls; ls $TMPDIR/b')[1] and second.read_files() == {}

  def test_commands_of_threads_run_one_by_one(self, open_session):
    session, texts = open_session(), []
    command = 'mkdir lock && sleep .05 && rmdir lock && echo alone'
    run = lambda: texts.append(session.run(command, SECONDS).text)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(SECONDS)
    assert texts == ['alone\n'] * 4

  def test_a_closed_session_says_so(self, open_session):
    session = open_session()
    session.close()
    with pytest.raises(shell.CommandError, match='has ended; its files are gone'):
      session.run('echo')
    with pytest.raises(shell.CommandError, match='has ended; its files are gone'):
      session.read_files()


@pytest.mark.usefixtures('needs_shell')
class TestTool:
  """The tool that an agent calls."""

  def _call(self, tool, command):
    return asyncio.run(tool_lib.call(tool, {'command': command}))

  def test_what_the_agent_reads(self, open_session):
    tool = shell.shell_tool(open_session(), seconds=0.5)
    assert tool.name == 'shell'
    assert tool.schema['function']['parameters']['required'] == ['command']
    assert self._call(tool, 'echo a').text == 'a\n'
    assert self._call(tool, 'cd /').text == '(The command printed nothing.)'
    failed = self._call(tool, 'printf a; exit 4')
    assert failed.ok and failed.text == 'a\n[exit status 4]'
    assert self._call(tool, 'false').text == '[exit status 1]'
    late = self._call(tool, 'echo b; sleep 99')
    assert not late.ok and late.text == (
      'Error: shell: CommandError: the command was ended: it took longer than 0.5 '
      'seconds\nb\n'
    )


@pytest.mark.usefixtures('needs_shell')
def test_the_example_of_the_docs(capsys):
  text = (pathlib.Path(__file__).parents[1] / 'docs' / 'tools.md').read_text()
  section = text.split('\n## A shell\n')[1].split('\n## ')[0]
  block, printed = re.findall(r'```(?:python)?\n(.*?)```', section, re.DOTALL)
  names = {'reward': lambda task, messages: 0.0}
  exec(block, names)
  assert capsys.readouterr().out == printed
  assert [tool.name for tool in names['make_env']().tools] == ['shell']


class TestMachine:
  """What a machine lacks is named."""

  @pytest.fixture
  def poor(self, monkeypatch, tmp_path):
    """Has a worker find no bubblewrap, and what the test replaces in its files."""
    monkeypatch.setattr(shell, '_isolate', lambda *_: [])

    return functools.partial(confined.copy_worker, monkeypatch, tmp_path)

  def test_one_without_namespaces_and_landlock_is_refused(self, poor):
    poor('_SCOPED = 6', '_SCOPED = 999')
    with pytest.raises(RuntimeError, match='install bubblewrap .* Linux 6.12 or later'):
      shell.Shell()

  def test_one_without_seccomp_is_refused(self, poor):
    poor('import pyseccomp  # noqa', 'raise ImportError  # noqa')
    with pytest.raises(RuntimeError, match="needs Debian's libseccomp2 and pip's"):
      shell.Shell()

  @pytest.mark.usefixtures('needs_shell')
  def test_signals_that_would_reach_the_machine_are_never_sent(self, poor, capfd):
    """Of what holds them there is a proof before the first one."""
    poor('os.kill(os.getppid(), 0)', 'pass')
    with pytest.raises(RuntimeError, match='did not start'):
      shell.Shell()
    assert 'could signal processes of the machine' in capfd.readouterr().err

  def test_an_older_bubblewrap_is_none(self, monkeypatch, tmp_path):
    """Before 0.7 it knows no sizes."""
    (tmp_path / 'bwrap').write_text('#!/bin/sh\ncase "$*" in *--size*) exit 1 ;; esac\n')
    (tmp_path / 'bwrap').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path), ':')
    assert shell._isolate.__wrapped__(64) == [] and sandbox._isolate()
