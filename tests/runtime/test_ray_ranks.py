"""Pipeline stages on nodes of a Ray cluster: two nodes on this machine, and the tokens of one plain engine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime import ranks as ranks_module  # noqa: E402
from lockstep.runtime.errors import EngineStopped  # noqa: E402
from tests.support.live_server import until  # noqa: E402

SMALL: dict[str, Any] = {"device": "cpu", "grammar_backend": "none", "pages": 200, "page_size": 16, "debug": True}
PROMPTS = [[3 + number, 7, 11, *range(20, 20 + 5 * number)] for number in range(12)]
GREEDY = Params(max_new_tokens=8, ignore_eos=True)


def test_without_ray_the_option_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^`ray` is auto, but ray is not installed\nhint: pip install"):
        LLM(pp=2, ray="auto", **SMALL)


def test_one_stage_needs_no_other_machine() -> None:
    with pytest.raises(ConfigError, match="`ray` is auto, but the engine has one stage"):
        LLM(ray="auto", **SMALL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores for actors, and a node with two."""
    pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.add_node(num_cpus=2)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def test_a_stage_on_a_node_gives_the_tokens_of_one_stage(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "LAST_WORD_S", 60.0)
    with LLM(**SMALL) as single:
        expected = [one.token_ids for one in single.generate(PROMPTS, GREEDY)]
    with LLM(**SMALL, pp=2, tp=2, ray=cluster.address) as llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.group is not None
        beside, *others = llm.group._workers
        assert not beside.where
        assert all(worker.where for worker in others)
        os.kill(others[0].process.pid, signal.SIGKILL)
        until(lambda: bool(llm.host.failure), 120)
        with pytest.raises(EngineStopped, match=r"rank 2, stage 1 of 2 \(process \d+ on .*\) was ended by SIGKILL"):
            llm.generate(PROMPTS, GREEDY)


def test_a_cluster_without_room_is_refused_with_its_size(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.ray_ranks.PLACE_S", 2.0)
    with pytest.raises(ConfigError, match=r"`ray`: no room for 3 stages of 1 CPUs each within 2 s; the cluster has 2"):
        LLM(**SMALL, pp=4, ray=cluster.address)
