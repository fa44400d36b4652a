"""Passes in pieces equal passes that are launched whole, and padding changes nothing.

Without a GPU, `EagerPieces` runs padded passes whose padding becomes NaN in the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import RequestRetracted  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.graphs import EagerGraphs, check_graph_mode  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.lora.batch import HIGH_TILE, LOW_TILE, FixedLayout, lay_out  # noqa: E402
from lockstep.runtime.pieces import EagerPieces, PieceGraphs, piece_sizes  # noqa: E402
from tests.runtime.test_drafting import accepted_counts  # noqa: E402
from tests.runtime.test_host import RETRACTING, SETTINGS, random_requests  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.heads import saved_head  # noqa: E402
from tests.support.small_llm import SMALL, write_weights  # noqa: E402
from tests.support.small_runtime import SAMPLED, SMALL_QWEN3, Foreseeing, ForeseeingTree, SmallRuntime, alone  # noqa: E402

CPU = torch.device("cpu")
EXPERTS: dict[str, Any] = {
    **SMALL_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
STIRRED: dict[str, Any] = {"batching": "mixed", "retract_every": 5, "chunked_prefill_size": 8}
NGRAMS: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 3}
TREES: dict[str, Any] = {"speculative_method": "eagle", "speculative_topk": 3, "num_speculative_tokens": 7}


def test_sizes_are_powers_of_two_then_steps() -> None:
    assert piece_sizes(0) == ()
    assert piece_sizes(3) == (3,)
    assert piece_sizes(40) == (4, 8, 16, 32, 40)
    assert piece_sizes(512) == (4, 8, 16, 32, 64, 128, 256, 320, 384, 448, 512)


# ------------------------------------------------------------------------------------------------ over a small executor


@pytest.mark.parametrize("name", SETTINGS)
def test_every_request_is_answered_as_if_it_were_alone(name: str) -> None:
    """With the canary on, in any setting of the scheduler: chunks, mixed batches, retractions."""
    runtime = SmallRuntime(pieces=EagerPieces(), graphs=EagerGraphs(), eos_token_ids=(5,), **SETTINGS[name])
    requests = random_requests(len(name), 14)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    for answer, (prompt, count) in zip(answers, requests, strict=True):
        assert answer.tokens == alone(prompt, count, stops=(5,))
    assert bool(runtime.decided(RequestRetracted)) == (name in RETRACTING)
    pieces, graphs = runtime.executor.pieces, runtime.executor.graphs
    assert pieces is not None
    assert graphs is not None
    assert pieces.replays > 5
    assert pieces.replays + graphs.replays == runtime.executor.forwards


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", [Foreseeing, ForeseeingTree])
def test_drafts_are_verified_in_pieces(depth: int, drafter: Any) -> None:
    """Positions of verifying rows are on the device only; of trees, slots are not those of positions."""
    trees: dict[str, Any] = TREES if drafter is ForeseeingTree else {}
    runtime = SmallRuntime(
        pieces=EagerPieces(),
        piece_sizes=(4, 16, 96),
        drafter=drafter,
        overlap_depth=depth,
        canary=not trees,
        **{**NGRAMS, **trees},
    )
    requests = random_requests(depth, 10)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    assert [answer.tokens for answer in answers] == [alone(*one) for one in requests]
    assert runtime.executor.pieces is not None
    assert runtime.executor.pieces.replays == runtime.executor.forwards
    assert max(accepted_counts(runtime)) > 1


def test_larger_passes_run_whole() -> None:
    runtime = SmallRuntime(pieces=EagerPieces(), piece_sizes=(2, 6))
    requests = random_requests(3, 8)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    assert [answer.tokens for answer in answers] == [alone(*one) for one in requests]
    assert runtime.executor.pieces is not None
    counts = [len(plan.token_ids) + plan.rows.size - plan.extend_rows for plan in runtime.plans]
    assert runtime.executor.pieces.replays == sum(count <= 6 for count in counts) > 0
    assert max(counts) > 6


def test_padding_writes_no_kv_and_stale_tokens_become_padding() -> None:
    """A pass of 3 tokens behind one of 8: no slot but theirs changes, and the others are zeros when the model runs."""
    runtime = SmallRuntime(pieces=EagerPieces(), piece_sizes=(8,), graphs=None, max_running_requests=4)
    pool = runtime.executor.attention.pool  # type: ignore[attr-defined]
    seen: list[tuple[list[int], list[int], int]] = []
    forward = runtime.model.forward

    def watched(batch: Any, attention: Any) -> Any:
        before = pool.values[0].clone()
        found = forward(batch, attention)
        changed = int((pool.values[0] != before).sum())
        seen.append((batch.token_ids.tolist(), batch.positions.tolist(), changed))
        return found

    runtime.model.forward = watched  # type: ignore[method-assign]
    runtime.submit([41, 42, 43, 44, 45, 46, 47, 48], 1)
    runtime.run()
    runtime.submit([51, 52, 53], 1)
    runtime.run()
    assert seen == [
        ([41, 42, 43, 44, 45, 46, 47, 48], [0, 1, 2, 3, 4, 5, 6, 7], 8),
        ([51, 52, 53, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0], 3),
    ]


def test_what_comes_beside_tokens_is_the_same() -> None:
    """Hidden states and vectors leave the buffer before the next pass overwrites it."""

    def run(pieces: Any) -> list[Any]:
        runtime = SmallRuntime(pieces=pieces, overlap_depth=2)
        answers = [
            runtime.submit(prompt, count, return_hidden_states=True, sampling=SAMPLED, logprob_start=0)
            for prompt, count in random_requests(11, 6)
        ]
        runtime.run()
        return answers

    for found, expected in zip(run(EagerPieces()), run(None), strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == expected.logprobs
        assert found.extras.prompt_logprobs == expected.extras.prompt_logprobs
        assert found.extras.hidden_states.keys() == expected.extras.hidden_states.keys()
        for position, states in expected.extras.hidden_states.items():
            np.testing.assert_array_equal(found.extras.hidden_states[position], states)


# ---------------------------------------------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_weights(tmp_path_factory.mktemp(name), config)
        for name, config in (("dense", SMALL_QWEN3), ("experts", EXPERTS))
    }


def answers_of(folder: Path, mode: str, **options: Any) -> tuple[list[list[int]], PieceGraphs | None]:
    """Greedy and sampled answers, and the passes in pieces."""
    prompts = [[3 + n, 17, 9, n, 17, 9] * (1 + n % 4) for n in range(9)]
    params = [Params(max_new_tokens=6 + n, temperature=n % 2 * 0.8, seed=n, ignore_eos=True) for n in range(9)]
    with LLM(folder, cuda_graphs=mode, device="cpu", grammar_backend="none", **{**SMALL, **options}) as llm:  # type: ignore[arg-type]
        found = [one.token_ids for one in llm.generate(prompts, params)]
        executor: Any = llm.host.executor
    return found, getattr(executor, "executor", executor).pieces


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed, retracted": ("dense", {**STIRRED, "debug": True, "overlap_depth": 1}),
    "mixed, one at a time": ("dense", {**STIRRED, "overlap_depth": 0}),
    "experts": ("experts", STIRRED),
    "n-grams": ("dense", {**NGRAMS, "overlap_depth": 1, "debug": True}),
    "two ranks": ("dense", {"tp": 2, **STIRRED}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_llm_draws_the_same_tokens(kind: str, folders: dict[str, Path]) -> None:
    folder, options = KINDS[kind]
    plain, none = answers_of(folders[folder], "off", **options)
    cut, pieces = answers_of(folders[folder], "eager", **options)
    assert cut == plain
    assert none is None
    assert pieces is not None
    assert pieces.replays > 5


def test_a_draft_model_and_a_head_that_reads_layers_draft_as_without(tmp_path: Path) -> None:
    """The inputs of layers that a head of EAGLE-3 reads are kept beside the hidden states."""
    options: dict[str, Any] = {"num_speculative_tokens": 2, "pages": 200, "chunked_prefill_size": 16}
    for drafter in (demo_folder(), saved_head(tmp_path / "head", 3)):
        plain, _ = answers_of(demo_folder(), "off", draft_model=str(drafter), **options)
        cut, pieces = answers_of(demo_folder(), "eager", draft_model=str(drafter), **options)
        assert cut == plain
        assert pieces is not None
        assert pieces.replays > 5


def test_adapters_are_added_in_pieces(tmp_path: Path) -> None:
    adapters = {"all": write_adapter(tmp_path / "all", 1), "few": write_adapter(tmp_path / "few", 2, rank=2)}
    names = ["", "all", "few", "all"]

    def run(mode: Any) -> tuple[list[list[int]], Any]:
        params = [Params(max_new_tokens=6, ignore_eos=True, adapter=name) for name in names]
        options: dict[str, Any] = {"lora": adapters, "max_loras": 2, "batching": "mixed", "chunked_prefill_size": 16}
        with LLM(cuda_graphs=mode, device="cpu", grammar_backend="none", **options) as llm:
            answers = llm.generate(["def f(", "import ", "class A", "return "], params)
            return [one.token_ids for one in answers], llm.host.executor

    plain, _ = run("off")
    cut, executor = run("eager")
    assert cut == plain
    assert executor.pieces.replays > 5
    assert len(executor.pieces.kinds) == 2 * len(executor.pieces.sizes)


class CopiedLate:
    """Results that are copied when they are waited for: as late as a GPU's copy may run."""

    def __init__(self, tensors: Mapping[str, Any], begun: int) -> None:
        self.tensors, self.begun = dict(tensors), begun

    def ready(self) -> bool:
        return False

    def wait(self) -> dict[str, Any]:
        return {name: tensor.numpy().copy() for name, tensor in self.tensors.items()}

    def times_us(self) -> tuple[int, int]:
        return self.begun, self.begun


def test_results_are_copies_that_no_later_pass_overwrites(folders: dict[str, Path]) -> None:
    """Vectors of last tokens and hidden states of passes that are in flight together: their buffer is one."""

    def run(mode: Any) -> list[Any]:
        options: dict[str, Any] = {**SMALL, "pooling": "last", "normalize": False, "overlap_depth": 2}
        prompts = [[5 + n, 6, 7, n] * (1 + n % 3) for n in range(8)]
        with LLM(folders["dense"], cuda_graphs=mode, device="cpu", grammar_backend="none", **options) as llm:
            llm.host.executor.lane.download = CopiedLate  # type: ignore[attr-defined]
            vectors = [one.vector for one in llm.embed(list(prompts))]
            params = Params(max_new_tokens=3, ignore_eos=True, hidden_states=True)
            return vectors + [one.hidden_states for one in llm.generate(list(prompts), params)]

    for found, expected in zip(run("eager"), run("off"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize(("tokens", "tile"), [(16, LOW_TILE), (128, LOW_TILE), (192, HIGH_TILE)])
def test_every_layout_of_adapters_fits_the_fixed_one(tokens: int, tile: int) -> None:
    draw, slots = np.random.default_rng(3), 3
    layout = FixedLayout(tokens, slots, CPU)
    assert layout.batch.tile == tile
    for _ in range(200):
        count = int(draw.integers(1, tokens + 1))
        of_tokens = draw.integers(-1, slots, count).astype(np.int32)
        of_tokens[0] = 0
        given = lay_out(of_tokens, np.ones(count, np.int32), lambda one: torch.from_numpy(one.copy()))
        kept = layout.filled(given, lambda one: torch.from_numpy(one.copy()))
        assert kept.tiles.data_ptr() == layout.batch.tiles.data_ptr()
        found = np.full(count, -1, np.int32)
        for first, stop, slot in kept.tiles.T.tolist():
            assert stop - first <= tile
            at = kept.tokens[first:stop].numpy()
            assert (found[at] == -1).all()
            found[at] = slot
        np.testing.assert_array_equal(found, of_tokens)


# -------------------------------------------------------------------------------------------------------------- options


def test_options_that_cannot_be_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"must be 0 \(none\) or more, got `-1`"):
        check_graph_mode("eager", CPU, None, -1)
    with pytest.raises(ConfigError, match="`piecewise_graph_max_tokens` is 8, but there are no CUDA graphs on `cpu`"):
        LLM(folders["dense"], device="cpu", piecewise_graph_max_tokens=8)
    with pytest.raises(ConfigError, match="`piecewise_graph_max_tokens` is 8, but `cuda_graphs` is off"):
        check_graph_mode("off", torch.device("cuda"), None, 8)
    check_graph_mode("off", CPU, None, 0)
    with pytest.raises(ConfigError, match="`piecewise_graph_max_tokens` must be a whole number or None"):
        LLM(folders["dense"], device="cpu", piecewise_graph_max_tokens="8")  # type: ignore[arg-type]


def test_the_bound_is_kept_and_0_is_none(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"device": "cpu", "cuda_graphs": "eager", "grammar_backend": "none", **SMALL}
    for bound, sizes in ((6, [4, 6]), (None, [4, 8, 16, 28]), (0, None)):
        with LLM(folders["dense"], piecewise_graph_max_tokens=bound, **options) as llm:
            pieces = llm.host.executor.pieces  # type: ignore[attr-defined]
            assert (None if pieces is None else pieces.sizes.tolist()) == sizes


def test_a_capture_that_fails_reports_what_to_do() -> None:
    class Full:
        """Pieces with room for two sizes."""

        left = 2

        def record(self, run: Callable[[Any], None]) -> Callable[[Any], None]:
            if not self.left:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
            self.left -= 1
            return lambda attend: None

    with pytest.raises(ConfigError) as raised:
        SmallRuntime(pieces=Full())
    assert str(raised.value) == (
        "the CUDA graphs of a pass of 8 tokens could not be captured (2 of 4 passes were, up to 32 tokens): "
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\nhint: --piecewise-graph-max-tokens N "
        "captures fewer and 0 none, a smaller --mem-fraction leaves them more room, --no-cuda-graphs does without any"
    )
