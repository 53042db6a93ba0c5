"""Counts and times of an engine."""

import dataclasses


@dataclasses.dataclass
class Stats:
  """Counts since the engine was made."""

  prefilled: int = 0  # Tokens that prefills computed.
  shared: int = 0  # Tokens that were copied from another row instead of being computed.
  sampled: int = 0  # Tokens that decodes sampled.
  # Calls of the policy that sampled them, each of one row; a call samples one token, or
  # with drafts several.
  calls: int = 0
  steps: int = 0  # Calls of all rows of all decodes, idle rows included.
  # Host time of prefills; the device's time is part of the decode that follows.
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0  # Wall time of decodes.
  # Wall time without anything to compute, while clients waited for tools.
  idle_seconds: float = 0.0
  # Wall time from the end of a decode to the next call to the device, while requests
  # waited.
  host_seconds: float = 0.0
