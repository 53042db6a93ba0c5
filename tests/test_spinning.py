"""spinning.py: what conftest.py looks for after each file."""

import threading
import time

import spinning


def test_a_thread_that_spins_is_found_until_it_ends():
  ended = threading.Event()

  def spin():
    while not ended.is_set():
      pass

  thread = threading.Thread(target=spin, name='spinning')
  thread.start()
  try:
    # Once a busy machine may give it no time, but not each time.
    assert any('spinning' in spinning.find(0.3) for _ in range(20))
  finally:
    ended.set()
    thread.join()
  assert spinning.find(5.0) == []


def test_what_waits_or_ends_is_no_spinning():
  """A thread that waits takes nothing; one that works for a moment has a pause after."""
  gate = threading.Event()
  waiting = threading.Thread(target=gate.wait, daemon=True)
  working = threading.Thread(target=lambda: [None for _ in range(10**6)], daemon=True)
  waiting.start(), working.start()
  began = time.monotonic()
  assert spinning.find(30.0) == []
  assert time.monotonic() - began < 30
  gate.set()
