"""The fork server: a process that has imported everything an engine needs, and forks an engine on command.

    launcher ──Begin, KillEngine───> fork server ──fork──> engine 0, which died      messages: `engine_messages`
             <──Began, EngineExited──            ──fork──> engine 1
             <──Alive───────────────────────────────────────┘

`python -m lockstep.api.processes.fork_server FOLDER DESCRIPTOR NUMBER`: DESCRIPTOR is one end of a socket pair whose
other end the launcher holds; NUMBER is the number of the engine. Imports take a second, with torch several; a fork
takes milliseconds, so an engine that died is replaced quickly. The fork server has one thread, opens no device and no
socket, and computes nothing, so a forked engine inherits no such state.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

from lockstep.api.engines import preload
from lockstep.api.observability.logs import start_log
from lockstep.api.processes import children, engine_process
from lockstep.api.processes.claims import PriorState
from lockstep.api.processes.engine_messages import (
    MESSAGE_BYTES_MAX,
    Alive,
    Began,
    Begin,
    EngineExited,
    KillEngine,
    encode,
    read_command,
)

log = logging.getLogger("lockstep.fork_server")


class ForkServer:
    """Forks engines on command, reaps them, and reports their start and end to the launcher."""

    def __init__(self, folder: Path, control: socket.socket, engine: int) -> None:
        self.folder, self.control, self.engine = folder, control, engine
        self.generations: dict[int, int] = {}  # pid -> generation, of children not yet reaped
        self._wakeup, self._wake = os.pipe()
        for descriptor in (self._wakeup, self._wake):
            os.set_blocking(descriptor, False)

    def run(self) -> int:
        """Serve until the launcher ends. Also returns in a forked child, with the exit status of the child."""
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select((self.control.fileno(), 0, self._wakeup), (), ())
            if 0 in ready:  # the launcher holds the other end and never writes
                return 1
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self.control.fileno() in ready:
                match read_command(self.control.recv(MESSAGE_BYTES_MAX)):
                    case Begin(generation, death, workers):
                        pid = os.fork()
                        if not pid:
                            return self._run_engine(generation, PriorState(death, workers))
                        self.generations[pid] = generation
                        self.control.send(encode(Began(generation, pid)))
                    case KillEngine(generation):
                        for pid, other in self.generations.items():
                            if other == generation:
                                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in list(self.generations):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                over = EngineExited(self.generations.pop(pid), os.waitstatus_to_exitcode(status))
                self.control.send(encode(over))

    def _run_engine(self, generation: int, before: PriorState) -> int:
        """Run as an engine, in the forked child. Returns its exit status."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wakeup)
        os.close(self._wake)
        self.control.setblocking(False)

        def alive() -> None:
            try:
                self.control.send(encode(Alive(generation)))
            except BlockingIOError:  # the launcher has not read for long; enough reports wait for it
                return

        return engine_process.main(self.folder, generation, before, alive, self.engine)


def main(arguments: list[str]) -> int:
    """Serve one launcher until it ends. Returns the exit status."""
    folder = Path(arguments[0])
    control = socket.socket(fileno=int(arguments[1]))
    settings = children.read_settings(folder)
    start_log(settings.log_level, "engine", settings.log_format)
    signal.signal(signal.SIGINT, lambda *_: None)
    # OpenBLAS stops its threads before a fork
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    preload(settings)
    gc.collect()
    gc.freeze()  # otherwise the first collection in each child would copy every page
    return ForkServer(folder, control, int(arguments[2])).run()


if __name__ == "__main__":
    try:
        exit_status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        exit_status = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_status)  # a child must not run the exit handlers of the fork server
