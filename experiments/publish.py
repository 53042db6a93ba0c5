"""Writes the model card of a run, and uploads its model to the Hugging Face Hub.

  agent-r1-jax publish --workdir=runs/quickstart
  agent-r1-jax publish --workdir=runs/quickstart --repo=USER/NAME

The first writes WORKDIR/model_card.md and uploads nothing. You may edit the card, which
only --rewrite replaces. The second lists its files, and uploads the card as README.md
with the files of WORKDIR/model, in one commit, to a repository that is private without
--public. With --adapter it is adapter_card.md and WORKDIR/adapter.

`hf auth login`, or HF_TOKEN, identifies you; HF_ENDPOINT is another hub.
agent_r1_jax/contrib/hub describes the content of the card.
"""

import json
import pathlib

from absl import app, flags

from agent_r1_jax.contrib.hub import publishing
from agent_r1_jax.host import runtime

_WORKDIR = flags.DEFINE_string('workdir', 'runs/quickstart', 'Directory of the run.')
_REPO = flags.DEFINE_string('repo', '', 'USER/NAME on the Hub; empty uploads nothing.')
_PUBLIC = flags.DEFINE_bool('public', False, 'Whether everybody may read it.')
_ADAPTER = flags.DEFINE_bool(
  'adapter', False, 'Whether adapter/ is published, not model/.'
)
_BASE = flags.DEFINE_string(
  'base_model', '', 'The base model on the Hub, if it is not found.'
)
_LICENSE = flags.DEFINE_string(
  'license', '', "The licence's name on the Hub: apache-2.0."
)
_REWRITE = flags.DEFINE_bool('rewrite', False, 'Whether model_card.md is written again.')

# The origins of downloads: their base models need no --base_model.
_MANIFEST = pathlib.Path(__file__).parents[1] / 'third_party' / 'manifest.json'


def main(_):
  runtime.quiet_logging()
  try:
    publishing.publish(
      pathlib.Path(_WORKDIR.value),
      repository=_REPO.value,
      part='adapter' if _ADAPTER.value else 'model',
      public=_PUBLIC.value,
      license_id=_LICENSE.value,
      base=_BASE.value,
      downloads=json.loads(_MANIFEST.read_text(encoding='utf-8'))['entries'],
      rewrite=_REWRITE.value,
    )
  except (OSError, ValueError) as error:
    raise SystemExit(str(error)) from None


if __name__ == '__main__':
  app.run(main)
