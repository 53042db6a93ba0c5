"""The page about the engine runs as it stands there."""

import pathlib
import re

import numpy as np
import tiny

from agent_r1_jax.models.files import peft_files, weights


def test_the_page_about_the_engine_runs(tmp_path, capsys):
  text = (pathlib.Path(__file__).parents[1] / 'docs' / 'engine.md').read_text()
  first, second = re.findall(r'```python\n(.*?)```', text, re.S)
  model, names = tiny.save(tmp_path / 'model'), {}
  exec(first, names)
  (best,) = tiny.within(names['main'], model)
  assert isinstance(best, str) and capsys.readouterr().out
  shape, params = weights.load(model)
  params = tiny.add_adapters(params, 2, ['q', 'down'], 4.0, b=0.5)
  peft_files.save(tmp_path / 'adapter', params, 'base', shape)
  exec(second, names)
  named = {'one': str(tmp_path / 'adapter')}
  without, adapted = tiny.within(names['main'], model, named, np.arange(20))
  assert len(without.tokens) == len(adapted.tokens) == 16
  assert without.logprobs[0] != adapted.logprobs[0]
