"""The kinds of chores in a terminal: files, a question or a chore, a solution.

In a solution each word follows a space, or the same text as in the question or the
output. So its tokens are the same there, and it can be copied.
"""

from collections.abc import Callable, Sequence
import random
from typing import Any, NamedTuple


class Chore(NamedTuple):
  """A sampled chore.

  Attributes:
    question: The chore in words.
    files: The texts of the initial files, by path.
    answer: The required end state; see tasks/chores.py.
    commands: A solution. The last reply then gives answer['reply'], if there is one.
    prints: The output of each command; None if it is nothing, or the last one's reply.
  """

  question: str
  files: dict[str, str]
  answer: dict[str, Any]
  commands: tuple[str, ...]
  prints: tuple[str, ...] | None = None

  @property
  def printed(self) -> list[str]:
    """The output of each command."""
    if self.prints is not None:
      return [*self.prints]
    reply = self.answer.get('reply')
    return [''] * (len(self.commands) - 1) + ['' if reply is None else f'{reply}\n']


class Scene:
  """Words and files sampled for one task; no word occurs twice."""

  def __init__(self, rng: random.Random, words: Sequence[str]):
    """Samples the scene's words from the given ones."""
    self.rng = rng
    self._words = iter([word.lower() for word in rng.sample(words, 100)])

  def word(self) -> str:
    """Returns a word that no name or text of this task has."""
    return next(self._words)

  def name(self, ending: str = 'txt') -> str:
    """Returns the name of a file."""
    return f'{self.word()}.{ending}'

  def lines(self, least: int = 3, most: int = 6) -> list[str]:
    """Returns lines with a word and a number each."""
    count = self.rng.randint(least, most)
    return [f'{self.word()} {self.rng.randint(1, 99)}' for _ in range(count)]

  def files(self, count: int) -> dict[str, str]:
    """Returns the texts of `count` files by name."""
    return {self.name(): _join(self.lines()) for _ in range(count)}

  def ask(self, *wordings: str, **words: str) -> str:
    """Returns one of the wordings, filled."""
    return self.rng.choice(wordings).format(**words)


def _join(lines: Sequence[str]) -> str:
  return ''.join(f'{line}\n' for line in lines)


def _count_lines(scene: Scene) -> Chore:
  files = scene.files(3)
  name = scene.rng.choice([*files])
  question = scene.ask('How many lines has {f}?', 'Count the lines of {f}.', f=name)
  reply = str(files[name].count('\n'))
  prints = (f'{reply} {name}\n',)
  return Chore(question, files, {'reply': reply}, (f'wc -l {name}',), prints)


def _count_files(scene: Scene) -> Chore:
  kind, other, folder = scene.word()[:3], scene.word()[:4], scene.word()
  count = scene.rng.randint(2, 5)
  names = [scene.name(kind) for _ in range(count)]
  files = {f'{folder}/' * scene.rng.randint(0, 1) + name: '' for name in names}
  files[scene.name(other)] = ''
  question = scene.ask(
    'How many .{k} files are there, also in folders?',
    'Count the files whose name ends with .{k}, in all folders.',
    k=kind,
  )
  command = f"find . -name '*.{kind}' | wc -l"
  return Chore(question, files, {'reply': str(count)}, (command,))


def _count_word(scene: Scene) -> Chore:
  name, word, count = scene.name(), scene.word(), scene.rng.randint(1, 4)
  lines = [f'{scene.word()} {word}' for _ in range(count)] + scene.lines(2, 4)
  scene.rng.shuffle(lines)
  question = scene.ask(
    'How many lines of {f} have the word {w}?', 'Count the lines of {f} with {w}.',
    f=name, w=word,
  )  # fmt: skip
  command = f'grep -cw {word} {name}'
  return Chore(question, {name: _join(lines)}, {'reply': str(count)}, (command,))


def _find_file(scene: Scene) -> Chore:
  files, folder = scene.files(3), scene.word()
  files = {f'{folder}/{name}': text for name, text in files.items()}
  path = scene.rng.choice([*files])
  word = files[path].split()[0]
  question = scene.ask(
    'Which file in {d} has the word {w}?',
    'In which file of {d} is {w}?',
    d=folder,
    w=word,
  )
  answer = {'reply': path.partition('/')[2]}
  return Chore(question, files, answer, (f'cd {folder}', f'grep -lw {word} *'))


def _find_line(scene: Scene) -> Chore:
  name, lines = scene.name(), [scene.word() for _ in range(scene.rng.randint(4, 7))]
  number = scene.rng.randint(2, len(lines))
  question = scene.ask('What is line {n} of {f}?', n=str(number), f=name)
  answer = {'reply': lines[number - 1]}
  return Chore(question, {name: _join(lines)}, answer, (f'sed -n {number}p {name}',))


def _add_numbers(scene: Scene) -> Chore:
  name, lines = scene.name(), scene.lines()
  question = scene.ask('What is the sum of the numbers in {f}?', f=name)
  total = sum(int(line.split()[1]) for line in lines)
  command = f"awk '{{s += $2}} END {{print s}}' {name}"
  return Chore(question, {name: _join(lines)}, {'reply': str(total)}, (command,))


_LONGEST = "wc -l * | sort -n | tail -2 | head -1 | awk '{print $2}'"


def _find_longest(scene: Scene) -> Chore:
  names, counts = [scene.name() for _ in range(3)], scene.rng.sample(range(2, 8), 3)
  files = {n: _join(scene.lines(c, c)) for n, c in zip(names, counts, strict=True)}
  question = scene.ask('Which file has the most lines?', 'Name the longest file.')
  answer = {'reply': names[counts.index(max(counts))]}
  return Chore(question, files, answer, (_LONGEST,))


def _rename(scene: Scene) -> Chore:
  files, new = scene.files(3), scene.name()
  old = scene.rng.choice([*files])
  question = scene.ask('Rename {o} to {n}.', 'Give {o} the name {n}.', o=old, n=new)
  answer = {'files': {old: None, new: files[old]}}
  return Chore(question, files, answer, (f'mv {old} {new}',))


def _delete(scene: Scene) -> Chore:
  files, kind = scene.files(2), scene.word()[:3]
  gone = [f'{scene.word()}/{scene.name(kind)}', scene.name(kind)]
  files |= {path: _join(scene.lines()) for path in gone}
  question = scene.ask('Delete all .{k} files, also in folders.', k=kind)
  answer = {'files': dict.fromkeys(gone)}
  return Chore(question, files, answer, (f"find . -name '*.{kind}' -delete",))


def _copy(scene: Scene) -> Chore:
  files, folder = scene.files(3), scene.word()
  name = scene.rng.choice([*files])
  question = scene.ask('Copy {f} into a new folder {d}.', f=name, d=folder)
  answer = {'files': {f'{folder}/{name}': files[name]}}
  return Chore(question, files, answer, (f'mkdir {folder}', f'cp {name} {folder}'))


def _replace(scene: Scene) -> Chore:
  files, new = scene.files(2), scene.word()
  name = scene.rng.choice([*files])
  old = scene.rng.choice(files[name].split()[::2])
  question = scene.ask(
    'Write {n} for {o} in {f}.', 'Replace {o} by {n} in {f}.', o=old, n=new, f=name
  )
  lines = [' '.join(new if w == old else w for w in line.split(' ')) for line in
           files[name].splitlines()]  # fmt: skip
  answer = {'files': {name: _join(lines)}}
  command = rf'set -- {old} {new}; sed -i "s/\b$1\b/$2/" {name}'
  return Chore(question, files, answer, (command,))


def _append(scene: Scene) -> Chore:
  files, word = scene.files(2), scene.word()
  name = scene.rng.choice([*files])
  question = scene.ask('Add a line {w} at the end of {f}.', w=word, f=name)
  answer = {'files': {name: f'{files[name]}{word}\n'}}
  return Chore(question, files, answer, (f'echo {word} >> {name}',))


def _sort(scene: Scene) -> Chore:
  files, new = scene.files(2), scene.name()
  name = scene.rng.choice([*files])
  question = scene.ask('Write the sorted lines of {f} to {n}.', f=name, n=new)
  answer = {'files': {new: _join(sorted(files[name].splitlines()))}}
  return Chore(question, files, answer, (f'sort {name} > {new}',))


def _delete_found(scene: Scene) -> Chore:
  files = scene.files(4)
  name = scene.rng.choice([*files])
  word = files[name].split()[0]
  question = scene.ask('Delete the file that has the word {w}.', w=word)
  return Chore(question, files, {'files': {name: None}}, (f'rm $(grep -lw {word} *)',))


# A program's purpose; its lines; its result; the wrong lines, by number.
_PROGRAMS: tuple[tuple[str, str, Callable[[list[int]], int], dict[int, str]], ...] = (
  ('adds its numbers',
   'total=0\nfor n in "$@"; do\n  total=$((total + n))\ndone\necho $total\n',
   sum, {1: 'total=1', 3: '  total=$((total - n))'}),
  ('prints its largest number',
   'most=$1\nfor n in "$@"; do\n  [ $n -gt $most ] && most=$n\ndone\necho $most\n',
   max, {3: '  [ $n -lt $most ] && most=$n', 5: 'echo $n$most'}),
  ('counts its numbers above 9',
   'count=0\nfor n in "$@"; do\n  [ $n -gt 9 ] && count=$((count + 1))\ndone\n'
   'echo $count\n',
   lambda numbers: sum(n > 9 for n in numbers),
   {1: 'count=6', 3: '  [ $n -lt 9 ] && count=$((count + 1))'}),
)  # fmt: skip


def _fix(scene: Scene) -> Chore:
  name = scene.name('sh')
  purpose, program, compute, mistakes = scene.rng.choice(_PROGRAMS)
  right = program.splitlines()
  lines = [mistakes.get(number, line) for number, line in enumerate(right, 1)]

  def make_test(cases: int) -> str:
    checks = []
    for _ in range(cases):
      numbers = scene.rng.sample(range(1, 30), 5)
      shown = ' '.join(map(str, numbers))
      checks.append(f'[ "$(sh {name} {shown})" = {compute(numbers)} ] || exit 1')
    return _join([*checks, 'echo passed'])

  question = scene.ask(
    'The program {f} {p}. Two of its lines are wrong. Mend them, so that sh test.sh '
    'prints passed.',
    f=name,
    p=purpose,
  )
  # The hidden test has other numbers, so that none can be hard-coded.
  test = {'command': 'sh test.sh', 'files': {'test.sh': make_test(4)}}
  commands = [f"sed -i '{n}s/.*/{_quote(right[n - 1])}/' {name}" for n in mistakes]
  files = {name: _join(lines), 'test.sh': make_test(1)}
  answer = {'test': test, 'edited': [name]}
  commands = (f'cat {name}', *commands, 'sh test.sh')
  prints = (files[name], *[''] * len(mistakes), 'passed\n')
  return Chore(question, files, answer, commands, prints)


def _quote(line: str) -> str:
  return line.replace('\\', r'\\').replace('/', r'\/').replace('&', r'\&')


TRAINED: dict[str, Callable[[Scene], Chore]] = {
  'count lines': _count_lines,
  'count files': _count_files,
  'count a word': _count_word,
  'find a file': _find_file,
  'find a line': _find_line,
  'add numbers': _add_numbers,
  'rename': _rename,
  'delete': _delete,
  'copy': _copy,
  'replace': _replace,
  'append': _append,
  'fix': _fix,
}
HELD_OUT: dict[str, Callable[[Scene], Chore]] = {
  'find the longest': _find_longest,
  'sort': _sort,
  'delete what is found': _delete_found,
}
KINDS = TRAINED | HELD_OUT
