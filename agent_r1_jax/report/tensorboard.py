"""A sink of metrics (sinks.py) that writes TensorBoard's events files."""

from collections.abc import Mapping
import os
import pathlib
import socket
import time
from typing import Any

_FLUSH_SECONDS = 10.0


class EventWriter:
  """Writes scalars to a TensorBoard events file, in the calling thread.

  tensorboardX's own writer queues them for a thread, which dies on a full disk; the queue
  then blocks forever.
  """

  run = ''

  def __init__(self, folder: pathlib.Path, resume_step: int | None):
    """Opens a new file for this start of the run.

    TensorBoard then hides `resume_step` and later steps of earlier files.
    """
    from tensorboardX import record_writer, summary
    from tensorboardX.proto import event_pb2

    self._scalar = summary.scalar
    self._messages: Any = event_pb2  # Its classes are created at import.
    self._flushed = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    # With the process id, since two starts in one second would have the same name.
    name = f'events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}'
    self._file = record_writer.RecordWriter(str(folder / name))
    self._write(0, file_version='brain.Event:2')
    if resume_step is not None:
      log = self._messages.SessionLog
      self._write(resume_step, session_log=log(status=log.START))

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes a step's metrics; a later call flushes them, after _FLUSH_SECONDS."""
    for name, value in metrics.items():
      self._write(step, summary=self._scalar(name, value))
    if time.monotonic() - self._flushed > _FLUSH_SECONDS:
      self._file.flush()
      self._flushed = time.monotonic()

  def close(self) -> None:
    """Writes the rest and closes the file."""
    try:
      self._file.flush()
    finally:
      self._file.close()

  def _write(self, step: int, **content: Any) -> None:
    event = self._messages.Event(wall_time=time.time(), step=step, **content)
    self._file.write(event.SerializeToString())
