"""`python ...` for programs that start others: forks.py runs it (see script.Process).

It has this process's files and folder, gets its signals, and ends as it does. What it
reads is empty.
"""

import json
import os
import signal
import socket
import sys


def main(address: str, *command: str) -> None:
  """Ends as `python COMMAND`, run by the process of forks.py at this address."""
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
    requests.connect(f'\0{address}')
    request = json.dumps([command, os.getcwd(), dict(os.environ)])
    said, report = os.pipe()
    socket.send_fds(requests, [request.encode()], [1, 2, report])
    os.close(report)
    with os.fdopen(said) as lines:
      program = int(lines.readline())
      for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(program, number))
      status = int(lines.readline())
  if status < 0:
    if status != -signal.SIGKILL:
      signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
  sys.exit(status)


if __name__ == '__main__':
  main(*sys.argv[1:])
