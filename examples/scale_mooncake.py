"""A Mooncake trace for a small model: lengths and blocks divided by one number, times and sharing unchanged.

    python examples/scale_mooncake.py conversation_trace.jsonl.gz --by 16 > small.jsonl
    lockstep workload describe small.jsonl

A hash id of the trace stands for 512 tokens, and in the result for 512 / BY tokens, so that prompts share the same
prefixes. The rows are in the `plain` format of docs/workloads.md, with prompts as token ids.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

BLOCK_TOKENS = 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--by", type=int, default=16, help="divisor of lengths and blocks; must divide 512")
    parser.add_argument("--outputs-by", type=int, help="divisor of output lengths; default: BY")
    parser.add_argument(
        "--longest", type=int, default=3072, help="most scaled tokens of a prompt; longer prompts are left out"
    )
    parser.add_argument("--limit", type=int, help="rows to read")
    arguments = parser.parse_args()
    by = arguments.by
    if by < 1 or BLOCK_TOKENS % by:
        parser.error(f"--by must divide {BLOCK_TOKENS}, got {by}")
    block = BLOCK_TOKENS // by
    data = arguments.trace.read_bytes()
    lines = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode().splitlines()
    for line in lines[: arguments.limit]:
        row = json.loads(line)
        tokens = max(row["input_length"] // by, 1)
        if tokens > arguments.longest:
            continue
        ids = [token for number in row["hash_ids"] for token in range(block * number, block * (number + 1))]
        small = {
            "arrival_ms": row["timestamp"],
            "input_tokens": tokens,
            "output_tokens": max(row["output_length"] // (arguments.outputs_by or by), 1),
            "prompt_token_ids": ids[:tokens],
        }
        print(json.dumps(small))
    return 0


if __name__ == "__main__":
    sys.exit(main())
