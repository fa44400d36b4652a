"""Latent attention over a compressed cache: what is stored, and that absorbed weights change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="latent attention runs by transformers' code")

from lockstep.runtime.assembly import make_pool  # noqa: E402
from lockstep.runtime.from_transformers import latent  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.page_bytes import page_bytes_of  # noqa: E402
from lockstep.runtime.tiers.page_parts import parts_of  # noqa: E402
from tests.support.architectures import LATENT, greedy_answers, save_architecture, serve  # noqa: E402

NAMES = ("DeepSeek-V2", "DeepSeek-V3")
STORED = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]  # values of a token in a layer


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, greedy_answers(save_architecture(folder, request.param))


@pytest.mark.parametrize(
    "options",
    [{"overlap_depth": 1}, {"attention_backend": "reference"}, {"kv_cache_dtype": "fp8_e4m3"}],
    ids=["", "reference", "fp8"],
)
def test_tokens_are_those_of_transformers(reference: tuple[Path, list[list[int]]], options: dict[str, Any]) -> None:
    """With chunks, cached prefixes, retractions and the canary; KV in fp8 is stored by head, and only has to run."""
    folder, answers = reference
    served = serve(folder, **options)
    assert served.answers == answers or "kv_cache_dtype" in options
    assert served.cached_tokens
    assert served.retractions


def test_a_token_takes_its_latent_and_no_more(reference: tuple[Path, list[list[int]]]) -> None:
    model = build_model(reference[0], torch.float32, backend="transformers")
    assert (model.kv_heads, model.head_dim, model.shares_kv) == (1, STORED, True)
    assert page_bytes_of(model, 4) == 4 * model.layers * STORED * 4
    pool = make_pool(model, 3, 4)
    stored = {tensor.untyped_storage().data_ptr(): tensor.numel() * 4 for tensor in (*pool.keys, *pool.values)}
    assert sum(stored.values()) == (3 + 1) * page_bytes_of(model, 4)
    assert parts_of(pool).size == page_bytes_of(model, 4)  # of a page in host memory


def test_weights_that_are_not_linear_in_the_latent_are_refused(
    reference: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = latent.absorb
    monkeypatch.setattr(latent, "absorb", lambda module, query: right(module, query) * 1.1)
    with pytest.raises(Exception, match="has latents that its attention does not multiply linearly"):
        build_model(reference[0], torch.float32, backend="transformers")
