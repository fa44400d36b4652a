"""Ranks of an engine on other machines, placed by Ray (optional: `pip install "lockstep-runtime[ray]"`).

    engine's process, stage 3 of 3            node of a Ray cluster
    RankGroup ──> RayNodes ──actor──> StageActor ──starts──> worker.py, a process for each rank of stage 1
        │<──────────────── TCP, with a proof of the secret ─────────'

The last stage stays with the engine's process. Every other stage has a bundle of a placement group, with a GPU (or a
core of a CPU) for each of its ranks, so a stage is on one machine, and stages are spread over machines as far as
possible. Nodes need the same version of Lockstep, and the model under the same path.

An actor starts a worker and waits for it; both end with the engine's process. The worker connects to the engine and
both prove that they have the secret, which Ray carried to the actor. Connections of gloo and NCCL between stages, and
the store by which they find each other, are those of torch: without proof and without encryption, for a private network
only, as Ray's own.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any

from torch import distributed as dist

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.link import exactly, prove
from lockstep.runtime.collectives import START_S
from lockstep.runtime.stages import RankPlace

RANK = struct.Struct("<I")
PLACE_S = 60.0  # for Ray to find room for all stages
LOST = 255  # status of a worker whose node or actor was lost
SILENT_S = 30  # without an answer of its system, a node is lost
SECRET = "LOCKSTEP_RANK_SECRET"
HINT = "start a head with `ray start --head --port PORT`; `auto` joins the cluster of this machine"


class StageActor:
    """A process of Ray that starts one worker, and ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host: str, port: int, secret: str, rank: int) -> int:
        """Start the worker of a rank, which connects to the engine. Returns its process id."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.runtime.worker", f"{host}|{port}|{rank}"],
            stdin=subprocess.DEVNULL,
            env={**os.environ, SECRET: secret, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        return self._process.pid

    def wait(self) -> int:
        """Wait for the worker's end. Returns its exit status."""
        assert self._process is not None
        return self._process.wait()

    def kill(self) -> None:
        """Kill the worker."""
        if self._process is not None:
            self._process.kill()


class RayProcess:
    """A worker on a node, with the methods of `subprocess.Popen` that a RankGroup uses."""

    stdout: IO[bytes] | None = None  # Ray keeps the output, in the log of the actor

    def __init__(self, ray: Any, actor: Any, pid: int, node: str) -> None:
        self.pid, self.node = pid, node
        self.returncode: int | None = None
        self._ray, self._actor, self._ended = ray, actor, actor.wait.remote()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            try:
                self.returncode = int(self._ray.get(self._ended, timeout=timeout))
            except self._ray.exceptions.GetTimeoutError as error:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0) from error
            except self._ray.exceptions.RayError:
                self.returncode = LOST
        return self.returncode

    def kill(self) -> None:
        """Kill the worker, without waiting for its node."""
        with suppress(Exception):
            self._actor.kill.remote()


class RayNodes:
    """The workers of all stages but the last one, on nodes of a Ray cluster.

    Args:
        address: `auto`, or HOST:PORT of the head.
        gpus: whether each rank needs a GPU; otherwise it needs a core.
    Raises: ConfigError, also if the cluster has no room for the stages within PLACE_S.
    """

    def __init__(self, address: str, place: RankPlace, *, gpus: bool) -> None:
        try:
            import ray
            from ray.util.placement_group import placement_group, remove_placement_group
        except ImportError as error:
            raise ConfigError(
                f'`ray` is {address}, but ray is not installed\nhint: pip install "lockstep-runtime[ray]"'
            ) from error
        self._ray, self._place, self._remove = ray, place, remove_placement_group
        self._joined = not ray.is_initialized()
        if self._joined:
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise ConfigError(f"`ray`: no Ray cluster at `{address}`: {reason}\nhint: {HINT}") from None
        self.kind = "GPU" if gpus else "CPU"
        util: Any = ray.util
        self.host = str(util.get_node_ip_address())
        self._listener = socket.create_server((self.host, 0))
        self._secret = secrets.token_bytes(32)
        self.store = dist.TCPStore(
            self.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S)
        )
        self._group = placement_group([{self.kind: place.tp}] * (place.pp - 1), strategy="SPREAD")
        self._workers: dict[int, tuple[RayProcess, socket.socket]] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def take(self, rank: int) -> tuple[RayProcess, socket.socket]:
        """Return the worker of a rank and the connection to it."""
        return self._workers[rank]

    def has(self, rank: int) -> bool:
        """Return whether a rank is on a node, and not beside the engine."""
        return not RankPlace(rank, self._place.tp, self._place.pp).stage.is_last

    def close(self) -> None:
        """End all workers, and give their room back."""
        for process, sock in self._workers.values():
            sock.close()
            process.kill()
        self._listener.close()
        with suppress(Exception):  # the cluster may be gone
            self._remove(self._group)
        if self._joined:
            with suppress(Exception):
                self._ray.shutdown()

    def _start(self) -> None:
        """Start the workers of all stages at the same time, and take their connections."""
        ray, place = self._ray, self._place
        if not ray.wait([self._group.ready()], timeout=PLACE_S)[0]:
            there = int(ray.cluster_resources().get(self.kind, 0))
            raise ConfigError(
                f"`ray`: no room for {place.pp - 1} stages of {place.tp} {self.kind}s each within {PLACE_S:g} s; the "
                f"cluster has {there}\nhint: more nodes, or a smaller pp"
            )
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        begun: dict[int, tuple[Any, Any, Any]] = {}
        needs = {"num_gpus": 1} if self.kind == "GPU" else {"num_cpus": 1}
        port = self._listener.getsockname()[1]
        for rank in filter(self.has, range(place.ranks)):
            at = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=RankPlace(rank, place.tp, place.pp).stage.number
            )
            actor = ray.remote(StageActor).options(scheduling_strategy=at, max_concurrency=4, **needs).remote()
            begun[rank] = (actor, actor.start.remote(self.host, port, self._secret.hex(), rank), None)
        sockets: dict[int, socket.socket] = {}
        self._listener.settimeout(START_S)
        while len(sockets) < len(begun):
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                late = ", ".join(str(rank) for rank in begun if rank not in sockets)
                raise ConfigError(f"`ray`: ranks {late} did not connect within {START_S:g} s") from None
            keep_alive(sock)
            try:
                sock.settimeout(START_S)
                prove(sock, self._secret, server=True)
                named = exactly(sock, RANK.size)
            except OSError:  # not a worker of this engine
                sock.close()
                continue
            if named is None or (rank := RANK.unpack(named)[0]) not in begun or rank in sockets:
                sock.close()
                continue
            sock.settimeout(None)
            sockets[rank] = sock
        for rank, (actor, started, _) in begun.items():
            node = sockets[rank].getpeername()[0]
            self._workers[rank] = (RayProcess(ray, actor, int(ray.get(started)), node), sockets[rank])


def connect(address: str) -> socket.socket:
    """Return a worker's connection to its engine, HOST|PORT|RANK. Raises OSError."""
    host, port, rank = address.split("|")
    sock = socket.create_connection((host, int(port)), START_S)
    keep_alive(sock)
    prove(sock, bytes.fromhex(os.environ.pop(SECRET)), server=False)
    sock.sendall(RANK.pack(int(rank)))
    sock.settimeout(None)
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Have a connection end if the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 1000 * SILENT_S),
    ):
        if (option := getattr(socket, name, None)) is not None:  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
