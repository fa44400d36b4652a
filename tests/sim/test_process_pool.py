"""Worker processes of plans end with the process that started them, however it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

WORKERS = 2
TASK = """
import builtins, socket
builtins.kept = socket.create_connection(('127.0.0.1', {port}))  # closed by the end of the process
builtins.kept.send(builtins.kept.recv(1))
"""
PARENT = """
import sys, threading
from lockstep.sim.run.process_pool import fresh_processes
pool = fresh_processes(int(sys.argv[1]))
for _ in range(int(sys.argv[1])):
    pool.submit(exec, sys.argv[2])
threading.Event().wait()
"""


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "working"])
def test_workers_end_after_their_parent_was_killed(is_idle: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as open_ones:
        server.settimeout(120)
        task = TASK.format(port=server.getsockname()[1])
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(WORKERS), task])
        try:
            workers = [open_ones.enter_context(server.accept()[0]) for _ in range(WORKERS)]
            for worker in workers if is_idle else ():
                worker.sendall(b".")
                assert worker.recv(1) == b"."
        finally:
            parent.kill()
            parent.wait()
        for worker in workers:
            worker.settimeout(120)
            assert worker.recv(1) == b"", "the process has ended"
