"""The script of the paper's tables, in small, as a user runs it.

Always in a process of its own: the flags of two scripts do not go together in one.
"""

import copy
import dataclasses
import gzip
import json
import signal

import jax
import pytest
import script

from agent_r1_jax.models.files import weights
from experiments import paper_page, tables
from experiments.miniwiki import tasks as miniwiki

METHODS = (
  'ReAct prompting,Supervised fine-tuning,PPO (both masks off),'
  'GRPO with dynamic sampling,Fine-tuning before GRPO,Distillation'
)
# Prints what of the bench of real data can be compared, and a right demonstration as the
# bench's own environment plays it.
BENCH = """
import asyncio, itertools, json
from absl import app
from experiments import paper_tables

async def play(environment, task, replies):
  messages, rewards = await environment.reset(task), []
  for reply in replies:
    step = await environment.step(reply)
    messages += [{'role': 'assistant', 'content': reply}, *step.messages]
    rewards.append(step.reward)
  return messages, rewards

def main(_):
  bench = paper_tables.real_bench(paper_tables._CFG.value)
  told, played = list(itertools.islice(bench.demonstrations(1), 8)), []
  for messages in told:
    (task,) = (task for task in bench.tasks if task.messages == messages[:1])
    replies = [m['content'] for m in messages if m['role'] == 'assistant']
    played.append(asyncio.run(play(bench.agent(), task, replies)))
  pairs = lambda tasks: [(task.info['question'], task.messages) for task in tasks]
  asked = {
    which: pairs(itertools.chain(*sets.values())) for which, sets in bench.sets.items()
  }
  train = pairs(bench.tasks)
  print(json.dumps({'told': told, 'played': played, 'asked': asked, 'train': train}))

app.run(main)
"""

# The table with methods that only write down that they ran. The second is killed in the
# midst of its first training.
TABLE = """
import functools, json, os, signal
from absl import app
from experiments import paper_tables

def method(name, bench, seed, workdir):
  with (workdir.parent / 'ran').open('a') as file:
    file.write(f'{name} {seed}\\n')
  first = not workdir.exists()
  (workdir / 'checkpoints').mkdir(parents=True, exist_ok=True)
  if name == 'second' and first:
    (workdir / 'metrics.jsonl').write_text(json.dumps({'step': 1, 'time/update': 5000}))
    os.kill(os.getpid(), signal.SIGKILL)
  return paper_tables.Outcome({'set': []}, [0.5])

paper_tables.METHODS = {
  name: functools.partial(method, name) for name in ('first', 'second', 'third')
}
paper_tables.miniwiki_bench = lambda config: paper_tables.Bench(
  config, [], {}, None, None, None, {}
)
app.run(paper_tables.main)
"""


def run(*flags, code=None):
  what = ('-c', code) if code else ('-m', 'experiments.paper_tables')
  return script.run(*what, *flags)


def test_every_kind_of_method_gives_a_line_and_lines_give_tables(tmp_path):
  source, model = script.ROOT / 'experiments' / 'miniwiki' / 'model', tmp_path / 'model'
  # One layer of three is enough to run, and compiles in a third of the time.
  config, params = weights.load(source)
  config = dataclasses.replace(config, num_layers=1)
  params |= {'layers': jax.tree.map(lambda x: x[:1], params['layers'])}
  weights.save(model, config, params, tokenizer_from=source)
  small = (
    f'--out={tmp_path}',
    f'--config.model.path={model}',
    '--seeds=0',
    '--questions=2',
    f'--teacher={model}',
    '--config.schedule.steps=2',
    '--config.schedule.tasks=2',
    '--config.schedule.samples=2',
    '--config.engine.rows=8',
    '--config.engine.prefill_rows=8',
    *script.one_program(slots=448),
    '--config.batch.microbatch=2',
    '--config.limits.max_turn_tokens=32',
  )
  done = run(*small, f'--methods={METHODS}')
  assert done.returncode == 0, done.stderr[-3000:]
  assert json.loads((tmp_path / 'bench.json').read_text())['model'] == str(model)
  lines = tables.read_lines(tmp_path / 'results.jsonl')
  assert [line['method'] for line in lines] == METHODS.split(',')
  for line in lines:
    assert len(line['sets']) == 3
    assert all(kinds['all']['count'] == 2 for kinds in line['sets'].values())
    assert line['seconds'] >= 0
    steps = {'ReAct prompting': 0, 'Supervised fine-tuning': 0}
    steps['Fine-tuning before GRPO'] = 1
    assert len(line['rewards']) == steps.get(line['method'], 2)
  trained = copy.deepcopy([line for line in lines if line['rewards']])
  plain = copy.deepcopy(trained[0]) | {'method': 'REINFORCE++'}
  another = copy.deepcopy([plain, *trained])
  for line in another:
    line['seed'] = 1
    line['sets']['miniwiki-2wiki']['all']['mean'] = 1.0
  for line in (plain, *another):
    tables.add_line(tmp_path / 'results.jsonl', line)
  target = tmp_path / 'docs' / 'tables'
  done = run(f'--out={tmp_path}', f'--render={target}')
  assert done.returncode == 0, done.stderr[-3000:]
  text = target.with_suffix('.md').read_text()
  third, fourth = text.split('### Table 4: masks, all')
  assert '| REINFORCE++ ' in third and '| REINFORCE++ ' not in fourth
  assert '| PPO (both masks off) ' in fourth
  masks, others = fourth.split('### Against collapse, all')
  steady, taught = others.split('### Taught, all')
  assert '| GRPO with ' not in third + masks + taught and '| GRPO with ' in steady
  assert '| Distillation ' in taught and '| Fine-tuning before GRPO ' in taught
  # Half of the way between two seeds, and Student's interval of two.
  first = plain['sets']['miniwiki-2wiki']['all']['mean']
  half = 12.7062 * abs(1 - first) / 2
  assert f'{(1 + first) / 2:.3f} ± {half:.3f}'.replace('0.', '.') in third
  assert target.with_suffix('.png').stat().st_size > 10_000
  assert len(target.with_suffix('.jsonl').read_text().splitlines()) == 12


def test_methods_are_compared_seed_by_seed():
  scores = {
    'A': {1: 0.6, 2: 0.5, 3: 0.7, 4: 0.6, 5: 0.9},
    'B': {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5},
    'C': {1: 0.1, 2: 0.1},
  }
  pairs = paper_page.compare_pairs(scores)
  # A - B is .1 0 .2 .1: their mean is .1, and their deviation .0816.
  cells = pairs.pop('A - B')
  assert not pairs  # C has too few seeds.
  assert cells['seeds'] == '4' and cells['ahead'] == '3/4'
  assert cells['difference'].mean == pytest.approx(0.1)
  assert cells['difference'].half == pytest.approx(3.1824 * 0.08165 / 2, rel=1e-3)
  # Student's t with 3 degrees of freedom: .975 and .8.
  assert cells['would show'] == pytest.approx((3.1824 + 0.9785) * 0.0408, rel=1e-3)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """miniwiki in the layout of the three real data sets."""
  folder = tmp_path_factory.mktemp('data')
  passages = miniwiki.corpus(0, 'dev')
  names = ('hotpotqa', '2wikimultihopqa', 'musique')
  for name, mini, part in zip(names, miniwiki.SETS, range(3)):
    (folder / name).mkdir()
    corpus = passages[part * miniwiki.PASSAGES :][: miniwiki.PASSAGES]
    rows = (
      {
        'id': task.id,
        'question': task.info['question'],
        'golden_answers': task.answer,
        'supporting_titles': task.info['chain'],
      }
      for task in miniwiki.test_set(mini, 12, 0, 'dev')
    )
    _write(
      folder / name / 'corpus.jsonl.gz',
      ({'id': d.id, 'title': d.title, 'text': d.text} for d in corpus),
    )
    _write(folder / name / 'train.jsonl.gz', rows)
  return folder


def _write(path, rows):
  with gzip.open(path, 'wt', encoding='utf-8') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)


def test_demonstrations_on_real_data_are_asked_and_answered_as_the_agent_is(data):
  done = run(f'--data={data}', '--config.model.path=none', '--questions=3', code=BENCH)
  assert done.returncode == 0, done.stderr[-3000:]
  bench = json.loads(done.stdout)
  # Of held-out questions, of those to train on, and of the demonstrations.
  (form,) = {
    json.dumps(messages).replace(question, '{}')
    for question, messages in (*bench['asked']['agent'], *bench['train'])
  }
  assert 'Use the search tool' in form and '{}' in form
  assert len(bench['asked']['agent']) == 9 and len(bench['train']) == 18
  prompts, found = [messages for _, messages in bench['train']], []
  for told, (played, rewards) in zip(bench['told'], bench['played'], strict=True):
    assert told[:1] in prompts
    # Word by word what the tool answers; and right.
    assert told == played
    assert rewards[-1] == 1.0
    found += [m['content'].count('(Title: ') for m in told if m['role'] == 'tool']
  assert max(found) == 5
  for (_, messages), (_, shown) in zip(bench['asked']['agent'], bench['asked']['react']):
    example = shown[: -len(messages)]
    assert shown[len(example) :] == messages
    assert example[:1] in prompts and '<answer>' in example[-1]['content']


def test_a_killed_table_goes_on_with_the_method_cut_short(tmp_path):
  flags = (f'--out={tmp_path}', '--seeds=0')
  path = tmp_path / 'results.jsonl'
  killed = run(*flags, code=TABLE)
  assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
  assert [line['method'] for line in tables.read_lines(path)] == ['first']
  # What its training goes on from.
  assert (tmp_path / 'second-seed-0' / 'checkpoints').is_dir()
  done = run(*flags, code=TABLE)
  assert done.returncode == 0, done.stderr[-3000:]
  ran = (tmp_path / 'ran').read_text().splitlines()
  assert ran == ['first 0', 'second 0', 'second 0', 'third 0']
  lines = tables.read_lines(path)
  assert [line['method'] for line in lines] == ['first', 'second', 'third']
  # The time before the kill counts.
  assert [line['seconds'] >= 5000 for line in lines] == [False, True, False]
  assert not (tmp_path / 'second-seed-0' / 'checkpoints').exists()


def test_an_out_of_another_bench_is_refused_with_what_differs(tmp_path):
  flags = (f'--out={tmp_path}', '--seeds=0', '--methods=first')
  done = run(*flags, '--config.seed=3', code=TABLE)
  assert done.returncode == 0, done.stderr[-3000:]
  bench = json.loads((tmp_path / 'bench.json').read_text())
  others = ('--config.schedule.steps=5', '--questions=9', '--config.seed=4')
  refused = run(*flags, *others, code=TABLE)
  assert refused.returncode != 0
  assert 'questions: 300 there, 9 now' in refused.stderr
  assert 'config.schedule.steps: 40 there, 5 now' in refused.stderr
  assert 'seed' not in refused.stderr
  assert json.loads((tmp_path / 'bench.json').read_text()) == bench
