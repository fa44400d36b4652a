"""The effects of an arrival: its namespace, its samples, the truncation of its prompt."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Grammar, RequestArrived, SamplingParams, TokenIds
from lockstep.core.contract.samples import sample_count, sample_of
from lockstep.core.requests.table import BASE, Adapter
from lockstep.core.requests.validation import RequestRefused, accepted, cache_namespace

ISOLATED = SchedConfig(isolate_tenants=True)
OPEN = SchedConfig()


def arrived(prompt: int = 6, **fields: Any) -> RequestArrived:
    ids = np.arange(prompt, dtype=np.int32).tobytes()
    return RequestArrived(**{"time_us": 0, "request_id": 7, "prompt": TokenIds(ids), "max_new_tokens": 4, **fields})


def test_the_host_namespace_stands_for_itself() -> None:
    assert cache_namespace(arrived(namespace="law@3", tenant="x"), BASE, OPEN) == "law@3"


def test_no_two_namespaces_coincide_whose_parts_differ() -> None:
    texts = ["", "x", "tenant 1 x ", "\1", "\1tenant 1 x host 0 ", "host 1 x ", "1 x host"]
    for config in (OPEN, ISOLATED):
        asked = [
            arrived(tenant=tenant, namespace=namespace, token_type_ids=types)
            for tenant, namespace, types in product(texts if config is ISOLATED else [""], texts, [b"", b"\0", b"\1"])
        ]
        assert len({cache_namespace(event, BASE, config) for event in asked}) == len(asked)


def test_no_two_namespaces_adapters_or_versions_share_a_cache() -> None:
    texts = ("", "@", "a", "a@1", "a@1@1", "b@1", "host 1 a ", "adapter 3 a@1 ", "\1adapter 3 a@1 host 0  ")
    adapters = [BASE, *(Adapter(name, version) for name in texts if name for version in (0, 1, 11))]
    asked = list(product((arrived(namespace=text) for text in texts), adapters))
    assert len({cache_namespace(event, adapter, OPEN) for event, adapter in asked}) == len(asked)


@pytest.mark.parametrize("field", ["namespace", "tenant"])
def test_what_separates_the_version_of_the_weights_is_in_no_name(field: str) -> None:
    with pytest.raises(RequestRefused, match=f"`{field}` holds a zero character"):
        accepted(arrived(**{field: "x\0001"}), BASE, ISOLATED)


def test_a_grammar_needs_output_to_constrain() -> None:
    grammar = Grammar("regex", "a+", b"digest")
    with pytest.raises(RequestRefused, match="`grammar` constrains output, but `max_new_tokens` is 0"):
        accepted(arrived(grammar=grammar, max_new_tokens=0), BASE, OPEN)


def test_samples_differ_in_id_seed_and_name_only() -> None:
    event = arrived(parallel_samples=3, label="poem", sampling=SamplingParams(temperature=0.8, seed=40))
    assert sample_of(event, 0) is event
    third = sample_of(event, 2)
    assert (third.request_id, third.label, third.sampling) == (9, "poem.2", SamplingParams(temperature=0.8, seed=42))
    assert sample_of(arrived(parallel_samples=2), 1).sampling == SamplingParams(seed=1)


@pytest.mark.parametrize(("asked", "taken"), [(1, 1), (128, 128), (0, 1), (-1, 1), (129, 1), (2**60, 1)])
def test_a_number_of_samples_that_cannot_be_takes_one_id(asked: int, taken: int) -> None:
    assert sample_count(arrived(parallel_samples=asked)) == taken


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [4, 5, 6, 7, 8, 9]), ("right", [0, 1, 2, 3, 4, 5])], ids=["left", "right"]
)
def test_a_long_prompt_loses_one_end(side: Any, kept: list[int]) -> None:
    config = SchedConfig(max_input_tokens=6, truncate_input=side)
    taken = accepted(arrived(10), BASE, config)
    assert np.frombuffer(taken.tokens, np.int32).tolist() == kept
    assert taken.truncated_tokens == 4


@pytest.mark.parametrize(
    "fields",
    [{"logprob_start": 0}, {"token_type_ids": bytes(10)}, {"session": "s"}],
    ids=["logprob_start", "token_type_ids", "session"],
)
def test_what_is_bound_to_positions_is_not_cut(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match="10 tokens, more than max_input_tokens 6"):
        accepted(arrived(10, **fields), BASE, SchedConfig(max_input_tokens=6, truncate_input="left"))


def test_input_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="`truncate_input` must be no, left or right, got `middle`"):
        SchedConfig(truncate_input="middle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`max_input_tokens`"):
        SchedConfig(max_input_tokens=0)
