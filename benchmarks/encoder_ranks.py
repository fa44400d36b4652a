"""Seconds to encode pictures on two ranks that divide them, and on two ranks that encode all, side by side.

Two engines of equal random weights (Qwen2.5-VL with a small tower) encode the same new pictures in turn; nothing else
runs in them. Outputs must be equal. Needs torch and transformers.

    python -m benchmarks.encoder_ranks [--rounds 5] [--pictures 8] [--side 30]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.host.media.content import EncoderInput, content_of
from lockstep.runtime import LLM
from lockstep.runtime.ranks import LeadMedia
from tests.support.pictures import MROPE, QWEN_VISION, TEXT, _marks

VISION: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "out_hidden_size": 32, "window_size": 64, "num_heads": 4,
    "fullatt_block_indexes": [1],
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "tp": 2, "grammar_backend": "none", "pages": 64}


def save_model(folder: Path) -> None:
    """Save a random model."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(7)
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, vision_config={**QWEN_VISION, **VISION}, **_marks()
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval().save_pretrained(folder)


def pictures(seed: int, count: int, side: int) -> list[EncoderInput]:
    """Return random pictures of `side` to `side` + 6 patches of each side."""
    rng, made = np.random.default_rng(seed), []
    token = _marks()["image_token_id"]
    for number in range(count):
        rows, columns = side + 2 * (number % 4), side
        values = rng.standard_normal((rows * columns, 96), np.float32)
        made.append(
            content_of(
                [token] * (rows * columns // 4), {"pixel_values": values, "image_grid_thw": [[1, rows, columns]]}
            )
        )
    return made


def seconds(llm: LLM, contents: list[EncoderInput]) -> float:
    """Return the seconds of rank 0 until all outputs are there."""
    lead = llm.host._encoder
    assert isinstance(lead, LeadMedia)
    lead.hold(0, contents)
    began = time.perf_counter()
    errors = lead.encode([one.digest for one in contents], ())
    took = time.perf_counter() - began
    assert not any(errors), errors
    return took


def main() -> None:
    """Encode, and print each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--side", type=int, default=30, help="patches, a multiple of 2")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        save_model(Path(place))
        with LLM(place, **OPTIONS) as divided, LLM(place, encoder_data_parallel=False, **OPTIONS) as whole:
            ratios = []
            for number in range(given.rounds + 1):
                contents = pictures(number, given.pictures, given.side)
                engines = (divided, whole) if number % 2 else (whole, divided)
                took = {id(llm): seconds(llm, contents) for llm in engines}
                first, second = took[id(divided)], took[id(whole)]
                assert divided.media is not None
                assert whole.media is not None
                for one in contents:
                    assert torch.equal(divided.media.outputs[one.digest][0], whole.media.outputs[one.digest][0])
                if number:  # the first round is a warm-up
                    ratios.append(second / first)
                    print(f"divided {first:6.2f} s   each encodes all {second:6.2f} s   ratio {second / first:5.2f}")
        print(f"median ratio of {given.rounds} rounds: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
