"""Sums, joins and broadcasts of a tensor-parallel group, as far as one GPU can show: a group of one.

Sums and joins also in a CUDA graph. Likewise a trainer's group for new weights.

It goes through the same calls of NCCL as a group of several, so that a torch in which they changed is found here. Where
there are two GPUs, `engine` runs the demo model on both.
"""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.gpu_check.section import Section
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.weights_group import Backend, WeightsGroup

TIMEOUT_S = 20.0
ROWS, WIDTH = 256, 8192  # of the hidden states that a 70B model sums in a decode of 256 rows
REPEATS = 50


def run(section: Section) -> None:
    """Meet, sum, join, capture."""
    device = section.device
    if section.gpu:
        device = torch.device("cuda", device.index or 0)
    with TemporaryDirectory() as folder, section.trying("meeting"):
        group = Collectives(str(Path(folder) / "store"), 0, 1, device, TIMEOUT_S)
        given = torch.arange(24, dtype=torch.float32, device=device).view(4, 6)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with section.trying(f"sum, join and broadcast, {dtype}"), torch.inference_mode():
                some = given.to(dtype)
                same(section, f"sum, {dtype}", group.all_reduce(some.clone()), some)
                same(section, f"join, {dtype}", group.all_gather(some), some)
                same(section, f"broadcast, {dtype}", group.broadcast(some.clone(), 0), some)
        if not section.gpu:
            section.skip("graph", "it is what a GPU has")
        else:
            with section.trying("graph"):
                captured(section, group, given)
            with section.trying("times"):
                section.put("sum_us", sum_us(group, device))
        with section.trying("leaving"):
            group.close()
    with section.trying("new weights over a group"):
        weights(section, device)


def weights(section: Section, device: torch.device) -> None:
    """A trainer's end of a group of one: NCCL meets, sends and lets go, as it does with engines at other ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend: Backend = "nccl" if device.type == "cuda" else "gloo"
    group = WeightsGroup("127.0.0.1", port, 0, 1, timeout_s=TIMEOUT_S, backend=backend, device=device)
    given = torch.arange(24, dtype=torch.bfloat16, device=device).view(4, 6)
    sent = given.clone()
    group.send(sent)
    same(section, f"weights sent by {backend}", sent, given)
    group.close()


def captured(section: Section, group: Collectives, given: Tensor) -> None:
    """A graph with both in it, replayed with another input."""
    source = given.clone()
    stream = torch.cuda.Stream(given.device)
    stream.wait_stream(torch.cuda.current_stream(given.device))
    with torch.cuda.stream(stream), torch.inference_mode():
        group.all_gather(group.all_reduce(source * 2))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = group.all_gather(group.all_reduce(source * 2))
        source.copy_(given + 1)
        graph.replay()
    stream.synchronize()
    same(section, "sum and join, replayed", found, (given + 1) * 2)


def sum_us(group: Collectives, device: torch.device) -> float:
    """What NCCL costs beside the transfer, which a group of one has not."""
    hidden = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        for repeat in range(REPEATS + 1):
            if repeat == 1:
                begun.record()
            group.all_reduce(hidden)
        ended.record()
        ended.synchronize()
    return round(1000.0 * begun.elapsed_time(ended) / REPEATS, 2)


def same(section: Section, name: str, found: Tensor, expected: Tensor) -> None:
    """A check."""
    off = int((found != expected).sum()) if found.shape == expected.shape else found.numel()
    section.check(name, found.shape == expected.shape and not off, f"{off} of {found.numel()} values differ")
