"""Bytes of a KV page: in host memory, and over the links of its GPUs."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.sim.cost import KvDtype, ModelSpec
from lockstep.sim.cost.parallel import Parallelism


class PageBytes(NamedTuple):
    """Bytes of one page of KV, of a window block or of a state block."""

    on_host: int  # in host memory: the parts of all GPUs of a shard
    on_link: int  # over the link of one GPU; with stages, an equal share of the layers, rounded up

    @classmethod
    def of(cls, model: ModelSpec, split: Parallelism, kv_dtype: KvDtype, page_size: int) -> PageBytes:
        """Return the bytes of a page of `page_size` tokens. KV that is replicated on GPUs is replicated on the host."""
        return cls.of_rank(model.kv_bytes_per_token(kv_dtype, split) * page_size, split)

    @classmethod
    def of_rank(cls, rank: int, split: Parallelism) -> PageBytes:
        """Return the bytes of a block with `rank` bytes on one rank, all layers together."""
        return cls(rank * split.attention_tp, -(-rank // split.pp))
