"""The tests that a change needs while one works; changed.py."""

import changed


def test_the_tests_of_a_change_are_those_of_its_importers_too():
  imported = {
    'agent_r1_jax/rl/losses.py': set(),
    'agent_r1_jax/rl/learner.py': {'agent_r1_jax/rl/losses.py'},
    'tests/test_learner.py': {'agent_r1_jax/rl/learner.py'},
    'tests/test_losses.py': {'agent_r1_jax/rl/losses.py'},
    'tests/test_chat.py': set(),
    'tests/tiny.py': set(),
  }
  chosen = changed.choose(['agent_r1_jax/rl/losses.py'], imported)
  assert chosen == ['tests/test_losses.py', 'tests/test_learner.py']
  assert changed.choose(['tests/test_chat.py'], imported) == ['tests/test_chat.py']
  assert changed.choose(['tests/tiny.py'], imported) == []


def test_imports_are_read_from_this_repository():
  imported = changed.read_imports()
  assert 'agent_r1_jax/rl/losses.py' in imported['agent_r1_jax/rl/learner.py']
  assert 'tests/tiny.py' in imported['tests/test_learner.py']
  nearest = changed.choose(['agent_r1_jax/models/files/peft_files.py'], imported)
  assert 'tests/test_adapter_files.py' in nearest
