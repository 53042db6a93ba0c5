"""Question files in every layout, their errors, and the TFDS builder."""

import gzip
import json

import pytest
import script

from agent_r1_jax.tasks import qa_data
from agent_r1_jax.types import Task

OURS = {
  'id': 'o1', 'question': 'Where was Ann born?', 'golden_answers': ['Oslo', 'Kristiania'],
  'type': 'bridge', 'supporting_titles': ['Ann'],
}  # fmt: skip
HOTPOT = {
  '_id': 'h1', 'question': 'Is Ann older than Bo?', 'answer': 'yes', 'type': 'comparison',
  'level': 'hard', 'supporting_facts': [['Ann', 0], ['Bo', 1], ['Ann', 2]],
  'context': [['Ann', ['Ann is 9.', ' She sings.']], ['Bo', ['Bo is 8.']], ['No', []]],
}  # fmt: skip
TWO_WIKI = HOTPOT | {
  '_id': 'w1', 'answer': 'Oslo', 'answer_id': 'Q585',
  'evidences': [['Ann', 'born', 'Oslo']],
}  # fmt: skip
MUSIQUE = {
  'id': '2hop__1_2', 'question': 'Who leads the city of Ann?', 'answer': 'Bo Lie',
  'answer_aliases': ['Lie'], 'answerable': True,
  'paragraphs': [
    {'idx': 0, 'title': 'Ann', 'paragraph_text': 'Ann of Oslo.', 'is_supporting': True},
    {'idx': 1, 'title': 'Eve', 'paragraph_text': 'Eve sings.', 'is_supporting': False},
  ],
  'question_decomposition': [
    {'id': 1, 'question': 'Ann >> city', 'answer': 'Oslo', 'paragraph_support_idx': 0}
  ],
}  # fmt: skip


def _write(path, rows, form='lines'):
  text = '\n'.join(map(json.dumps, rows)) if form == 'lines' else json.dumps(rows)
  path.write_bytes(gzip.compress(text.encode()) if form == 'gzip' else text.encode())
  return path


def _without(row, *names):
  return {key: value for key, value in row.items() if key not in names}


def test_our_own_layout(tmp_path):
  rows = [OURS, OURS | {'id': 'o2', 'golden_answers': 'Oslo'}]
  first, second = qa_data.load(_write(tmp_path / 'a.jsonl', rows))
  assert first == Task(
    id='o1',
    messages=[{'role': 'user', 'content': 'Where was Ann born?'}],
    answer=['Oslo', 'Kristiania'],
    info={
      'question': 'Where was Ann born?', 'type': 'bridge', 'supporting_titles': ['Ann'],
    },
  )  # fmt: skip
  assert second.answer == ['Oslo']


@pytest.mark.parametrize('form', ['lines', 'array', 'gzip'])
def test_hotpotqa(tmp_path, form):
  rows = json.loads(json.dumps([HOTPOT]))
  path = tmp_path / 'hotpot'
  (task,) = qa_data.load(_write(path, rows, 'lines' if form == 'gzip' else form))
  if form == 'gzip':
    path.write_bytes(gzip.compress(path.read_bytes()))
  assert (task.id, task.answer) == ('h1', ['yes'])
  question = 'Is Ann older than Bo?'
  assert task.info == {
    'question': question, 'type': 'comparison', 'level': 'hard',
    'supporting_titles': ['Ann', 'Bo'],
  }  # fmt: skip
  assert task.messages == [{'role': 'user', 'content': question}]
  passages = list(qa_data.contexts('row 1', HOTPOT))
  assert passages == [('Ann', 'Ann is 9. She sings.'), ('Bo', 'Bo is 8.')]


def test_two_wiki_and_its_aliases(tmp_path):
  (task,) = tasks = qa_data.load(_write(tmp_path / 'train.json', [TWO_WIKI], 'array'))
  assert task.answer == ['Oslo']
  assert task.info['evidences'] == [['Ann', 'born', 'Oslo']]
  lines = [
    {'Q_id': 'Q585', 'aliases': ['Kristiania'], 'demonyms': ['Oslovian']},
    {'Q_id': 'Q1', 'aliases': ['x'], 'demonyms': []},
  ]
  aliases = _write(tmp_path / 'id_aliases.json', lines)
  (named,) = qa_data.add_aliases(tasks, aliases)
  assert named.answer == ['Oslo', 'Kristiania', 'Oslovian']
  assert task.answer == ['Oslo']
  (plain,) = qa_data.load(
    _write(tmp_path / 'old.json', [_without(TWO_WIKI, 'answer_id')])
  )
  assert qa_data.add_aliases([plain], aliases) == [plain]


def test_musique(tmp_path):
  path = _write(tmp_path / 'musique.jsonl', [MUSIQUE])
  (task,) = qa_data.load(path)
  assert (task.id, task.answer) == ('2hop__1_2', ['Bo Lie', 'Lie'])
  assert task.info['supporting_titles'] == ['Ann']
  assert task.info['decomposition'][0]['answer'] == 'Oslo'
  passages = list(qa_data.contexts('row 1', MUSIQUE))
  assert passages == [('Ann', 'Ann of Oslo.'), ('Eve', 'Eve sings.')]
  assert not qa_data.load(path, lambda where, row: Task(where, []))[0].messages


@pytest.mark.parametrize(
  ('name', 'text', 'ids', 'answers'),
  [
    (
      'NQ-open.dev.jsonl',
      '{"question": "who?", "answer": ["Ann", "Bo"]}\n\n{"question": "b", "answer": "c"}',
      ['1', '3'],
      [['Ann', 'Bo'], ['c']],
    ),
    (
      'wikipedia-dev.json',
      '{\n"Data": [{"Question": "who?", "QuestionId": "tc_1", "Answer": {"Value": "Ann",'
      ' "Aliases": ["Annie", "Ann"], "NormalizedAliases": ["ann"]}}],\n"Domain": "Web"}',
      ['tc_1'],
      [['Ann', 'Annie']],
    ),
    (
      'popqa.tsv',
      'id\tprop\tquestion\tpossible_answers\n'
      '42\tcapital\twho?\t"[""Ann"", ""the \\""A\\""""]"\n',
      ['42'],
      [['Ann', 'the "A"']],
    ),
    ('bamboogle.csv', 'Question,Answer\nwho?,"Ann, Bo"\n', ['1'], [['Ann, Bo']]),
  ],
)
@pytest.mark.parametrize('gzipped', [False, True])
def test_evaluation_sets_of_each_layout_are_read(
  tmp_path, name, text, ids, answers, gzipped
):
  path = tmp_path / (name + '.gz' * gzipped)
  path.write_bytes(gzip.compress(text.encode()) if gzipped else text.encode())
  tasks = qa_data.load(path)
  assert [task.id for task in tasks] == ids
  assert [task.answer for task in tasks] == answers
  assert tasks[0].messages == [{'role': 'user', 'content': 'who?'}]


@pytest.mark.parametrize(
  ('name', 'text', 'message'),
  [
    ('a.tsv', 'id\tquestion\tpossible_answers\n1\tq\tAnn\n', 'possible_answers'),
    ('a.json', '[{"Question": "q", "QuestionId": "1"}]', 'Answer'),
    ('a.csv', 'Question,Answer\nq\n', 'Answer'),
    ('a.json', '{\n"Version": 1}', 'a list "Data" was'),
    ('a.csv', 'Question,Answer\n', 'holds no rows'),
  ],
)
def test_a_broken_row_of_an_evaluation_set_is_named(
  refused, tmp_path, name, text, message
):
  (tmp_path / name).write_text(text)
  with refused(message):
    qa_data.load(tmp_path / name)


@pytest.mark.parametrize(
  ('rows', 'message'),
  [
    (
      [OURS, _without(OURS, 'question')],
      r"row 2: 'question' is missing among \['golden_",
    ),
    ([OURS | {'question': ' '}], r"row 1: 'question' is ' '; give a text"),
    ([OURS | {'golden_answers': []}], r"'golden_answers' is \[\]; give a text or a list"),
    ([OURS | {'golden_answers': ['x', '']}], r"'golden_answers' is \['x', ''\]"),
    ([OURS | {'id': 7}], "'id' is 7"),
    ([OURS, OURS], r"row 2: id 'o1' was taken before"),
    ([OURS, 'text'], 'row 2: expected a JSON object'),
    ([{'prompt': 'x'}], r"row 1: unknown layout, the fields are \['prompt'\]"),
    (
      [HOTPOT | {'supporting_facts': [['Ann']]}],
      "'supporting_facts' is .* list of pairs",
    ),
    ([TWO_WIKI | {'evidences': None}], "'evidences' is None; give a list"),
    ([MUSIQUE | {'answerable': False}], 'row 1: is unanswerable; take the musique_ans'),
    ([MUSIQUE | {'paragraphs': ['x']}], "'paragraphs' is .* a list of objects"),
    ([], 'holds no rows'),
  ],
)
def test_a_broken_row_is_named(tmp_path, rows, message):
  path = _write(tmp_path / 'broken', rows)
  with pytest.raises(ValueError, match=f'{path}: .*') as error:
    qa_data.load(path)
  error.match(message)


def test_a_missing_file_is_named(refused, tmp_path):
  with refused('nowhere', FileNotFoundError):
    qa_data.load(tmp_path / 'nowhere.jsonl')


def test_the_real_files_have_their_counts(data_dir):
  for name, count in (('hotpotqa', 2247), ('2wikimultihopqa', 1255), ('musique', 1058)):
    tasks = qa_data.load(data_dir / name / 'train.jsonl.gz')
    assert len(tasks) == count
    assert all(task.info['supporting_ids'] for task in tasks)


_TFDS = """
import pathlib, sys
from agent_r1_jax.tasks import qa_data, qa_tfds

folder = pathlib.Path(sys.argv[1])
tasks = {
  'train': qa_data.load(folder / 'train.jsonl'),
  'test': qa_data.load(folder / 'musique.jsonl'),
}
built = qa_tfds.write(tasks, folder / 'tfds', name='small')
for split, written in tasks.items():
  assert list(qa_tfds.read(built, split)) == written, split
assert qa_tfds.find(folder / 'tfds') == built and qa_tfds.find(folder) is None
assert list(qa_data.read_questions(folder / 'tfds', 'test')) == tasks['test']
tenth = qa_tfds.read(built, 'train[20%:30%]')
assert [task.id for task in tenth] == ['10', '11', '12', '13', '14']
assert 'tensorflow' not in sys.modules

def refused(message, fn, *args, **kwargs):
  try:
    fn(*args, **kwargs)
  except ValueError as error:
    assert message in str(error), error
  else:
    raise AssertionError(message)

refused('delete it', qa_tfds.write, tasks, folder / 'tfds', name='small')
refused('holds no TFDS', qa_tfds.read, folder)
refused('nope', qa_tfds.read, built, 'nope')
"""


def test_tfds_without_tensorflow(tmp_path):
  """In a process of its own: another test may have imported TensorFlow."""
  rows = [OURS | {'id': str(i), 'question': f'Été {i}?'} for i in range(50)]
  _write(tmp_path / 'train.jsonl', rows)
  _write(tmp_path / 'musique.jsonl', [MUSIQUE])
  run = script.run('-c', _TFDS, tmp_path)
  assert run.returncode == 0, run.stderr[-3000:]
