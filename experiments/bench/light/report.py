"""Makes the table in docs/results/performance.md from the lines of first light."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.bench.light import lines as lines_lib
from experiments.bench.light.lines import LEAST_RATIO

_HEAD = ('part', 'what', 'measured', 'bound', 'of the bound', 'published', 'further')
# The fields in the last column -> their names in it.
_FURTHER = {
  'tokens_per_second': 'tokens/s',
  'tokens_per_call': 'tokens a call',
  'mfu': 'MFU',
  'attention': 'attention',
  'ours': 'ours, tokens/s',
  'first_seconds': 's with compilation',
  'compiling': 'programs that were compiled meanwhile',
  'peak_bytes': 'bytes at the peak',
  'peak_bytes_so_far': 'bytes at the peak so far',
  'times': 's of',
  'machine/idle': 'share of waiting for tools',
  'train/behaviour_kl': 'KL of sampler and learner',
}


def write(lines: Sequence[lines_lib.Line]) -> str:
  """Writes the table, the failures, and a sentence for each ratio below LEAST_RATIO."""
  parts = [_write_about(lines), _write_table(lines)]
  if failed := [line for line in lines if 'failed' in line]:
    rows = (f'- {x["part"]}, {x["what"]}: {x["failed"]}' for x in failed)
    parts.append('Not measured, or wrong:\n\n' + '\n'.join(rows))
  if low := list(_explain(lines)):
    parts.append(f'Below {LEAST_RATIO:g} of the bound:\n\n' + '\n'.join(low))
  return '\n\n'.join(parts) + '\n'


def _write_about(lines: Sequence[lines_lib.Line]) -> str:
  find = lambda what: next((x for x in lines if x.get('what') == what), {})
  device, begun = find('device'), find('begun')
  packages = device.get('packages', {})
  facts = [device.get('device', 'an unknown device')]
  facts += [f'{name} {packages[name]}' for name in ('jax', 'flax') if name in packages]
  if begun.get('commit'):
    facts.append(f'commit {begun["commit"]}')
  return ', '.join(facts) + '.'


def _write_table(lines: Sequence[lines_lib.Line]) -> str:
  rows = [_HEAD, ['---'] * len(_HEAD)]
  for line in lines:
    if 'measured' not in line:
      continue
    unit, bound, published = line['unit'], line.get('bound'), line.get('published')
    further = (
      f'{name} {_format(line[key])}'
      for key, name in _FURTHER.items()
      if line.get(key) is not None
    )
    rows.append(
      (
        line['part'],
        line['what'],
        f'{_format(line["measured"])} {unit}',
        '' if bound is None else _format(bound),
        f'{line["ratio"]:.2f}' if 'ratio' in line else '',
        '' if published is None else f'MFU {published:.3f}',
        ', '.join(further),
      )
    )
  return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def _explain(lines: Sequence[lines_lib.Line]) -> Iterator[str]:
  """Yields a sentence for each low ratio: where the time goes, by its profile."""
  profiles = {x['what']: x for x in lines if x['part'] == 'profile' and 'shares' in x}
  for line in lines:
    if line.get('ratio', 1) >= LEAST_RATIO:
      continue
    text = f'- {line["part"]}, {line["what"]}: {line["ratio"]:.2f} of the bound; '
    found = profiles.get(line['what'])
    if found is None or found.get('of') != line['part']:
      yield text + 'there is no profile of it.'
      continue
    shares = [f'{kind} {share:.0%}' for kind, share in found['shares'].items()][:4]
    name, share = next(iter(found['largest'].items()))
    yield (
      f'{text}of the busy time {", ".join(shares)}; the largest is `{name}` with '
      f'{share:.0%}; the device is idle {found["idle"]:.0%} of the time.'
    )


def _format(x: Any) -> str:
  """Formats a number with three digits, a dict of values, or a string."""
  if isinstance(x, dict):
    return ' '.join(f'{key} {_format(value)}' for key, value in x.items())
  return x if isinstance(x, str) else f'{x:.3g}' if abs(x) < 1e3 else f'{x:,.0f}'
