"""CPU time per token of a model with experts, with and without counting the tokens of each expert, side by side.

Two engines of equal random weights answer the same requests in turn. The ratio is of medians over rounds. Needs torch.

    python benchmarks/expert_load.py [--rounds 9] [--interval 100]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from lockstep.runtime import LLM, Params

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
ROWS, OUTPUT_TOKENS = 16, 96


def us_per_token(llm: LLM, start: int) -> float:
    """Return CPU time per token of prompts that no earlier round had."""
    prompts = [[start % 2000 + 3, row + 3, *range(5, 69)] for row in range(ROWS)]
    began = time.process_time()
    llm.generate(prompts, Params(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True))
    return (time.process_time() - began) * 1e6 / (ROWS * OUTPUT_TOKENS)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--interval", type=int, default=100, help="batches between two measurements")
    given = options.parse_args()
    common = {"device": "cpu", "grammar_backend": "none", "pages": 2000, "random_weights": 1}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODEL))
        with LLM(name, **common) as off, LLM(name, **common, expert_load_interval=given.interval) as on:
            times: dict[str, list[float]] = {"off": [], "on": []}
            for number in range(given.rounds + 1):
                for label, llm in (("off", off), ("on", on)):
                    times[label].append(us_per_token(llm, number))
    off_us, on_us = (statistics.median(times[label][1:]) for label in ("off", "on"))  # the first round warms up
    print(f"off {off_us:.1f} us per token, on {on_us:.1f}: ratio {on_us / off_us:.3f}")


if __name__ == "__main__":
    main()
