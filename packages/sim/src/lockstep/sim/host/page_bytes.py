"""Bytes of a KV page: in host memory, and over the links of its GPUs."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.sim.cost import KvDtype, ModelSpec
from lockstep.sim.cost.parallel import Parallelism


class PageBytes(NamedTuple):
    """Bytes of one page of KV, of a window block or of a state block."""

    on_host: int  # the parts of all GPUs that hold it
    on_link: int  # the part of one GPU; with stages, of the one that has most

    @classmethod
    def of(cls, model: ModelSpec, split: Parallelism, kv_dtype: KvDtype, page_size: int) -> PageBytes:
        """Of a page of `page_size` tokens. A GPU keeps on the host what it holds: what is replicated, is there too."""
        return cls.of_rank(model.kv_bytes_per_token(kv_dtype, split) * page_size, split)

    @classmethod
    def of_rank(cls, rank: int, split: Parallelism) -> PageBytes:
        """Of what has so many bytes on one rank, all layers together."""
        return cls(rank * split.attention_tp, -(-rank // split.pp))
