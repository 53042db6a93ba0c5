"""The world of forged pictures: what pixels tell, what detectors see, and the verdict."""

import functools
import itertools
import random

from absl import flags
import gallery
import jax
import numpy as np
import pytest
import runs

from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.rl import algorithms
from experiments.worlds import forensics, grid
from experiments.worlds import forged_pictures as forged

if not flags.FLAGS.is_parsed():
  flags.FLAGS(['test'])

N = 40

model = gallery.model


@functools.cache
def photos(*kinds):
  """Returns photographs that were changed in these ways, and the cells."""
  made = []
  for seed in range(N):
    rng = np.random.default_rng(seed)
    photo = forged.photograph(rng)
    cell = str(rng.choice(photo.plain()))
    for kind in kinds:
      photo = forged.FORGERIES[kind](photo, cell, rng)
    made.append((photo, cell))
  return made


def rate(detector, *kinds, jpeg=forged.QUALITIES):
  """Returns the share of pictures in which the detector suspects anything."""
  chosen = [photo for photo, _ in photos(*kinds) if photo.jpeg in jpeg]
  return np.mean([bool(forged.suspects(photo, detector)) for photo in chosen])


def look(tool, **arguments):
  return call_formats.HERMES.render(calls.ToolCall(tool, arguments))


def test_plain_cells_look_as_the_metadata_says():
  looks = [forensics.describe(p, cell) for p, cell in photos()]
  assert np.mean([x.startswith(' plain') and x.endswith('same') for x in looks]) >= 0.95
  # Glare has no trace of its compression, and a texture looks like noise.
  for photo, _ in photos():
    for cell, shown in photo.looks.items():
      if shown == 'glare':
        assert forged.read(photo.cell(cell)) == (100, 95)
      elif shown == 'texture':
        assert forged.read(photo.cell(cell))[0] >= photo.iso


@pytest.mark.parametrize(
  ('kind', 'compressed', 'lossless'),
  [
    ('splice', 0.95, 0.8),
    ('copy', 0.95, 0.0),
    ('resample', 0.95, 0.4),
    ('noise', 0.95, 0.8),
    ('recompress', 0.95, 0.95),
    ('metadata', 0.95, 0.95),
  ],
)
def test_a_forged_cell_contradicts_the_metadata(kind, compressed, lossless):
  """Which forgeries leave traces depends on the first compression; a copy leaves none."""
  first = {seed: photo.jpeg for seed, (photo, _) in enumerate(photos())}
  found = {True: [], False: []}
  for seed, (photo, cell) in enumerate(photos(kind)):
    other = 'other' in forensics.describe(photo, cell)
    found[first[seed] == 95].append(other)
  assert np.mean(found[False]) >= compressed
  assert np.mean(found[True]) >= lossless if lossless else not any(found[True])


@pytest.mark.parametrize(
  ('detector', 'sees', 'blind'),
  [
    ('grain', ('splice', 'noise'), ('copy', 'metadata')),
    ('block', ('copy', 'resample'), ('metadata',)),
    ('grid', ('copy', 'resample', 'splice', 'noise'), ('recompress', 'metadata')),
    ('twin', ('copy',), ('splice', 'resample', 'noise', 'metadata')),
    ('seam', ('recompress',), ('metadata', 'noise')),
    ('history', ('recompress',), ('splice', 'noise', 'metadata')),
  ],
)
def test_a_detector_sees_some_forgeries_and_not_others(detector, sees, blind):
  alarms = rate(detector)
  for kind in sees:
    assert rate(detector, kind) > alarms + 0.2, kind
  for kind in blind:
    assert rate(detector, kind) < alarms + 0.2, kind


def test_detectors_of_the_grid_need_a_compression_that_leaves_one():
  assert rate('grid', 'copy', jpeg=(50, 75)) >= 0.9
  assert rate('grid', 'copy', jpeg=(95,)) < rate('grid', jpeg=(95,)) + 0.25


def test_glare_and_textures_raise_alarms_together():
  clear = [p for p, _ in photos() if {*p.looks.values()} == {'plain'}]
  confusing = [p for p, _ in photos() if {*p.looks.values()} != {'plain'}]
  count = lambda photo: sum(bool(forged.suspects(photo, d)) for d in forged.DETECTORS)
  assert np.mean([*map(count, confusing)]) > np.mean([*map(count, clear)]) + 1


def test_equal_seeds_make_equal_tasks_and_no_label_leaks():
  make = lambda split: forensics.make_tasks(3, 6, split, forensics.TRAINED)
  assert make('train') == make('train') != make('test')
  for task in make('train'):
    assert task.answer == ('manipulated' if task.info['kinds'] else 'authentic')
    picture, text = task.messages[0]['content']
    assert text['text'] == 'Authentic?'
    assert grid.READER.read(picture['image_url']['url']).shape == (16, 16, 3)
  sets = forensics.held_out(0, 40, 'test')
  kinds = {name: {*map(tuple, (t.info['kinds'] for t in s))} for name, s in sets.items()}
  assert kinds['new_pictures'] == {(), *forensics.TRAINED}
  assert kinds['unseen_noise'] == {(), ('noise',)}
  assert kinds['unseen_pair'] == {(), ('copy', 'recompress')}
  trained = {*kinds['new_pictures']}
  assert not (kinds['unseen_splice'] | kinds['unseen_pair']) - {()} & trained


async def test_looks_are_reported_cost_and_run_out():
  task = forensics.make_tasks(0, 1, 'train', forensics.TRAINED)[0]
  photo = forensics.photo_of(task)
  environment = forensics.ForensicsEnv()
  await environment.reset(task)
  answer = (await environment.step(look('metadata'))).messages[0]['content']
  assert answer == f'iso {photo.iso} jpeg {photo.jpeg}'
  answer = (await environment.step(look('detector', name='twin'))).messages[0]['content']
  named = forged.suspects(photo, 'twin')
  assert answer == ('\n'.join(f'{{"cell": "{x}"}}' for x in named) or 'clean')
  text, picture = (await environment.step(look('crop', cell='e'))).messages[0]['content']
  assert text['text'].startswith('iso ')
  assert grid.READER.read(picture['image_url']['url']).shape == (16, 16, 3)
  wrong = (await environment.step(look('detector', name='oracle'))).messages[0]
  assert wrong['content'].startswith('Error: detector: KeyError')
  # Two in one reply are two looks.
  await environment.step(look('metadata') + look('metadata'))
  late = (await environment.step(look('metadata'))).messages[0]
  assert late['content'] == 'Error: no looks are left.'
  step = await environment.step(f'Verdict: {task.answer}')
  assert step.done and step.reward == pytest.approx(1 - forensics.LOOKS * forensics.COST)
  assert step.metrics['accuracy'] == 1.0


@pytest.mark.parametrize('said', ['authentic', 'Verdict: both', 'Verdict: authentic or'])
def test_no_verdict_is_no_right_verdict(said):
  messages = [{'role': 'assistant', 'content': said}]
  task = forensics.make_tasks(0, 1, 'train', ((),))[0]
  assert task.answer == 'authentic'
  assert forensics.score(task, messages) == {'verdict': 0.0, 'cost': 0.0}


def test_demonstrations_are_right_or_wrong_as_they_say():
  rng = random.Random(0)
  right = {fate: [] for fate in forensics.MIXTURE}
  for fate, said in right.items():
    for i in range(N):
      task = forensics.make_task(str(i), rng, forensics.TRAINED)
      messages = forensics.demonstrate(task, rng, fate)
      said.append(forensics.judge(task, messages)['accuracy'])
      assert sum(m['role'] == 'tool' for m in messages) <= forensics.LOOKS
  shares = {fate: np.mean(said) for fate, said in right.items()}
  assert shares['guess'] < shares['wander'] < shares['right'] > 0.85, shares


def test_players_without_a_policy_are_measured():
  train = forensics.make_tasks(0, 40, 'train', forensics.TRAINED)
  played = forensics.play_without_policy({'new': train}, train)
  alone, vote, early, best, knows = (played[name]['new'] for name in played)
  assert alone == best and vote[1] == 8 and 1 <= early[1] <= 8
  assert knows[0] > max(alone[0], vote[0], early[0])
  kinds = {e.kind for e in itertools.islice(forensics.examples(0), 80)}
  assert kinds == {'read', 'told', *forensics.MIXTURE}


@pytest.mark.usefixtures('no_curves')
def test_a_training_step_runs(model, tmp_path):
  params = runs.run_here(
    gallery.config(model, steps=1, slots=256),
    tmp_path,
    algorithm=algorithms.dr_grpo(length=128),
    make_env=forensics.ForensicsEnv,
    tasks=forensics.make_tasks(0, 2, 'train', forensics.TRAINED),
    evals=None,
  )
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
