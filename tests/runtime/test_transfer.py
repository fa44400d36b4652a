"""Pages between engines: staging memory by each transport, and the heads that ranks of any number need of others."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.handover.kv import Fetch  # noqa: E402
from lockstep.host.handover.link import prove  # noqa: E402
from lockstep.host.handover.wire import StagingPlace  # noqa: E402
from lockstep.runtime import LLM  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from lockstep.runtime.stages import RankPlace  # noqa: E402
from lockstep.runtime.tiers.page_parts import PageParts, parts_of  # noqa: E402
from lockstep.runtime.transfer.blocks import SentBlocks, parts_in  # noqa: E402
from lockstep.runtime.transfer.lead import EngineTransport  # noqa: E402
from lockstep.runtime.transfer.rank import RankPages  # noqa: E402
from lockstep.runtime.transfer.slices import heads_of, sources_of  # noqa: E402
from lockstep.runtime.transfer.transports import (  # noqa: E402
    TransferFailed,
    check_transport,
    make_staging,
    open_reader,
)

CPU = torch.device("cpu")
HEADS, PAGES, PAGE_SIZE, HEAD_DIM, LAYERS = 4, 20, 4, 8, 3
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"))


@pytest.mark.parametrize("name", ["shm", "tcp", NIXL])
def test_a_reader_gets_the_bytes_of_a_slot(name: Any) -> None:
    staging = make_staging(name, 3, 5000, CPU)
    reader = open_reader(staging.place, CPU)
    for turn in range(2):
        for slot in range(3):
            staging.slot(slot)[:] = torch.randint(0, 255, (5000,), dtype=torch.uint8)
        for slot, size in ((2, 5000), (0, 1), (1, 4999)):
            assert torch.equal(reader.read(slot, size), staging.slot(slot)[:size]), turn
    reader.close()
    staging.close()


def test_a_sender_that_has_ended_is_found() -> None:
    staging = make_staging("tcp", 1, 100, CPU)
    reader = open_reader(staging.place, CPU)
    staging.close()
    with pytest.raises(TransferFailed, match=r"closed its connection|connection to the prefill engine failed"):
        reader.read(0, 100)
    reader.close()
    with pytest.raises(ConfigError, match="cannot be reached"):
        open_reader(staging.place, CPU)
    gone = make_staging("shm", 1, 100, CPU)
    gone.close()
    with pytest.raises(ConfigError, match=r"cannot be opened.*\n.*--transfer-transport tcp"):
        open_reader(gone.place, CPU)


def test_a_connection_without_the_secret_gets_no_bytes() -> None:
    staging = make_staging("tcp", 1, 100, CPU)
    host, port, _ = staging.place.address.split("|")
    other = msgspec.structs.replace(staging.place, address=f"{host}|{port}|{bytes(32).hex()}")
    with pytest.raises(ConfigError, match=r"does not have the secret|closed the connection|reset"):
        open_reader(other, CPU).read(0, 100)
    staging.close()
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(OSError, match=r"closed the connection|Broken pipe"):
        prove(ours, b"secret", server=True)
    ours.close()


def test_an_unknown_or_absent_transport_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="`transfer_transport` must be shm, tcp, nixl, got `rdma`"):
        check_transport("rdma")
    monkeypatch.setattr("lockstep.runtime.transfer.transports.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="`transfer_transport` is nixl, which is not installed"):
        check_transport("nixl")
    with pytest.raises(ConfigError, match="`transfer_checksums` is for prefill and decode engines"):
        LLM(transfer_checksums=True)


# ---------------------------------------------------------------------------------------------------------------- heads


def test_ranks_have_their_heads() -> None:
    assert [list(heads_of(rank, 2, 4)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(heads_of(rank, 4, 2)) for rank in range(4)] == [[0], [0], [1], [1]]


def whole_model() -> list[Any]:
    """Keys and values of all heads, by layer."""
    shape = (PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
    return [torch.randn(shape) for _ in range(2 * LAYERS)]


def rank_of(
    full: list[Any] | None, rank: int, ranks: int, stages: int = 1, scales: Any = None
) -> tuple[RankPages, KvPool, Any]:
    """The pages of one rank, with its layers and heads of the model, and a part that is the same on every rank."""
    place = RankPlace(rank, ranks, stages)
    own, layers = heads_of(place.column, ranks, HEADS), place.stage.layers(LAYERS)
    pool = KvPool(len(layers), PAGES, PAGE_SIZE, len(own), HEAD_DIM, torch.float32, CPU)
    tags = torch.zeros(PAGES + 1, PAGE_SIZE, dtype=torch.int64)
    if full is not None:
        tags[:PAGES] = torch.arange(PAGES * PAGE_SIZE).view(PAGES, PAGE_SIZE)
        for number, layer in enumerate(layers):
            pool.keys[number][:PAGES] = full[2 * layer][:, :, own.start : own.stop]
            pool.values[number][:PAGES] = full[2 * layer + 1][:, :, own.start : own.stop]
    named = [(one.name, one.tensor) for one in parts_of(pool).parts]
    pages = PageParts([*named, ("tags", tags)])
    blocks = [SentBlocks("page", pages, parts_in(pages, layers.start, scales))]
    made = RankPages(blocks, PAGE_SIZE, place=place, kv_heads=HEADS, model="m", checksums=True)
    return made, pool, tags


SPLITS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (8, 2), (1, 3), (4, 3)]
"""Ranks of each stage, and stages."""


@pytest.mark.parametrize("receivers", SPLITS)
@pytest.mark.parametrize("senders", SPLITS)
def test_ranks_and_stages_of_any_number_get_their_heads_and_layers_from_any_number(
    senders: tuple[int, int], receivers: tuple[int, int]
) -> None:
    full = whole_model()
    sending = [rank_of(full, rank, *senders)[0] for rank in range(prod(senders))]
    for one in sending:
        one.pages_per_slot = 8  # less memory
    places = tuple(one.open_staging(0) for one in sending)
    pages, into = np.array([3, 9, 4, 17, 0], np.int32), np.array([11, 2, 19], np.int32)
    checksums = tuple(one.stage(0, 2, pages) for one in sending)
    assert all(checksums)
    for rank in range(prod(receivers)):
        made, pool, tags = rank_of(None, rank, *receivers)
        made.open_sender(5, sending[0].layout, places)
        made.fetch(5, Fetch(2, 5, 2, into, checksums))
        place = RankPlace(rank, *receivers)
        own = heads_of(place.column, place.tp, HEADS)
        for number, layer in enumerate(place.stage.layers(LAYERS)):
            for got, right in ((pool.keys[number], full[2 * layer]), (pool.values[number], full[2 * layer + 1])):
                assert torch.equal(got[into.tolist()], right[[4, 17, 0]][:, :, own.start : own.stop])
                assert not got[[3, 9]].any()
        assert torch.equal(tags[into.tolist()], torch.arange(PAGES * PAGE_SIZE).view(PAGES, PAGE_SIZE)[[4, 17, 0]])
        made.close_all()
    for one in sending:
        one.close_all()


def test_a_link_that_ends_while_the_engine_closes_releases_nothing_twice() -> None:
    transport = EngineTransport(rank_of(whole_model(), 0, 1)[0])
    sender = transport.sender("decode-0")
    transport.close()
    sender.close()  # by the thread of the link, which finds its peer gone


def test_other_bytes_than_those_that_were_sent_fail() -> None:
    sender, receiver = rank_of(whole_model(), 0, 1)[0], rank_of(None, 0, 1)[0]
    receiver.open_sender(0, sender.layout, (sender.open_staging(0),))
    pages = np.array([1, 2], np.int32)
    checksum = sender.stage(0, 0, pages)
    with pytest.raises(TransferFailed, match="bytes of rank 0 have another checksum"):
        receiver.fetch(0, Fetch(0, 2, 0, pages, (checksum ^ 1,)))
    receiver.fetch(0, Fetch(0, 2, 0, pages, (checksum,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "n"}, "the prefill engine has `model` m, the decode engine n"),
        ({"page_size": 8}, "`page_size` 4, the decode engine 8"),
        ({"parts": ()}, "only one has model keys 0, model keys 1"),
        ({"parts": {"size": 1}}, "`model keys 0` of a page has 512 bytes there, and 1 here"),
        ({"parts": {"dtype": "torch.int8"}}, "`model keys 0` has the number type torch.float32 on the prefill engine"),
        ({"ranks": 2, "kv_heads": 0}, "no KV heads that 1 and 2 ranks could share"),
    ],
)
def test_pages_of_another_meaning_are_refused_with_the_difference(change: dict[str, Any], message: str) -> None:
    layout = rank_of(None, 0, 1)[0].layout
    if of_parts := change.get("parts"):
        change = {"parts": tuple(msgspec.structs.replace(one, **of_parts) for one in layout.parts)}
    there = msgspec.structs.replace(layout, kv_heads=change.get("kv_heads", HEADS)) if "ranks" in change else layout
    place = StagingPlace("shm", "", 1, 1, layout.page_bytes, layout.parts)
    with pytest.raises(ConfigError, match=message):
        sources_of(there, [place], msgspec.structs.replace(layout, **change), 0)


def test_scales_of_kv_are_those_of_the_same_layer() -> None:
    """Each stage has the scales of its own layers, and an engine of one stage those of all."""
    scales = [(0.5, 0.25), (2.0, 1.0), (1.0, 4.0)]
    stages = [rank_of(None, rank, 1, 2, scales=scales[slice(*part)])[0] for rank, part in enumerate(((1, 3), (0, 1)))]
    places = [one.open_staging(0) for one in stages]
    whole, layout = rank_of(None, 0, 1, scales=scales)[0].layout, stages[0].layout
    (of_pages,) = sources_of(layout, places, whole, 0)
    assert {rank: len(copies) for rank, copies in of_pages.items()} == {0: 5, 1: 2}
    for one in stages:
        assert sources_of(layout, places, one.layout, 0, all_layers=False)
    other = rank_of(None, 0, 1, scales=[*scales[:2], (1.0, 5.0)])[0].layout
    with pytest.raises(ConfigError, match=r"`model values 2` has the number type torch.float32 x 4.0 on the prefill"):
        sources_of(layout, places, other, 0)
    for one in stages:
        one.close_all()
