"""Records of the load of experts over HTTP, from a model with experts; and the errors of a server without a record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
httpx2 = pytest.importorskip("httpx2")

from lockstep.api.observability.expert_load import ExpertFold, imbalance_of  # noqa: E402
from lockstep.core.cluster.expert_placement import ExpertLoads  # noqa: E402
from tests.support.live_server import LiveServer, ask_operator, serving, until  # noqa: E402
from tests.support.small_llm import write_model  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

KEY = "sk-a-key-of-an-operator"
MOE: dict[str, Any] = {
    **SMALL_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(MOE))
    options = ("--model", str(folder), "--random-weights", "3", "--set", "pages=64", "--set", "page_size=4")
    (folder / "keys.toml").write_text(f"[[keys]]\ntenant = 'tests'\nkey = '{KEY}'\nadmin = true\n")
    options += ("--api-keys", str(folder / "keys.toml"), "--admin-socket", str(folder / "admin"))
    with serving(folder / "log", *options, "--set", "expert_load_interval=4") as made:
        yield made


def test_a_record_is_begun_stopped_and_read(server: LiveServer) -> None:
    ask = partial(ask_operator, server.log.parent / "admin", key=KEY)

    headers = {"Authorization": f"Bearer {KEY}"}

    def figures() -> dict[str, float]:
        lines = httpx2.get(f"{server.url}/metrics", headers=headers, timeout=120).text.splitlines()
        return {
            line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "lockstep_expert_" in line[:20]
        }

    def generate(tokens: list[int], drawn: int) -> None:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": drawn, "ignore_eos": True}}
        assert httpx2.post(f"{server.url}/generate", json=body, headers=headers, timeout=120).status_code == 200

    for path in ("/stop_expert_distribution_record", "/dump_expert_distribution_record"):
        status, said = ask(path)
        assert status == 400
        assert said["error"]["message"] == "the load of experts is not being recorded; start a record first"
    assert ask("/start_expert_distribution_record")[0] == 200
    generate([3, 4, 5, 6, 7], 6)
    status, said = ask("/dump_expert_distribution_record")
    assert (status, said["recording"], said["batches"]) == (200, True, 6)
    counts = np.array(said["logical_count"])
    assert counts.shape == (MOE["num_hidden_layers"], 6)
    assert counts.sum(1).tolist() == [10 * 2] * MOE["num_hidden_layers"]  # 5 tokens of the prompt, 5 that were drawn
    assert said["imbalance"] == pytest.approx(counts.max(1) / counts.mean(1), abs=1e-4)
    assert ask("/stop_expert_distribution_record")[0] == 200
    generate([9, 8], 2)
    status, said = ask("/dump_expert_distribution_record")
    assert (said["recording"], said["logical_count"]) == (False, counts.tolist())
    until(lambda: figures().get("lockstep_expert_tokens_total", 0) >= counts.sum())
    assert figures()["lockstep_expert_load_imbalance"] >= 1.0


def test_figures_are_of_the_newest_measurements() -> None:
    assert imbalance_of(np.array([[3, 1], [0, 0]])) == [1.5, 1.0]
    fold = ExpertFold()
    assert fold.figures(None) is None
    first = ExpertLoads(np.array([[4, 0]]), 1)
    found = fold.figures(first)
    assert found is not None
    assert (found.measurements, found.tokens, found.imbalance) == (1, 4, 2.0)
    found = fold.figures(ExpertLoads(np.array([[5, 1]]), 2))
    assert found is not None
    assert (found.tokens, found.imbalance) == (6, 1.0)
    assert fold.figures(ExpertLoads(np.array([[5, 1]]), 2)) == found
