"""Sampling: distributions against a numpy reference, exact changes of logits, and the inputs of a draw."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import SamplingParams  # noqa: E402
from lockstep.runtime.sampling import Sampled, Sampler, SamplingTable, logprobs_of, numerics, philox  # noqa: E402
from lockstep.runtime.sampling import processors as registry  # noqa: E402
from lockstep.runtime.sampling.reference import BANNED  # noqa: E402

VOCAB = 37  # neither a multiple of 4 nor of 32
INF = math.inf


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 2.0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32))


def sample(
    table: SamplingTable, logits: Any, rows: Any, positions: Any, allowed: Any = None, **settings: Any
) -> Sampled:
    """One call, of logits [samples, vocab] or of [vocab] for all samples."""
    rows = np.asarray(rows, np.int32)
    positions = torch.as_tensor(np.broadcast_to(positions, rows.shape).astype(np.int64))
    logits = torch.as_tensor(logits, dtype=torch.float32).expand(len(rows), -1).clone()
    return Sampler(table, **settings).sample(logits, torch.from_numpy(rows), positions, rows, allowed)


def draw(params: SamplingParams, logits: Any, positions: Any, allowed: Any = None, **taken: Any) -> list[int]:
    """Tokens of one request, one for each position, all from the same logits."""
    positions = np.atleast_1d(positions)
    table = SamplingTable(1, len(logits), "cpu")
    table.take_row(0, params, **taken)
    return sample(table, logits, np.zeros(len(positions)), positions, allowed).tokens.tolist()


def bitmask(allowed: list[int], vocab: int = VOCAB) -> Any:
    words = np.zeros((vocab + 31) // 32, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32)[None])


def test_a_row_that_is_refused_is_invalid_and_its_neighbours_are_not() -> None:
    table, logits = SamplingTable(3, VOCAB, "cpu"), logits_of(3)
    table.take_row(0, SamplingParams(allowed_token_ids=(4,)))
    table.refuse_row(1)
    table.take_row(2, None)
    drawn = sample(table, logits, [0, 1, 2], 5)
    assert drawn.invalid.tolist() == [False, True, False]
    assert drawn.tokens.tolist() == [4, 0, int(logits.argmax())]
    table.take_row(1, None)
    again = sample(table, logits, [0, 1, 2], 5)
    assert again.invalid.tolist() == [False] * 3
    assert again.tokens.tolist() == [4, int(logits.argmax()), int(logits.argmax())]


# -------------------------------------------------------------------------------------------------------- distributions


def probabilities(logits: Any, params: SamplingParams) -> Any:
    """The probabilities under `params`, by their definitions, in float64."""
    logits = logits.numpy().astype(np.float64)
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    if params.top_k:
        p = np.where([np.sum(p > each) < params.top_k for each in p], p, 0)
        p /= p.sum()
    p = np.where([np.sum(p[p > each]) < params.top_p for each in p], p, 0)
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


def chi_square_excess(tokens: Any, expected: Any) -> float:
    """Chi-square of the counts over its critical value at one in ten thousand; rare tokens are one bin.

    The critical value is Wilson and Hilferty's approximation (1931).
    """
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    assert not counts[expected == 0].any(), "a token was drawn that cannot be"
    mean = expected * len(tokens)
    rare = mean < 10
    if rare.any():
        counts, mean = np.append(counts[~rare], counts[rare].sum()), np.append(mean[~rare], mean[rare].sum())
    counts, mean = counts[mean > 0], mean[mean > 0]
    freedom = len(mean) - 1
    if freedom == 0:
        return 0.0
    scale = 2 / (9 * freedom)
    return float(np.sum((counts - mean) ** 2 / mean) / (freedom * (1 - scale + 3.719 * math.sqrt(scale)) ** 3))


SETTINGS = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=3),
    SamplingParams(temperature=1, top_k=5),
    SamplingParams(temperature=1, top_p=0.7),
    SamplingParams(temperature=1, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.8),
    SamplingParams(temperature=2, top_k=20, top_p=0.95, min_p=0.2),
]


@pytest.mark.parametrize("params", SETTINGS, ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    # A quarter of the draws each with seeds of their own: over positions and over seeds they are independent.
    table = SamplingTable(4, VOCAB, "cpu")
    for row, seed in enumerate((0, 1, 2**40 + 7, -5)):
        table.take_row(
            row, SamplingParams(**{f: getattr(params, f) for f in params.__struct_fields__} | {"seed": seed})
        )
    logits = logits_of(1)
    rows, positions = np.repeat(np.arange(4), 4000), np.tile(np.arange(4000), 4)
    tokens = sample(table, logits, rows, positions).tokens.numpy()
    assert chi_square_excess(tokens, probabilities(logits, params)) < 1


def test_the_statistic_sees_a_temperature_that_is_off_by_a_tenth() -> None:
    logits = logits_of(1)
    tokens = np.array(draw(SamplingParams(temperature=1.1), logits, np.arange(16000)))
    assert chi_square_excess(tokens, probabilities(logits, SamplingParams(temperature=1))) > 1


def test_neighbouring_positions_and_tokens_are_independent() -> None:
    flat = torch.zeros(6)
    tokens = np.array(draw(SamplingParams(temperature=1, seed=9), flat, np.arange(18000)))
    pairs = tokens[:-1] * 6 + tokens[1:]
    assert chi_square_excess(pairs, np.full(36, 1 / 36)) < 1


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.77, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 7, VOCAB, 10_000])
def test_the_set_that_is_drawn_from(top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p, top_logprobs=VOCAB)
    for seed in range(5):
        logits = logits_of(seed)
        table = SamplingTable(1, VOCAB, "cpu")
        table.take_row(0, params)
        out = sample(table, logits, [0], 0, logprobs="processed")
        got = np.zeros(VOCAB)
        got[out.top_ids[0].numpy()] = np.exp(out.top_logprobs[0].double().numpy())
        np.testing.assert_allclose(got, probabilities(logits, params), rtol=2e-5)


def test_ties_at_the_border_are_kept_together() -> None:
    logits = torch.tensor([5.0, 1.0, 1.0, 1.0, 0.0])
    for params in (SamplingParams(temperature=9, top_k=2), SamplingParams(temperature=9, top_p=0.4)):
        assert set(draw(params, logits, np.arange(400))) == {0, 1, 2, 3}
    signed_zeros = torch.tensor([0.0, -0.0, -1.0])
    assert set(draw(SamplingParams(temperature=1, top_k=1), signed_zeros, np.arange(50))) == {0, 1}


# ------------------------------------------------------------------------------------------------------ randomness


def test_philox_gives_the_published_vectors() -> None:
    # Random123, kat_vectors, philox4x32 with 10 rounds.
    known = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, words in known:
        in_numpy = philox.philox_numpy(tuple(np.array([c], np.uint32) for c in counter), key)  # type: ignore[arg-type]
        in_torch = philox.philox_torch(
            tuple(torch.tensor([c]) for c in counter),  # type: ignore[arg-type]
            (torch.tensor([key[0]]), torch.tensor([key[1]])),
        )
        assert " ".join(f"{int(w[0]):08x}" for w in in_numpy) == words
        assert " ".join(f"{int(w[0]):08x}" for w in in_torch) == words


def test_numpy_and_torch_make_the_same_words() -> None:
    draws = [(0, 0), (7, 1), (-1, 5), (2**63 + 11, 2**31), (123456789123, 2**33 + 5)]
    keys = [philox.split_seed(seed) for seed, _ in draws]
    low, high = (torch.tensor([key[i] for key in keys]) for i in (0, 1))
    words = philox.words_torch(low, high, torch.tensor([position for _, position in draws]), VOCAB)
    for i, (seed, position) in enumerate(draws):
        np.testing.assert_array_equal(words[i].numpy(), philox.words_numpy(seed, position, VOCAB))


def test_gumbel_numbers_are_accurate_to_both_ends() -> None:
    edges = [0, 1, 2**32 - 1, 2**32 - 2, numerics.THIRD_WORD - 1, numerics.THIRD_WORD, 2**31]
    words = np.concatenate((edges, np.random.default_rng(3).integers(0, 2**32, 20000)))
    exact = -np.log(-np.log1p(-((words + 0.5) / 2**32)))
    exact[words > 2**31] = -np.log(-np.log((2**32 - words[words > 2**31] - 0.5) / 2**32))
    got = numerics.gumbel(torch.from_numpy(words)).double().numpy()
    np.testing.assert_allclose(got, exact, rtol=3e-7, atol=3e-7)
    assert got.max() < numerics.GUMBEL_MAX


def test_masses_are_exponentials_in_whole_units() -> None:
    z = torch.tensor([0.0, -1e-30, -0.5, -math.log(2), -5, -20, -27, -100, -3e38, -INF])
    masses = numerics.mass(z)
    np.testing.assert_allclose(masses.double().numpy(), np.exp(z.double().numpy()) * 2**40, rtol=1e-6, atol=3)
    assert masses[0] == 2**40
    assert masses[-1] == 0
    shares = torch.tensor([0, 1, 2**23, 2**24 - 1])
    total = torch.full((4,), 2**58 + 12345)
    assert numerics.share_of(total, shares).tolist() == [1, *(total[0].item() * s >> 24 for s in (1, 2**23, 2**24 - 1))]


def test_a_draw_depends_on_nothing_but_the_request() -> None:
    """Alone, in a batch, at another row, behind others: the same tokens."""
    rng = np.random.default_rng(5)
    requests = [
        SamplingParams(
            temperature=float(rng.uniform(0.3, 2)),
            top_k=int(rng.integers(0, 9)),
            top_p=float(rng.uniform(0.5, 1)),
            min_p=float(rng.choice([0, 0.05])),
            presence_penalty=float(rng.choice([0, 1.0])),
            repetition_penalty=float(rng.choice([1, 1.4])),
            seed=int(rng.integers(99)),
        )
        for _ in range(12)
    ]
    requests[3] = SamplingParams()
    logits = torch.stack([logits_of(i) for i in range(12)])
    alone = []
    for i, params in enumerate(requests):
        table = SamplingTable(2, VOCAB, "cpu")
        table.take_row(1, params, [1, 2, 3])
        alone.append([int(sample(table, logits[i], [1], p).tokens[0]) for p in range(3, 11)])
    for seed in (0, 1):
        rows = np.random.default_rng(seed).permutation(30)[:12]
        table = SamplingTable(30, VOCAB, "cpu")
        for i in np.random.default_rng(seed + 9).permutation(12):
            table.take_row(int(rows[i]), requests[i], [1, 2, 3])
        together: list[list[int]] = [[] for _ in requests]
        for position in range(3, 11):
            order = np.random.default_rng(position).permutation(12)
            tokens = sample(table, logits[order], rows[order], position).tokens.tolist()
            for i, token in zip(order, tokens, strict=True):
                together[i].append(token)
        assert together == alone


def test_seeds_and_positions_matter() -> None:
    flat, positions = torch.zeros(1000), np.arange(50)
    drawn = {seed: tuple(draw(SamplingParams(temperature=1, seed=seed), flat, positions)) for seed in (0, 1, 2**32, -1)}
    assert len(set(drawn.values())) == 4
    assert all(len(set(tokens)) > 40 for tokens in drawn.values())
    assert drawn[0] == tuple(draw(SamplingParams(temperature=1, seed=0), flat, positions))
    assert draw(SamplingParams(temperature=1), flat, 2**32 + 1) != draw(SamplingParams(temperature=1), flat, 1)


# ------------------------------------------------------------------------------------------------- changes of logits


def penalised_by_hand(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> Any:
    out = np.array(logits, np.float32)
    for token in set(prompt) | set(output):
        factor = np.float32(params.repetition_penalty)
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(output):
        out[token] -= np.float32(output.count(token)) * np.float32(params.frequency_penalty)
        out[token] -= np.float32(params.presence_penalty)
    return out


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(frequency_penalty=0.3),
        SamplingParams(presence_penalty=0.9),
        SamplingParams(frequency_penalty=-0.2, presence_penalty=0.4, repetition_penalty=0.8),
    ],
)
@pytest.mark.parametrize("kept", [0, 2])
def test_penalties_to_the_bit_with_each_token_counted_before_the_next(params: SamplingParams, kept: int) -> None:
    prompt, output = [4, 4, 9, 1000, -1], [7, 4][:kept]
    table = SamplingTable(3, VOCAB, "cpu")
    table.take_row(2, params, prompt, output)
    table.take_row(0, SamplingParams())
    sampler, seen_by_hand = Sampler(table), []
    for position in range(5, 25):
        base = logits_of(position % 5, spread=0.7).expand(2, -1).clone()
        given = base.clone()
        rows = np.array([2, 0], np.int32)
        out = sampler.sample(given, torch.from_numpy(rows), torch.tensor([position] * 2), rows)
        expected = penalised_by_hand(base[0].tolist(), [t for t in prompt if 0 <= t < VOCAB], output, params)
        np.testing.assert_array_equal(given[0].numpy(), expected)
        np.testing.assert_array_equal(given[1].numpy(), base[1].numpy())
        assert int(out.tokens[0]) == int(expected.argmax())
        output.append(int(out.tokens[0]))
        seen_by_hand.append(output[-1])
    assert len(set(seen_by_hand)) < len(seen_by_hand), "some token must have come twice for the counts to matter"


def test_a_row_that_comes_back_goes_on_as_if_it_had_never_left() -> None:
    params = SamplingParams(temperature=1, frequency_penalty=1.5, repetition_penalty=1.2, seed=4)
    logits = logits_of(2)

    def run(table: SamplingTable, row: int, positions: range) -> list[int]:
        return [int(sample(table, logits, [row], p).tokens[0]) for p in positions]

    table = SamplingTable(2, VOCAB, "cpu")
    table.take_row(0, params, [1, 2])
    whole = run(table, 0, range(2, 22))
    table.take_row(0, None)
    table.take_row(1, params, [1, 2], whole[:8])
    assert run(table, 1, range(10, 22)) == whole[8:]


def test_biases_add_up_and_others_stay() -> None:
    table = SamplingTable(2, VOCAB, "cpu")
    table.take_row(0, SamplingParams(logit_bias=((3, 2.5), (36, -100.0), (5, 0.0))))
    table.take_row(1, SamplingParams(logit_bias=tuple((t, float(t)) for t in range(0, 36, 2))))
    base = torch.stack([logits_of(0), logits_of(1)])
    given = base.clone()
    rows = np.array([0, 1], np.int32)
    Sampler(table).sample(given, torch.from_numpy(rows), torch.tensor([3, 3]), rows)
    base[0, 3] += 2.5
    base[0, 36] -= 100
    base[1, 0:36:2] += torch.arange(0.0, 36, 2)
    np.testing.assert_array_equal(given.numpy(), base.numpy())


def test_a_bias_of_a_hundred_forces() -> None:
    for params in (SamplingParams(logit_bias=((11, 100.0),)), SamplingParams(temperature=1, logit_bias=((11, 100.0),))):
        assert set(draw(params, logits_of(0), np.arange(50))) == {11}


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = [0, 5, 31, 32, 36]
    mask = bitmask(allowed)
    tokens = draw(SamplingParams(temperature=5), logits_of(0), np.arange(500), mask.expand(500, -1).contiguous())
    assert set(tokens) == set(allowed)
    best = max(allowed, key=lambda t: float(logits_of(0)[t]))
    assert draw(SamplingParams(), logits_of(0), 0, mask) == [best]
    assert draw(SamplingParams(logit_bias=((7, 1e6),)), logits_of(0), 0, mask) == [best], "a bias reopens no mask"


def test_a_row_draws_only_what_its_request_allows() -> None:
    """Each row by itself, with a grammar's mask the intersection of both; nothing of it remains for later requests."""
    table = SamplingTable(4, VOCAB, "cpu")
    table.take_row(0, SamplingParams(temperature=5, allowed_token_ids=(0, 31, 32, 36)))
    table.take_row(1, SamplingParams(temperature=5))
    table.take_row(2, SamplingParams(allowed_token_ids=(7, 9), logit_bias=((8, 1e6),)))
    rows, logits = np.array([0, 1, 2], np.int32), logits_of(0)
    drawn = np.array([sample(table, logits, rows, p).tokens.tolist() for p in range(300)])
    assert set(drawn[:, 0]) == {0, 31, 32, 36}
    assert len(set(drawn[:, 1])) > 30
    assert set(drawn[:, 2]) == {max((7, 9), key=lambda t: float(logits[t]))}, "a bias reopens no mask"

    given = logits.expand(3, -1).clone()
    mask = torch.cat([bitmask([1, 31, 32]), bitmask([2]), bitmask([8])])
    out = Sampler(table).sample(given, torch.from_numpy(rows), torch.tensor([0, 0, 0]), rows, mask)
    assert [np.flatnonzero(row.numpy() > -INF).tolist() for row in given] == [[31, 32], [2], []]
    assert out.invalid.tolist() == [False, False, True]

    for row in range(4):
        table.take_row(row, SamplingParams(temperature=5))
    given = logits.expand(3, -1).clone()
    Sampler(table).sample(given, torch.from_numpy(rows), torch.tensor([0, 0, 0]), rows)
    np.testing.assert_array_equal(given, logits.expand(3, -1))


def test_masks_of_more_and_more_rows_and_of_one_after_a_restart() -> None:
    table, logits = SamplingTable(9, VOCAB, "cpu"), logits_of(0)
    for row in range(9):
        table.take_row(row, SamplingParams(allowed_token_ids=(4 * row,)))
        rows = np.arange(row + 1)
        assert sample(table, logits, rows, 0).tokens.tolist() == [4 * r for r in rows]
    table.clear()
    best = int(logits.argmax())
    assert sample(table, logits, np.arange(9), 0).tokens.tolist() == [best] * 9
    table.take_row(5, SamplingParams(allowed_token_ids=(3,)))
    assert sample(table, logits, np.arange(9), 0).tokens.tolist() == [best] * 5 + [3] + [best] * 3


def test_a_mask_and_a_ban_leave_something_or_are_refused() -> None:
    taken = {"prompt_token_ids": [1] * 10, "min_new_tokens": 3, "stop_token_ids": (5, 6)}
    logits = logits_of(0)
    logits[5] = 99.0
    params = SamplingParams(allowed_token_ids=(5, 6, 8))
    assert draw(params, logits, np.arange(10, 15), **taken) == [8] * 3 + [5] * 2
    with pytest.raises(ConfigError, match="nothing but stop tokens, and `min_new_tokens` 3 bans these"):
        draw(SamplingParams(allowed_token_ids=(5, 6)), logits, 10, **taken)
    assert draw(SamplingParams(allowed_token_ids=(5, 6)), logits, 10, **(taken | {"min_new_tokens": 0})) == [5]


def test_stop_tokens_wait_for_min_new_tokens() -> None:
    logits = logits_of(0)
    best, second = logits.topk(2).indices.tolist()
    taken = {"prompt_token_ids": [1] * 10, "min_new_tokens": 3, "stop_token_ids": (best,)}
    assert draw(SamplingParams(), logits, np.arange(10, 15), **taken) == [second] * 3 + [best] * 2
    bias = SamplingParams(logit_bias=((best, 50.0),))
    assert draw(bias, logits, np.arange(10, 15), **taken) == [second] * 3 + [best] * 2
    assert best not in draw(SamplingParams(temperature=9), logits, np.arange(10, 13).repeat(300), **taken)


def test_the_ban_gives_way_where_nothing_else_is_allowed() -> None:
    table = SamplingTable(1, VOCAB, "cpu")
    table.take_row(0, SamplingParams(temperature=1), [1], min_new_tokens=5, stop_token_ids=(8,))
    out = sample(table, logits_of(0), [0], 1, bitmask([8]))
    assert (out.tokens.tolist(), out.invalid.tolist()) == ([8], [False])
    assert BANNED < -1e29


# ------------------------------------------------------------------------------------------------------ extreme logits


def test_a_nan_is_reported_and_touches_no_other_row() -> None:
    table = SamplingTable(4, VOCAB, "cpu")
    for row in range(4):
        table.take_row(row, SamplingParams(temperature=row % 2, top_k=5 * (row % 2), top_p=0.9, top_logprobs=2))
    logits = torch.stack([logits_of(i) for i in range(4)])
    clean = sample(table, logits, range(4), 3).tokens.tolist()
    logits[0, 5] = logits[1, 36] = math.nan
    out = sample(table, logits, range(4), 3)
    assert out.invalid.tolist() == [True, True, False, False]
    assert out.tokens.tolist() == [0, 0, *clean[2:]]
    assert out.logprobs is not None
    assert out.logprobs.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=1), SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01)],
)
def test_extreme_logits(params: SamplingParams) -> None:
    def tokens(values: list[float]) -> set[int]:
        return set(draw(params, torch.tensor(values), np.arange(200)))

    everything = {0} if params.temperature == 0 else {0, 1, 2}
    assert tokens([0.0, 0.0, 0.0]) == everything
    assert tokens([3e38, 3e38, 3e38]) == everything
    assert tokens([-3e38, -3e38, -3e38]) == everything
    assert tokens([1e10, 1e10, 1e10]) == everything
    assert tokens([INF, 1.0, INF]) == ({0} if params.temperature == 0 else {0, 2})
    assert tokens([-INF, 2.0, -INF]) == {1}
    assert tokens([3e38, -3e38, -INF]) == {0}
    assert tokens([-1.0]) == {0}


def test_nothing_allowed_is_invalid() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1, top_k=2, top_p=0.5, min_p=0.5)):
        table = SamplingTable(1, VOCAB, "cpu")
        table.take_row(0, params)
        out = sample(table, torch.full((VOCAB,), -INF), [0], 0)
        assert (out.tokens.tolist(), out.invalid.tolist()) == ([0], [True])
        assert sample(table, logits_of(0), [0], 0, bitmask([])).invalid.tolist() == [True]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=2, top_k=1),
        SamplingParams(temperature=2, top_p=0.0),
        SamplingParams(temperature=2, top_p=1e-9),
        SamplingParams(temperature=2, min_p=1.0),
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=1e-45),
        SamplingParams(temperature=1e-60),
    ],
)
def test_settings_that_leave_only_the_likeliest(params: SamplingParams) -> None:
    logits = logits_of(3)
    assert set(draw(params, logits, np.arange(200))) == {int(logits.argmax())}


def test_a_huge_temperature_is_uniform() -> None:
    tokens = np.array(draw(SamplingParams(temperature=1e30), logits_of(0), np.arange(8000)))
    assert chi_square_excess(tokens, np.full(VOCAB, 1 / VOCAB)) < 1


# ------------------------------------------------------------------------------------------------------------ logprobs


def log_softmax(logits: Any) -> Any:
    logits = logits.double().numpy()
    return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()


def test_listed_tokens_have_logprobs_behind_the_likeliest() -> None:
    table = SamplingTable(4, VOCAB, "cpu")
    table.take_row(0, SamplingParams(logprob_token_ids=(5, 2)))
    table.take_row(1, SamplingParams(top_logprobs=1, logprob_token_ids=(7,)))
    table.take_row(2, SamplingParams(top_logprobs=4))
    table.take_row(3, SamplingParams())
    logits = logits_of(0)
    own = log_softmax(logits)
    order = np.argsort(-own)
    expected = {0: [5, 2], 1: [order[0], 7], 2: [*order[:4]]}
    for rows in ([0, 1, 2, 3], [3, 1], [0], [2, 0]):
        out = sample(table, logits, rows, 7)
        assert out.top_ids is not None
        assert out.top_logprobs is not None
        for at, row in enumerate(rows):
            ids = expected.get(row, [])
            assert out.top_ids[at, : len(ids)].tolist() == ids
            np.testing.assert_allclose(out.top_logprobs[at, : len(ids)].numpy(), own[ids], atol=1e-5)
    table.take_row(0, SamplingParams(top_logprobs=2))  # nothing of the row's earlier request remains
    out = sample(table, logits, [0], 7)
    assert out.top_ids is not None
    assert out.top_ids.tolist() == [order[:2].tolist()]
    with pytest.raises(ConfigError, match="logprob_token_ids"):
        table.take_row(0, SamplingParams(logprob_token_ids=(VOCAB,)))


def test_logprobs_are_the_models_own_and_reach_the_requesting_rows() -> None:
    table = SamplingTable(4, VOCAB, "cpu")
    table.take_row(
        0, SamplingParams(temperature=0.4, top_k=2, logit_bias=((3, 9.0),), presence_penalty=1), logprobs=True
    )
    table.take_row(1, SamplingParams())
    table.take_row(2, SamplingParams(temperature=2, top_logprobs=3))
    logits = logits_of(0)
    out = sample(table, logits, [2, 1, 0], 7)
    assert out.logprobs is not None
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    own = log_softmax(logits)
    assert np.isnan(out.logprobs[1].item())
    for i in (0, 2):
        assert out.logprobs[i].item() == pytest.approx(own[out.tokens[i]], abs=1e-5)
    order = np.argsort(-own)[:3]
    assert out.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(out.top_logprobs[0].numpy(), own[order], atol=1e-5)
    assert out.top_ids[1].tolist() == [-1] * 3
    table.take_row(0, None)
    assert sample(table, logits, [0, 1], 8).logprobs is None


def test_processed_logprobs_are_of_what_was_drawn_from() -> None:
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, logit_bias=((3, 2.0),), top_logprobs=4)
    table = SamplingTable(2, VOCAB, "cpu")
    table.take_row(0, params)
    table.take_row(1, SamplingParams(logit_bias=((3, 2.0),)), logprobs=True)
    logits = logits_of(0)
    out = sample(table, logits, [0, 1], 7, logprobs="processed")
    assert out.logprobs is not None
    biased = logits.clone()
    biased[3] += 2
    expected = np.log(probabilities(biased, params)[out.tokens[0]])
    assert out.logprobs[0].item() == pytest.approx(expected, abs=1e-5)
    assert out.logprobs[1].item() == pytest.approx(log_softmax(biased).max(), abs=1e-5)


def test_logprobs_of_a_prompt() -> None:
    logits = torch.stack([logits_of(i) for i in range(3)])
    found = logprobs_of(logits.bfloat16(), torch.tensor([1, 36, 0], dtype=torch.int32), top=2)
    assert found.top_ids is not None
    for i, target in enumerate((1, 36, 0)):
        own = log_softmax(logits[i].bfloat16())
        assert found.chosen[i].item() == pytest.approx(own[target], abs=1e-5)
        assert found.top_ids[i].tolist() == np.argsort(-own)[:2].tolist()


# ----------------------------------------------------------------------------------------------------------- the table


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    table = SamplingTable(3, VOCAB, "cpu", ())
    full = SamplingParams(
        temperature=1, top_k=2, logit_bias=((0, 50.0),), repetition_penalty=9, presence_penalty=5, top_logprobs=2
    )
    logits = logits_of(0)
    for _ in range(3):
        for row in range(3):
            table.take_row(
                row, full, list(range(VOCAB)), [1, 1], min_new_tokens=9, stop_token_ids=(int(logits.argmax()),)
            )
        sample(table, logits, [0, 1, 2], 40)
        for row in range(3):
            table.take_row(row, None)
        out = sample(table, logits, [0, 1, 2], 40)
        assert out.tokens.tolist() == [int(logits.argmax())] * 3
        assert out.logprobs is None
    assert len(table.columns.seen) <= 4, "slots that were given back are used again"


def test_slots_are_distinguished_however_many_there_are() -> None:
    """Rows with edits and penalties of their own, taken over time, so that every table has to grow."""
    table = SamplingTable(20, VOCAB, "cpu")
    logits = torch.zeros(VOCAB)
    for row in range(20):
        bias = (*((t, 1.0) for t in range(row)), (row, 5.0))
        table.take_row(row, SamplingParams(logit_bias=bias, presence_penalty=7.0), (), [row + 1])
        if row % 3 == 0:
            table.flush()
    first = sample(table, logits, range(20), 1).tokens.tolist()
    second = sample(table, logits, range(20), 2).tokens.tolist()
    assert first == list(range(20))
    assert second == [2] + [0] * 19, "the token drawn first has its penalty, and row 0 had another one before"


def test_taking_rows_costs_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SamplingTable(64, VOCAB, "cpu")
    copies = []
    to_device = table.to_device
    monkeypatch.setattr(table, "to_device", lambda array: copies.append(len(array)) or to_device(array))
    for row in range(64):
        table.take_row(
            row, SamplingParams(temperature=1, presence_penalty=1, logit_bias=((row % VOCAB, 1.0),)), [1], [2]
        )
    table.flush()
    assert len(copies) == 3
    table.flush()
    sample(table, logits_of(0), range(64), 1)
    assert len(copies) == 3


def test_padding_rows_are_greedy_and_may_repeat() -> None:
    table = SamplingTable(2, VOCAB, "cpu")
    table.take_row(0, SamplingParams(temperature=1, presence_penalty=1))
    logits = logits_of(0)
    assert sample(table, logits, [0, 2, 2, 2], 0).tokens.tolist()[1:] == [int(logits.argmax())] * 3


def test_clear_forgets_everything() -> None:
    table = SamplingTable(2, VOCAB, "cpu")
    table.take_row(0, SamplingParams(temperature=5, presence_penalty=9, logit_bias=((1, 99.0),), top_logprobs=1))
    sample(table, logits_of(0), [0], 0)
    table.clear()
    out = sample(table, logits_of(0), [0, 1], 0)
    assert out.tokens.tolist() == [int(logits_of(0).argmax())] * 2
    assert out.logprobs is None


def test_an_empty_batch_draws_nothing() -> None:
    table = SamplingTable(2, VOCAB, "cpu")
    empty = np.empty(0, np.int32)
    out = Sampler(table).sample(
        torch.empty((0, VOCAB)), torch.from_numpy(empty), torch.empty(0, dtype=torch.int64), empty
    )
    assert (out.tokens.shape, out.invalid.shape) == ((0,), (0,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": -0.1}, "`temperature` must be in .* got `-0.1`"),
        ({"temperature": math.nan}, "`temperature`"),
        ({"temperature": INF}, "`temperature`"),
        ({"top_p": 1.5}, "`top_p` must be in .0, 1."),
        ({"min_p": -1}, "`min_p`"),
        ({"top_k": -1}, "`top_k` .* 0 keeps every token"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty`"),
        ({"presence_penalty": math.nan}, "`presence_penalty`"),
        ({"logit_bias": ((VOCAB, 1.0),)}, f"`logit_bias token` must be in .* got `{VOCAB}`"),
        ({"logit_bias": ((1, INF),)}, "`logit_bias of token 1`"),
        ({"top_logprobs": 99}, "`top_logprobs`"),
        ({"allowed_token_ids": (3, VOCAB)}, f"`allowed_token_ids token` must be in .* got `{VOCAB}`"),
        ({"allowed_token_ids": (-1, 3)}, "`allowed_token_ids token` must be in .* got `-1`"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], words: str) -> None:
    table = SamplingTable(1, VOCAB, "cpu")
    table.take_row(0, SamplingParams(temperature=1, top_k=1))
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        table.take_row(0, SamplingParams(**change))
    assert bool(table.sampled[0]), "the row is as it was"


def test_shapes_that_do_not_fit_are_refused() -> None:
    table = SamplingTable(2, VOCAB, "cpu")
    rows = np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match=r"`logits` must be \[2, 37\], got \[2, 36\]"):
        Sampler(table).sample(torch.zeros((2, 36)), torch.from_numpy(rows), torch.tensor([0, 0]), rows)
    with pytest.raises(ValueError, match=r"`allowed` must be \[2, 2\], got \[1, 2\]"):
        Sampler(table).sample(torch.zeros((2, VOCAB)), torch.from_numpy(rows), torch.tensor([0, 0]), rows, bitmask([1]))
    with pytest.raises(ConfigError, match="`backend` must be auto, torch or triton, got `cuda`"):
        Sampler(table, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`row` must be in"):
        table.take_row(2, None)


# ---------------------------------------------------------------------------------------------------------- processors


class OnlyOdd:
    """A processor as a package would provide it."""

    def __init__(self, vocab: int, device: Any) -> None:
        self.even = torch.arange(vocab, device=device) % 2 == 0

    def check(self, arguments: Any) -> None:
        if arguments:
            raise ValueError("it takes no arguments")

    def __call__(self, logits: Any, rows: Any, positions: Any, arguments: Any) -> Any:
        assert arguments == [{}] * len(logits)
        return logits.masked_fill(self.even, -INF)


def test_processors_are_found_by_name_and_reach_only_requesting_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("only-odd", "tests_processors:OnlyOdd", registry.GROUP)
    broken = EntryPoint("broken", "json:no_such_name", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry, broken])
    monkeypatch.setattr(EntryPoint, "load", lambda self: {"only-odd": OnlyOdd}[self.name])
    with pytest.raises(ConfigError, match="got `nothing`; installed: broken, only-odd"):
        registry.load(["nothing"], VOCAB, torch.device("cpu"))
    with pytest.raises(ConfigError, match="`broken` cannot be made from json:no_such_name"):
        registry.load(["broken"], VOCAB, torch.device("cpu"))
    with pytest.raises(ConfigError, match="twice"):
        registry.load(["only-odd", "only-odd"], VOCAB, torch.device("cpu"))

    enabled = registry.load(["only-odd"], VOCAB, torch.device("cpu"))
    table = SamplingTable(3, VOCAB, "cpu", enabled)
    table.take_row(0, SamplingParams(temperature=9, logit_processors=(("only-odd", ""),)))
    table.take_row(1, SamplingParams())
    with pytest.raises(ConfigError, match="`logit_processors` must be enabled by the operator, got `other`"):
        table.take_row(2, SamplingParams(logit_processors=(("other", "{}"),)))
    with pytest.raises(ConfigError, match="must be those of the table"):
        Sampler(table)
    even_best = torch.zeros(VOCAB)
    even_best[4] = 3
    rows = [1, *[0] * 100]
    tokens = sample(table, even_best, rows, np.arange(101), processors=enabled).tokens.tolist()
    assert tokens[0] == 4
    assert all(token % 2 for token in tokens[1:])
    table.take_row(0, None)
    assert sample(table, even_best, [0], 0, processors=enabled).tokens.tolist() == [4]


@pytest.mark.parametrize("wrong", ["raises", "is of another shape"])
def test_a_processor_that_fails_spoils_the_rows_that_named_it_and_no_others(wrong: str, caplog: Any) -> None:
    class Broken(OnlyOdd):
        def __call__(self, logits: Any, rows: Any, positions: Any, arguments: Any) -> Any:
            return logits[:, :3] if wrong == "is of another shape" else 1 / 0

    enabled: dict[str, Any] = {"broken": Broken(VOCAB, torch.device("cpu"))}
    table = SamplingTable(3, VOCAB, "cpu", enabled)
    table.take_row(0, SamplingParams(logit_processors=(("broken", ""),)))
    table.take_row(1, SamplingParams())
    drawn = sample(table, torch.arange(VOCAB), [0, 1], 0, processors=enabled)
    assert drawn.invalid.tolist() == [True, False]
    assert drawn.tokens.tolist() == [0, VOCAB - 1]
    assert "logit processor `broken` failed: the 1 requests that named it end as invalid" in caplog.text
