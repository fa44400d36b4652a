"""Links between the hosts of two engines: messages survive the way, and both sides notice every end of a link."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any, get_args

import msgspec
import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestArrived, TokenIds
from lockstep.host.handover import wire
from lockstep.host.handover.link import Listener, PeerLink, connect, parsed
from lockstep.host.media.content import content_of

WAIT_S = 20.0
LAYOUT = wire.PageLayout("qwen3", 16, 65536, 2, 4, (wire.LayoutPart("keys 0", "torch.float32", 0, 4096, 2),))
PLACE = wire.StagingPlace("shm", "/proc/1/fd/2", 8, 4 << 20)
BLOCK = wire.BlockLayout("window", 4096, (wire.LayoutPart("keys 1", "torch.float32", 0, 4096, 2),))
REQUEST = RequestArrived(0, request_id=-1, prompt=TokenIds(b"\1\0\0\0"), max_new_tokens=4, transfer_room=9)
RESULTS = wire.PromptResults(-0.5, b"\1\0\0\0", b"\0\0\0\0", {1: -2.0}, {1: {7: -1.0}}, b"\0\0\0\0", b"\0\0\0\0")
FROM_DECODE: list[wire.FromDecode] = [
    wire.PeerHello(wire.PROTOCOL, 2, msgspec.structs.replace(LAYOUT, beside=(BLOCK,), window_tokens=128)),
    wire.Prefill(REQUEST),
    wire.Prefill(REQUEST, (content_of([7, 7], {"pixel_values": [[0.5], [1.5]], "image_grid_thw": [[1, 1, 2]]}),)),
    wire.Accept(9, 32, 1),
    wire.PagesRead(3),
    wire.Outcome(9, "done"),
]
FROM_PREFILL: list[wire.FromPrefill] = [
    wire.PeerWelcome(wire.PROTOCOL, 0, LAYOUT, (PLACE,)),
    wire.Offered(9),
    wire.PagesReady(9, 3, 2, 5, (1, 2), 1),
    wire.PromptDone(9, 42, 1, 16, True, RESULTS),
    wire.Stop(9, "why"),
]


def test_every_message_survives_the_way() -> None:
    assert {type(one) for one in FROM_DECODE} == set(get_args(wire.FromDecode))
    assert {type(one) for one in FROM_PREFILL} == set(get_args(wire.FromPrefill))
    assert [wire.read_from_decode(wire.encode(one)) for one in FROM_DECODE] == FROM_DECODE
    assert [wire.read_from_prefill(wire.encode(one)) for one in FROM_PREFILL] == FROM_PREFILL
    with pytest.raises(wire.LinkError, match="a message of 3 bytes that cannot be read"):
        wire.read_from_decode(b"abc")


class Ends:
    """Two ends of a link: what each received, and why it ended."""

    def __init__(self, address: str, secrets: tuple[bytes, bytes] = (b"s", b"s")) -> None:
        self.got: SimpleQueue[Any] = SimpleQueue()
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.accepted: SimpleQueue[PeerLink] = SimpleQueue()
        self.listener = Listener(address, secrets[0], self._accept)
        self.ours = PeerLink("ours", lambda: connect(self.listener.address, secrets[1]), self._take, self._end)
        self.ours.start()

    def _accept(self, sock: socket.socket) -> None:
        theirs = PeerLink("theirs", lambda: sock, self._take, self._end)
        theirs.start()
        self.accepted.put(theirs)

    def _take(self, link: PeerLink, frame: bytes) -> None:
        self.got.put(wire.read_from_decode(frame))

    def _end(self, link: PeerLink, reason: str) -> None:
        self.lost.put(reason)


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'kv'}" if request.param == "unix" else "tcp:127.0.0.1:0"


def test_messages_arrive_in_order_and_an_end_is_noticed_on_both_sides(address: str) -> None:
    ends = Ends(address)
    for message in FROM_DECODE * 20:
        ends.ours.send(message)
    assert [ends.got.get(timeout=WAIT_S) for _ in range(20 * len(FROM_DECODE))] == FROM_DECODE * 20
    ends.accepted.get(timeout=WAIT_S).close()
    assert [ends.lost.get(timeout=WAIT_S) for _ in range(2)]
    ends.ours.send(FROM_DECODE[0])  # dropped
    ends.ours.join(WAIT_S)
    ends.listener.close()


def test_a_message_that_cannot_be_read_ends_the_link(address: str) -> None:
    ends = Ends(address)
    ends.ours.send(FROM_PREFILL[1])
    reasons = [ends.lost.get(timeout=WAIT_S) for _ in range(2)]
    assert any("cannot be read" in reason for reason in reasons)
    ends.listener.close()


def test_another_secret_is_refused() -> None:
    ends = Ends("tcp:127.0.0.1:0", (b"s", b"t"))
    assert "secret" in ends.lost.get(timeout=WAIT_S) or ends.accepted.empty()
    assert ends.got.empty()
    ends.listener.close()


def test_a_listener_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(tmp_path / "kv"))
    left.close()  # its file stays, as after the kill of an engine
    ends = Ends(f"unix:{tmp_path / 'kv'}")
    ends.ours.send(FROM_DECODE[0])
    assert ends.got.get(timeout=WAIT_S) == FROM_DECODE[0]
    ends.ours.close()
    ends.listener.close()
    assert not (tmp_path / "kv").exists()


def test_a_link_to_nothing_ends_at_once(tmp_path: Path) -> None:
    over = threading.Event()
    link = PeerLink("none", lambda: connect(f"unix:{tmp_path / 'none'}", b""), lambda *_: None, lambda *_: over.set())
    link.send(FROM_DECODE[0])
    link.start()
    assert over.wait(WAIT_S)


@pytest.mark.parametrize("given", ["kv", "unix:", "tcp:host", "tcp::1", "http:a:1"])
def test_an_address_is_unix_or_tcp(given: str) -> None:
    with pytest.raises(ConfigError, match="is neither unix:PATH nor tcp:HOST:PORT"):
        parsed(given)
