"""A server's training runs and saved states, as the client reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1_jax.contrib.tinker import training


def list_runs(
  trainings: training.Trainings, states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
  """Lists runs that are active or have saved states, the last active first.

  Args:
    trainings: The active runs.
    states: The result of States.describe_all.
  """
  saved: dict[str, list[Mapping[str, Any]]] = {}
  for state in states:
    run_id = state['tinker_path'].removeprefix('tinker://').split('/')[0]
    saved.setdefault(run_id, []).append(state)
  found = []
  for run_id in {*saved, *trainings.by_id}:
    own, training = saved.get(run_id, []), trainings.by_id.get(run_id)
    ranks = [training.run.shape.rank] if training and training.run else []
    ranks += [state['lora_rank'] for state in own[:1]]
    newest = {state['checkpoint_type']: state for state in reversed(own)}
    times = [state['time'] for state in own[:1]] + [x.last_time for x in [training] if x]
    found.append(
      {
        'training_run_id': run_id,
        'base_model': trainings.states.base,
        'model_owner': 'local',
        'is_lora': True,
        'lora_rank': next(iter(ranks), None),
        'last_request_time': max(times),
        'last_checkpoint': newest.get('training'),
        'last_sampler_checkpoint': newest.get('sampler'),
      }
    )
  return sorted(found, key=lambda run: run['last_request_time'], reverse=True)


def describe_adapter(saved: Mapping[str, Any]) -> dict[str, Any]:
  """Describes the adapter of a state, given the result of States.describe."""
  targets = set(saved['targets'])
  return {
    'base_model': saved['base_model'],
    'is_lora': True,
    'lora_rank': saved['rank'],
    'train_unembed': False,
    'train_mlp': bool(targets - training.ATTENTION),
    'train_attn': bool(targets & training.ATTENTION),
  }
