"""The nursery: a process that has imported all that an engine needs, and forks one when it is told to.

    launcher ──Begin, End──> nursery ──fork──> engine 0, which died      messages: `lives`
             <──Began, Over──        ──fork──> engine 1
             <──Alive─────────────────────────────┘

`python -m lockstep.api.processes.fork_server FOLDER DESCRIPTOR NUMBER`: DESCRIPTOR is one end of a socket pair, the
launcher has the other end; NUMBER is the number of the engine.
Imports take a second, torch several; a fork takes milliseconds, so that an engine that died is soon replaced. The
nursery has one thread, opens no device and no socket, and computes nothing: what is forked from it begins clean.
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

log = logging.getLogger("lockstep.nursery")


class ForkServer:
    """Forks, reaps and reports."""

    def __init__(self, folder: Path, control: socket.socket, engine: int) -> None:
        self.folder, self.control, self.engine = folder, control, engine
        self.generations: dict[int, int] = {}  # of children that were not reaped, by pid
        self._wakeup, self._wake = os.pipe()
        for descriptor in (self._wakeup, self._wake):
            os.set_blocking(descriptor, False)

    def run(self) -> int:
        """Serve until the launcher is gone. In a child this returns as well, with the child's own status."""
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
                            return self._live(generation, PriorState(death, workers))
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

    def _live(self, generation: int, before: PriorState) -> int:
        """Be an engine."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wakeup)
        os.close(self._wake)
        self.control.setblocking(False)

        def alive() -> None:
            try:
                self.control.send(encode(Alive(generation)))
            except BlockingIOError:  # the launcher has not read for long, and will find enough
                return

        return engine_process.main(self.folder, generation, before, alive, self.engine)


def main(arguments: list[str]) -> int:
    """Serve a launcher. Returns the exit status."""
    folder = Path(arguments[0])
    control = socket.socket(fileno=int(arguments[1]))
    settings = children.read_settings(folder)
    start_log(settings.log_level, "engine", settings.log_format)
    signal.signal(signal.SIGINT, lambda *_: None)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # OpenBLAS sees to that
    preload(settings)
    gc.collect()
    gc.freeze()  # else the first collection of each child copies every page
    return ForkServer(folder, control, int(arguments[2])).run()


if __name__ == "__main__":
    try:
        exit_status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        exit_status = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_status)  # a child must not run what was to run at the end of the nursery
