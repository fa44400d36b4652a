"""Record golden journals: one per feature, kept for ever, replayed by test_golden.py at every change.

    python tests/golden/record.py                  record what is missing
    python tests/golden/record.py NAME...          record these again, deliberately: read docs/journal.md first
    python tests/golden/record.py --words          write the words anew, of journals that replay as recorded
    python tests/golden/record.py --list           the journals, and what each shows

A folder holds `journal/`, as any run does, and `decisions.txt`: the words of every decision, so that a divergence can
be reported with the recorded decision. A change of behaviour comes with a flag, under which old journals still replay,
and adds journals.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lockstep.core.contract.config import HybridMemory  # noqa: E402
from lockstep.tools.decision_text import decision_of, decisions_text  # noqa: E402
from lockstep.tools.runs import Walk  # noqa: E402
from lockstep.tools.strict import DECISIONS  # noqa: E402
from tests.support.recorded import (  # noqa: E402
    record_decode_rank,
    record_fleet,
    record_hybrid_rank,
    record_kinds,
    record_model,
    record_rank,
    record_required_call,
    record_scenario,
    record_simulation,
    record_structured_rank,
)

FOLDER = Path(__file__).parent

CHAT = (
    "gen:n=10,rate=300,turns=uniform:1:2,think=lognormal:30ms:1,shared_prefix=48x2,input=lognormal:60:0.8,"
    "output=lognormal:8:0.8,max_total=300"
)
JUMPING = f"{CHAT.replace('output=lognormal:8:0.8', 'output=uniform:15:40')},grammars=0.7x3"
LISTED = "page one is free. page two is free. page three is free. page"
PROMPTS = [(text, {"max_new_tokens": 8, "ignore_eos": True}) for text in (LISTED, LISTED + " four", "def f(", LISTED)]
REPEATS = [
    (LISTED, {"max_new_tokens": 64, "ignore_eos": True}),
    (LISTED, {"max_new_tokens": 24, "ignore_eos": True, "stop": ("zebra",)}),
    (LISTED, {"max_new_tokens": 16, "ignore_eos": True, "grammar": ("regex", "( is| free| page){8}")}),
]
HANDED_OVER = {
    "hybrid": HybridMemory(window_tokens=5, window_pages=9, state_slots=5, checkpoint_tokens=4),
    "chunked_prefill_size": 4,
}
TIGHT = {"pages": 24, "max_running_requests": 6, "chunked_prefill_size": 64, "schedule_conservativeness": 0.1}


def _simulated(**settings: object) -> Callable[[Path], Path]:
    return lambda folder: record_simulation(folder, CHAT, **{"pages": 200, "chunked_prefill_size": 64, **settings})


def _told(scenario: str) -> Callable[[Path], Path]:
    return partial(record_scenario, name=scenario)


def _brought(folder: Path) -> Path:
    raise SystemExit(f"{folder.name} was recorded by another host: lay its journal in {folder}, then --words")


FEATURES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "served": ("prompts as ids, sampling, stop texts, samples: an emulating server, killed in the middle", _brought),
    "plain": ("the default profile: mixed batches, chunks, overlap 1", _simulated()),
    "overlap-0": ("no overlap", _simulated(overlap_depth=0)),
    "overlap-2": ("two batches beyond the one running", _simulated(overlap_depth=2)),
    "tight": ("a pool that is too small: retractions, skipped decodes, evictions", _simulated(**TIGHT)),
    "tight-front": (
        "the same, retracted requests first",
        _simulated(**TIGHT, retracted_requeue="front", overlap_depth=2),
    ),
    "profile-sglang": (
        "prefill first, a reserve by ratio, pages of one token",
        _simulated(page_size=1, pages=900, batching="prefill_first", reserve="ratio", retraction_policy="length",
                   retracted_requeue="tail", prefix_deduplication="last", waiting_prefix_refresh=4, bypass_limit=None),
    ),
    "profile-vllm": (
        "running first, on demand, newest to the front, its KV left to the cache",
        _simulated(**{**TIGHT, "batching": "running_first"}, reserve="on_demand", same_step_sharing=True,
                   prefix_deduplication="defer", retraction_policy="newest", retracted_requeue="front",
                   retracted_kv="cache", chunk_unit="token", bypass_limit=None, max_prefill_tokens=64),
    ),
    "policy-lpm": ("longest cached prefix first", _simulated(**TIGHT, schedule_policy="lpm")),
    "policy-dfs-weight": ("branch by branch of the radix tree", _simulated(**TIGHT, schedule_policy="dfs-weight")),
    "policy-lof": ("longest output first", _simulated(**TIGHT, schedule_policy="lof")),
    "policy-random": ("waiting queue in random order", _simulated(**TIGHT, schedule_policy="random", schedule_seed=5)),
    "policy-hrrn": ("highest response ratio", _simulated(**TIGHT, schedule_policy="hrrn", bypass_limit=3)),
    "no-radix-cache": ("nothing is shared", _simulated(**TIGHT, radix_cache=False)),
    "reserve-full": ("all that starts can end", _simulated(**TIGHT, reserve="full")),
    "several-decodes": ("three decodes in a launch", _simulated(decode_steps_per_launch=3)),
    "speculation": (
        "three drafts verified at a time, in a pool that is too small",
        _simulated(**TIGHT, speculative_method="eagle", speculative_min_chance=0.5),
    ),
    "draft-trees": (
        "trees of drafts, which follow from the right ones, in a pool that is too small",
        _simulated(**TIGHT, speculative_method="eagle", speculative_topk=3, speculative_min_chance=0.02),
    ),
    "chunk-target": ("chunks by a latency target", _simulated(chunk_target_us=1_400)),
    "chunk-by-load": (
        "chunks that shrink as requests decode",
        _simulated(chunked_prefill_size_min=16, max_running_requests=6),
    ),
    "two-batch": (
        "large batches in two halves, prompts cut",
        _simulated(two_batch_overlap=True, two_batch_decode_tokens=3, two_batch_prefill_tokens=16),
    ),
    "diffusion": ("a model that answers in blocks: retracted in one", _told("diffusion/retracted_in_a_block")),
    "multiplexing": (
        "prompts by layers beside decodes: chunks, cancels between two parts",
        _told("multiplexing/leaves_in_the_middle"),
    ),
    "multiplexing-weights": ("new weights between the layers of a prompt", _told("multiplexing/new_weights")),
    "limits": (
        "timeouts, a short waiting queue, messages of several tokens",
        _simulated(max_running_requests=2, waiting_timeout_us=60_000, running_timeout_us=90_000, max_queued_requests=5,
                   stream_interval=4, force_stream_interval=6),
    ),
    "tiers": ("written through, stored, fetched and loaded again", _told("tiers/storage")),
    "tiers-write-back": ("written back when evicted, in part", _told("museum/e16_write_back_fails_in_part")),
    "hybrid": ("windows and states: slid, evicted, freed by a retraction", _told("hybrid/retraction")),
    "hybrid-states": ("two that start as copies of one state", _told("hybrid/copy_on_write")),
    "hybrid-preempted": ("a preemption for window pages", _told("hybrid/preempted_for_windows")),
    "hybrid-shared": ("a state shared before it is computed, and its batch fails", _told("hybrid/shared_batch_fails")),
    "hybrid-drafts": ("a state behind each draft", _told("hybrid/drafts")),
    "hybrid-several-decodes": ("windows under three decodes in a launch", _told("hybrid/several_decodes")),
    "hybrid-tiers": ("windows and states copied to the host and loaded again", _told("tiers/windows_and_states")),
    "hybrid-storage": ("windows stored with pages, fetched and loaded again", _told("tiers/windows_from_storage")),
    "hybrid-ranks": (
        "a rank with windows and states of its own, and the delayer: chunks that are cut, no slot, a restart",
        record_hybrid_rank,
    ),
    "preemption": ("a more important request preempts another", _told("preemption/makes_room")),
    "preemption-fewest": ("no more victims than needed", _told("preemption/fewest_victims")),
    "priority-ageing": ("priorities that age", _told("ordering/priority_with_ageing")),
    "routing-key": ("ordered by routing key", _told("ordering/routing_key")),
    "shortest-prefill": ("the shortest prompt first", _told("ordering/shortest_prefill_first")),
    "deferred-prefix": ("a request waits for its prefix", _told("ordering/deferred_chunk_by_chunk")),
    "grammar": ("masks, matchers and sampling that waits", _told("grammar/end_at_depth_2")),
    "jump-forward": (
        "tokens that grammars force, computed together: overlap, chunks, retractions",
        lambda folder: record_simulation(
            folder, JUMPING, grammar_forces="0.5x5", **TIGHT, jump_forward_tokens=8, retract_every=9
        ),
    ),
    "required-call": ("answers that must be tool calls, by grammars of tool_choice", record_required_call),
    "fewer-bits": (
        "a model with weights, rows and KV in fp8: chunks, a prefix found in the cache",
        partial(record_model, asked=PROMPTS, kind="fp8", kv_cache_dtype="fp8_e4m3", fp8_activations="on",
                overlap_depth=1, chunked_prefill_size=16),
    ),
    "ngram-drafts": (
        "n-grams of a model's own, and beside them rows with a stop text and under a grammar",
        partial(record_model, asked=REPEATS, rounds=2, speculative_method="ngram", overlap_depth=1),
    ),
    "microbatches": (
        "a running batch per stage and one more: prompts in chunks that move, retractions, places that are taken",
        lambda folder: record_simulation(
            folder, CHAT, pp=2, pp_size=2, pp_async_batch_depth=1, pp_max_micro_batch_size=3, pp_dynamic_chunking=True,
            retract_every=3, **TIGHT,
        ),
    ),
    "microbatches-preempted": (
        "a place by preemption, where the least important is", _told("microbatches/place_of_the_least_important")
    ),
    "microbatches-forced": ("forced tokens beside another microbatch", _told("microbatches/forced_tokens_of_another")),
    "microbatches-drafts": (
        "drafts that the last stage makes, verified in three running batches: chunks, retractions",
        lambda folder: record_simulation(
            folder, CHAT, pp=2, pp_size=2, pp_async_batch_depth=1, pp_max_micro_batch_size=4, retract_every=2,
            speculative_method="eagle", speculative_min_chance=0.3, **TIGHT,
        ),
    ),
    "grammar-line": ("requests that wait for their grammars", _told("grammar/order_of_the_waiting_queue")),
    "structured-output": ("schemas, expressions, grammars and tags, compiled, refused, retracted", _brought),
    "sessions": ("turns that wait for each other", _told("sessions/turns_wait")),
    "sessions-yield": ("sessions that yield their KV", _told("sessions/yields_to_admission")),
    "sessions-branch": ("a session that begins with the tokens of another", _told("sessions/branch")),
    "lora": ("adapters loaded and evicted", _told("lora/least_recently_used_is_evicted")),
    "lora-bypass": ("requests that wait for an adapter are bypassed, boundedly", _told("lora/bounded_bypass")),
    "media": ("images, encoded first and shared", _told("media/same_content_is_shared")),
    "media-budget": ("an encoder with a budget: queued, cancelled, dropped", _told("media/encoder_budget_cancelled")),
    "samples": ("several samples of one prompt", _told("samples/share_their_prompt")),
    "cancel": ("cancels in every state", _told("museum/g5_all_clients_leave_at_once")),
    "pause": ("a pause that retracts", _told("control/pause_retract_twice")),
    "flush-drain": ("a flush that waits, a drain", _told("control/flush_waits_for_flight")),
    "memory": ("device memory released and resumed", _told("control/release_memory")),
    "embedding": ("requests without output", _told("kinds/embedding")),
    "prompt-logprobs": ("logprobs of the prompt, over chunks", _told("kinds/prompt_logprobs_over_chunks")),
    "text-held-back": ("tokens that may begin a stop text", _told("streaming/text_held_back_across_a_retraction")),
    "weights": ("new weights below running requests", _told("control/update_in_place")),
    "restart": ("a lost device: the running batch waits again, first", _told("restart/requeues_first")),
    "batch-error": ("a batch that fails", _told("decode/batch_error_in_overlap")),
    "handover-prefill": ("prompts for a decode engine: chunks on their way, cancels", partial(record_fleet, name="p0")),
    "data-parallel": ("one of three ranks: rounds, idle batches, prompts that wait, a restart", record_rank),
    "data-parallel-structured": (
        "one of two ranks: grammars, forced tokens, drafts of layers that both run, prompts that wait for more",
        record_structured_rank,
    ),
    "handover-decode-rank": ("one of two decode ranks: prebuilt rows in passes of all", record_decode_rank),
    "handover-kinds-prefill": (
        "samples, a turn, an adapter, media, a grammar, an embedding; then it becomes a decode engine",
        partial(record_kinds, name="p0"),
    ),
    "handover-kinds-decode": ("its decode engine, which becomes a prefill engine", partial(record_kinds, name="d0")),
    "handover-decode": ("its decode engine: prebuilt rows, quarantine, recomputing", partial(record_fleet, name="d0")),
    "handover-hybrid-prefill": (
        "a prefill engine of a model with windows and states",
        partial(record_fleet, name="p0", **HANDED_OVER),
    ),
    "handover-hybrid-decode": ("its decode engine", partial(record_fleet, name="d0", **HANDED_OVER)),
}  # fmt: skip
"""Name: what it shows, and how it was recorded. A name is never used again for another journal."""


def record(name: str) -> int:
    """Record one feature, replacing an existing journal. Returns its bytes."""
    folder = FOLDER / name
    if FEATURES[name][1] is _brought:
        _brought(folder)
    if folder.exists():
        shutil.rmtree(folder)
    FEATURES[name][1](folder)
    write_words(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_words(folder: Path) -> None:
    """Write the words of every decision of a journal. Raises Divergence if it is not replayed as it was recorded."""
    walk = Walk(folder)
    text = decisions_text(decision_of(number, event, step, walk.names) for number, event, step in walk)
    (folder / DECISIONS).write_text(text, "utf-8", newline="\n")


def main(arguments: list[str]) -> int:
    """Record the names given, or those that are missing."""
    if arguments == ["--list"]:
        for name, (about, _) in FEATURES.items():
            print(f"{name:<20} {about}")
        return 0
    if arguments == ["--words"]:
        for name in FEATURES:
            write_words(FOLDER / name)
        return 0
    unknown = [name for name in arguments if name not in FEATURES]
    if unknown:
        print(f"no feature {', '.join(unknown)}\nhint: --list names them", file=sys.stderr)
        return 2
    names = arguments or [name for name in FEATURES if not (FOLDER / name).exists()]
    for name in names:
        print(f"{name:<20} {record(name):>8,} bytes")
    if not names:
        print("nothing is missing; give names to record again what is there")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
