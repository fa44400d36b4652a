"""A worker of vLLM without a model: it keeps what each KV cell, state and host page holds, and checks every read.

The "KV" of a position is a hash of all tokens up to it, and the next token follows from that hash. So the answer of a
request follows from its prompt alone (`expected`), whatever the scheduler does, and a plan that reads a cell or a state
with another content fails at once. Requests and block tables are kept as vLLM's model runner V1 keeps them.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

VOCABULARY = 1900


def chain(tokens: list[int]) -> list[int]:
    """Return the content of each position."""
    found, newest = [], 0
    for token in tokens:
        newest = crc32(token.to_bytes(4, "little"), newest)
        found.append(newest)
    return found


def next_token(content: int) -> int:
    """Return the token behind a position with this content."""
    return content % VOCABULARY


def expected(prompt: list[int], count: int) -> list[int]:
    """Return the first tokens of the answer to a prompt."""
    tokens = list(prompt)
    newest = chain(tokens)[-1]
    for _ in range(count):
        tokens.append(next_token(newest))
        newest = crc32(tokens[-1].to_bytes(4, "little"), newest)
    return tokens[len(prompt) :]


class FakeWorker:
    """The last pipeline stage, or the only one."""

    def __init__(self, kinds: list[str], block_tokens: int) -> None:
        """
        Args:
            kinds: of the KV cache groups: "full" or "state".
            block_tokens: of a block of the full group.
        """
        self.kinds = kinds
        self.block_tokens = block_tokens
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.cells: dict[tuple[int, int], int] = {}  # content by block and place in it
        self.states: dict[tuple[int, int], int] = {}  # content by group and block
        self.host: dict[tuple[int, int], int] = {}  # content by host page and place in it
        self.used: dict[int, str] = {}  # kind of group by block

    def run(self, output: Any) -> dict[str, list[int]]:
        """Run a plan. Returns the sampled tokens by request; none for a chunk that does not end its prompt."""
        for name in output.finished_req_ids:
            for known in (self.prompts, self.outputs, self.tables):
                known.pop(name, None)
        if output.kv_connector_metadata is not None:
            self._copy(output.kv_connector_metadata.copies)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.prompts[new.req_id], self.outputs[new.req_id] = list(new.prompt_token_ids), []
            self.tables[new.req_id] = [list(one) for one in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            del self.outputs[name][cached.num_output_tokens[i] :]  # tokens that were dropped with a retraction
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(one) for one in cached.new_block_ids[i]]
            elif cached.new_block_ids[i] is not None:
                for table, added in zip(self.tables[name], cached.new_block_ids[i], strict=True):
                    table += added
            starts[name] = cached.num_computed_tokens[i]
        return {name: self._compute(name, start, output.num_scheduled_tokens[name]) for name, start in starts.items()}

    def _copy(self, copies: list[tuple[bool, list[int], list[int]]]) -> None:
        for to_host, blocks, pages in copies:
            for block, page in zip(blocks, pages, strict=True):
                for place in range(self.block_tokens):
                    if to_host:
                        self.host[page, place] = self.cells[block, place]
                    else:
                        self.cells[block, place] = self.host[page, place]

    def _compute(self, name: str, start: int, count: int) -> list[int]:
        tokens = self.prompts[name] + self.outputs[name]
        stop = start + count
        assert stop <= len(tokens), f"{name}: tokens [{start}:{stop}) of {len(tokens)}"
        contents = chain(tokens[:stop])
        for group, (kind, table) in enumerate(zip(self.kinds, self.tables[name], strict=True)):
            for block in table:
                assert block > 0, f"{name}: the null block"
                assert self.used.setdefault(block, kind) == kind, f"block {block} holds {kind} and {self.used[block]}"
            if kind == "full":
                self._attend(name, table, contents, start)
            else:
                (block,) = table
                before = self.states.get((group, block))
                assert not start or before == contents[start - 1], f"{name}: state of another prefix at {start}"
                self.states[group, block] = contents[-1]
        if stop < len(tokens):
            return []
        self.outputs[name].append(next_token(contents[-1]))
        return [self.outputs[name][-1]]

    def _attend(self, name: str, table: list[int], contents: list[int], start: int) -> None:
        for position, content in enumerate(contents):
            cell = table[position // self.block_tokens], position % self.block_tokens
            if position < start:
                assert self.cells.get(cell) == content, f"{name}: position {position} reads another prefix in {cell}"
            else:
                self.cells[cell] = content
