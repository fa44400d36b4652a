"""Parts of the translation that need no vLLM: adapters, and the budget of multimodal items."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import CopyToHost, EncodeMedia, HybridChanges, LoadFromHost

adapters = pytest.importorskip("lockstep.vllm.adapters", reason="lockstep-vllm is not installed")
media = pytest.importorskip("lockstep.vllm.media")
groups = pytest.importorskip("lockstep.vllm.groups")
tiers = pytest.importorskip("lockstep.vllm.tiers")


def adapter(name: str, number: int, path: str = "/a", *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=load_inplace)


def test_adapter_is_made_available_once_and_again_with_new_weights() -> None:
    names = adapters.AdapterNames()
    assert names.name_of(None) == ("", None)
    name, load = names.name_of(adapter("law", 1))
    assert (name, load.adapter, load.version) == ("1:law", "1:law", 0)
    assert names.name_of(adapter("law", 1)) == ("1:law", None)
    for changed in (adapter("law", 1, load_inplace=True), adapter("law", 1, "/b")):
        _, load = names.name_of(changed)
        assert load.version == names._versions["1:law"].number
    assert load.version == 2
    assert names.name_of(adapter("law", 2))[0] == "2:law"


def item(name: str, offset: int, length: int) -> Any:
    position = SimpleNamespace(offset=offset, length=length, get_num_embeds=lambda: length)
    return SimpleNamespace(identifier=name, modality="audio", mm_position=position)


class Inputs:
    """Requests with items, by name: each item is (identifier, offset, length)."""

    def __init__(self, budget: int, **requests: list[tuple[str, int, int]]) -> None:
        self.inputs = media.EncoderInputs(budget_tokens=budget, look_ahead=0, key=b"k" * 32)
        self.entries: dict[str, Any] = {}
        self.names: dict[bytes, str] = {}
        for name, items in requests.items():
            request = SimpleNamespace(request_id=name, mm_features=[item(*one) for one in items])
            for feature in request.mm_features:
                self.names[self.inputs.digest(feature)] = feature.identifier
            self.inputs.spans_of(request)
            self.entries[name] = SimpleNamespace(request=request)

    def ask(self, name: str, tokens: int, *drop: str) -> None:
        digests = {identifier: digest for digest, identifier in self.names.items()}
        self.inputs.ask(EncodeMedia(digests[name], tokens, 0, tuple(digests[one] for one in drop)))

    def answers(self) -> list[str]:
        return [self.names[one.digest] for one in self.inputs.answers()]


def test_items_are_answered_as_far_as_the_budget_of_a_pass_goes() -> None:
    world = Inputs(50, a=[("x", 0, 30)], b=[("y", 4, 30)])
    world.ask("x", 30)
    world.ask("y", 30)
    assert world.answers() == ["x"]
    assert world.inputs.inputs_of(world.entries["a"], 0, 10) == [0]
    assert world.answers() == ["y"]
    assert world.inputs.inputs_of(world.entries["b"], 0, 4) == []  # the chunk ends in front of the item
    assert world.inputs.inputs_of(world.entries["b"], 4, 8) == [0]
    assert world.inputs.inputs_of(world.entries["b"], 8, 34) == []  # encoded already


def test_items_of_one_request_are_answered_whatever_the_budget() -> None:
    """The core admits it once all are answered, so that none of them may wait for another to be encoded."""
    world = Inputs(50, a=[("x", 0, 30), ("y", 30, 30)], b=[("z", 0, 30)])
    for name in ("x", "y", "z"):
        world.ask(name, 30)
    assert world.answers() == ["x", "y"]
    world.inputs.forget("a")
    assert world.answers() == ["z"]


def test_dropped_items_are_freed_by_the_workers_and_encoded_again() -> None:
    world = Inputs(50, a=[("x", 0, 30)], b=[("y", 0, 30)])
    world.ask("x", 30)
    assert world.answers() == ["x"]
    assert world.inputs.inputs_of(world.entries["a"], 0, 30) == [0]
    world.ask("y", 30, "x")
    assert world.inputs.freed() == ["x"]
    assert world.inputs.freed() == []
    assert world.inputs.inputs_of(world.entries["a"], 0, 30) == [0]
    world.inputs.void()
    assert world.inputs.freed() == ["x"]


def changes(*pairs: tuple[int, int]) -> HybridChanges:
    """Return what gives full pages window pages: pairs of both."""
    pages, window_pages = np.array(pairs, np.int32).T
    return HybridChanges(pages, window_pages)


def test_a_window_page_is_one_block_in_each_window_group() -> None:
    made = groups.KvGroups(["window", "full", "window"], 10, 4)
    made.assign(changes((0, 3), (1, 2)))
    blocks = [1, 2, 3]  # pages 0 to 2
    assert made.windows_of(blocks) == [3, 2, -1]
    assert made.tables(blocks, made.windows_of(blocks)) == ([14, 13, 0], [1, 2, 3], [18, 17, 0])
    made.assign(changes((5, 3)))
    assert made.windows_of([1, 6]) == [-1, 3]


def test_one_group_and_none_have_plain_tables() -> None:
    assert groups.KvGroups(["full"], 10).tables([4, 5], []) == ([4, 5],)
    assert groups.KvGroups([], 10).tables([4, 5], []) == ()


def test_a_state_slot_is_one_block_in_each_group_with_recurrent_state() -> None:
    made = groups.KvGroups(["state", "full", "state"], 10, state_slots=4)
    made.assign(HybridChanges(state_rows=np.array([7], np.int32), state_slots=np.array([2], np.int32)))
    assert made.state_of(7) == 2
    assert made.tables([1, 2], [], made.state_of(7)) == ([13], [1, 2], [17])
    assert made.tables([3], []) == ([], [3], [])  # what a decode adds


def test_a_model_with_recurrent_state_only_has_no_blocks_of_pages() -> None:
    made = groups.KvGroups(["state"], 1_000, state_slots=4)
    made.assign(HybridChanges(state_rows=np.array([0], np.int32), state_slots=np.array([3], np.int32)))
    assert made.tables([5, 6], [], made.state_of(0)) == ([4],)


@pytest.mark.parametrize(
    ("blocks", "number", "rows", "mean", "expected"),
    [
        (1_000, 1, 256, 0, (985, 15)),  # 64 pages and a slot for each request of 1,024 tokens
        (1_000, 3, 256, 0, (958, 14)),
        (1_000, 3, 4, 0, (988, 4)),  # no more slots than rows
        (1_000, 1, 1_000, 16, (512, 488)),  # a request of the whole context has 512 pages
        (100, 1, 256, 0, (98, 2)),  # fewer blocks than such a request
    ],
)
def test_blocks_are_divided_between_pages_and_states(
    blocks: int, number: int, rows: int, mean: int, expected: tuple[int, int]
) -> None:
    assert groups.divided_by_states(blocks, number, 16, 8_192, rows, mean) == expected


@pytest.mark.parametrize(
    ("blocks", "number", "mean", "expected"),
    [
        (1_000, 1, 0, (876, 124)),  # windows of 128 tokens: 9 pages of a request of 1,024 tokens, 64 pages
        (1_000, 5, 0, (587, 82)),
        (1_000, 1, 256, (640, 360)),
        (80, 1, 0, (70, 10)),  # fewer blocks than a request of the whole context: what one row's window leaves
    ],
)
def test_blocks_are_divided_by_a_request_of_mean_length(
    blocks: int, number: int, mean: int, expected: tuple[int, int]
) -> None:
    assert groups.divided(blocks, number, 128, 16, 8_192, 0, mean) == expected


def copy_to_host(copy_id: int, device: list[int], host: list[int]) -> CopyToHost:
    return CopyToHost(copy_id, np.array(device, np.int32), np.array(host, np.int32), generation=3)


def test_copies_are_answered_with_the_result_of_the_plan_that_brought_them(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = SimpleNamespace(PlanCopies=lambda copies: copies)
    monkeypatch.setitem(sys.modules, "lockstep.vllm.host_tier", connector)
    copies = tiers.HostCopies(present=True)
    first, second, third = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    copies.order(copy_to_host(0, [4, 5], [0, 1]))
    copies.order(LoadFromHost(1, np.array([2], np.int32), np.array([7], np.int32)))
    copies.send(first)
    assert first.kv_connector_metadata == [(True, [5, 6], [0, 1]), (False, [8], [2])]  # page p is block p + 1
    assert first.has_sync_kv_loads
    copies.send(second)
    assert not second.has_sync_kv_loads
    assert copies.is_busy
    assert [(one.copy_id, one.pages_done, one.generation) for one in copies.answers(9)] == [(0, 2, 3), (1, 1, 0)]
    assert not copies.is_busy
    copies.order(copy_to_host(2, [6], [2]))
    copies.void()  # its device page belongs to another request by now
    copies.send(third)
    assert third.kv_connector_metadata == []
    assert copies.answers(10) == copies.answers(11) == []
