"""Triton kernels of attention over pages, launched by `triton_backend.py`; `reference.py` defines their results.

Keys and values of a layer are [pages, PAGE, KV_HEADS, D] each. A position is found through its row of the page table:

    position      0 1 2 3 | 4 5 6 7 | 8 9           PAGE = 4
    page table      17    |    3    |  90
    cell          (page * PAGE + position % PAGE) * KV_HEADS + kv_head, of D numbers each

A tile of scores is BLOCK_M queries times BLOCK_N positions. The GROUP query heads that share a KV head share a tile
with the tokens. Keys and values are then read once for all of them, and an odd GROUP wastes no row of the tile:

    row of the tile       0   1   2   3   4   5   6   7   ...       GROUP = 3
    token                 0   0   0   1   1   1   2   2             row // GROUP
    head of the group     0   1   2   0   1   2   0   1             row % GROUP

A decode is the same tile with one token. Softmax is online: for the positions scanned so far, each row keeps the
largest score `top`, the sum `total` of 2 ** (score - top), and in `acc` the sum of the values with these weights.
Scores are in units of log 2 because the hardware computes exp2.

`WINDOW` > 0 limits a token to its newest WINDOW positions, its own included. Tiles before the window of every row are
skipped; the rest has masks. Skipped tiles would add zeros, so the bits do not depend on where a tile begins. `CAP`
bounds scores, cap * tanh(score / cap). `SINKS` adds one more score per head to the finished sums, without a value:

    total of positions, top        2 ** (sink - top) is added to the total; the sum of values stays

KV in fp8 is widened to the dtype of the query, which is exact. The scale of keys is part of `scale`; the scale of
values is applied to the finished sums.

`WORDS` > 0 is for rows whose new tokens are of a tree of drafts (`draft_tree.py`). A token attends to all positions
before the tree, and to the slots of the tree on its path, one bit for each in WORDS words of 64 bits:

    slot of the tree      0   1   2   3   4           those before slot 0 are the positions 0 to `stand` - 1
    path of token 3       1   1   0   1   0           slot 0 is the lowest bit; with a window, slots inside of it

`SPLIT` > 0 fixes the order of additions: positions are cut every SPLIT, each piece is summed by itself, and pieces are
added from left to right. The numbers of a token then do not depend on the kernel that adds: one program that walks
along all positions, or several with a merge behind; for one token or for a chunk; in a batch or alone. Such launches
need `enable_fp_fusion=False`, so that the compiler does not fuse a product and a sum in only some of the kernels.
"""

# Triton reads the source of these functions: constants are upper case, as in its own kernels.
# ruff: noqa: N803

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)  # sinks come in natural units

ANYWHERE = ["rows", "indptr", "lengths"]
"""Parts of a packed plan, each of which begins at the end of the part before it. Without this list Triton would
compile a kernel anew for each combination of parts that happen to be aligned to 16 bytes: seconds each, while requests
wait."""


@triton.jit
def write_kv(
    key,  # [tokens, KV_HEADS, D], strides given, numbers of a head contiguous
    value,
    keys,  # [cells, KV_HEADS, D]
    values,
    slots,  # int64 [tokens]
    key_token,
    key_head,
    value_token,
    value_head,
    key_scale,
    value_scale,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """Copy the new keys and values to their slots; for fp8, divide them by their scales and clamp them to its range.

    One program per token:  [ head 0: D ][ head 1: D ] ...  KV_HEADS * D numbers in one block, to one run of memory.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < KV_HEADS * D
    head, dim = at // D, at % D
    cell = tl.load(slots + token) * KV_HEADS * D + at
    new = tl.load(key + token * key_token + head * key_head + dim, mask=inside)
    if FP8:
        new = tl.minimum(tl.maximum(new.to(tl.float32) / key_scale, -448.0), 448.0)
    tl.store(keys + cell, new.to(keys.dtype.element_ty), mask=inside)
    new = tl.load(value + token * value_token + head * value_head + dim, mask=inside)
    if FP8:
        new = tl.minimum(tl.maximum(new.to(tl.float32) / value_scale, -448.0), 448.0)
    tl.store(values + cell, new.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _scan(
    acc,  # fp32 [BLOCK_M, BLOCK_D]
    top,  # fp32 [BLOCK_M], -inf before the first position
    total,  # fp32 [BLOCK_M]
    queries,  # [BLOCK_M, BLOCK_D]
    seen,  # int32 [BLOCK_M], the last position that each row attends to, with WORDS before its tree; -1 for padding
    own,  # int32 [BLOCK_M], position of each row's token; without WORDS equal to `seen`
    path,  # int64 pointers [BLOCK_M] to the words of each row's path; with WORDS
    stand,  # position of slot 0 of the tree; with WORDS
    first,
    stop,
    keys,
    values,
    table,  # page numbers of the row
    kv_head,
    scale,
    cap,
    oldest,  # positions before it are not read, with WINDOW
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Accumulate positions [first:stop). Without MASKED, every row attends to all of them, and all tiles are whole.

    first                            stop
      | tile 0 | tile 1 | tile 2 | t...        one turn of the loop: BLOCK_N keys, BLOCK_N values
    """
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    for base in tl.range(first, stop, BLOCK_N):
        at = base + columns
        readable = at < stop
        if WINDOW > 0:
            readable = readable & (at >= oldest)
        if MASKED:
            pages = tl.load(table + at // PAGE, mask=readable, other=0)
        else:
            pages = tl.load(table + at // PAGE)
        cells = ((pages.to(tl.int64) * PAGE + at % PAGE) * KV_HEADS + kv_head) * D

        where_key = keys + cells[None, :] + dims[:, None]
        where_value = values + cells[:, None] + dims[None, :]
        if MASKED:  # slots behind the last position may hold anything, NaN included, and are not read
            key = tl.load(where_key, mask=readable[None, :] & (dims[:, None] < D), other=0.0)
            value = tl.load(where_value, mask=readable[:, None] & (dims[None, :] < D), other=0.0)
        elif BLOCK_D > D:
            key = tl.load(where_key, mask=dims[:, None] < D, other=0.0)
            value = tl.load(where_value, mask=dims[None, :] < D, other=0.0)
        else:
            key = tl.load(where_key)
            value = tl.load(where_value)

        score = tl.dot(queries, key.to(queries.dtype), input_precision=PRECISION) * scale
        if CAP:
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
        if MASKED:
            attended = (at[None, :] <= seen[:, None]) & readable[None, :]
            if WINDOW > 0:
                attended = attended & (at[None, :] > own[:, None] - WINDOW)
            for word in tl.static_range(WORDS):
                slot = at - (stand + 64 * word)
                bits = tl.load(path + word)
                bit = (bits[:, None] >> tl.minimum(tl.maximum(slot, 0), 63).to(tl.int64)[None, :]) & 1
                attended = attended | ((bit != 0) & ((slot >= 0) & (slot < 64) & readable)[None, :])
            score = tl.where(attended, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        # Before its first position a row has no largest score; -inf minus -inf would be NaN.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - anchor[:, None])
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(queries.dtype), value.to(queries.dtype), acc, input_precision=PRECISION)
        top = higher
    return acc, top, total


@triton.jit
def _add(acc, top, total, part, part_top, part_total):
    """Add a piece to the sum of the pieces before it; shapes [rows, dims], [rows], [rows] each."""
    higher = tl.maximum(top, part_top)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    part_shrink = tl.exp2(part_top - anchor)
    acc = acc * shrink[:, None] + part * part_shrink[:, None]
    total = total * shrink + part_total * part_shrink
    return acc, higher, total


@triton.jit
def _origin(oldest, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Return where the sums begin: the start of the tile, or of the piece, of the oldest position; 0 without windows.

    Args: oldest: least position that a row attends to, may be below 0.
    """
    if WINDOW == 0:
        origin = 0
    elif SPLIT == 0:
        origin = tl.maximum(oldest, 0) // BLOCK_N * BLOCK_N
    else:
        origin = tl.maximum(oldest, 0) // SPLIT * SPLIT
    return origin


@triton.jit
def _with_sink(acc, top, total, sink):
    """Return the sum of values and the total of weights, with a sink of this score; shapes [rows, dims], [rows]."""
    higher = tl.maximum(top, sink)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - anchor)


@triton.jit
def _attend(
    queries,
    seen,
    own,
    path,
    stand,
    first,
    whole,
    stop,
    keys,
    values,
    table,
    kv_head,
    scale,
    cap,
    oldest,  # least position that a row attends to, with WINDOW
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Compute one piece, positions [first:stop). All rows attend to the positions before `whole`.

    first             whole        stop
      | tile | tile | ti|e | tile | t       whole tiles that every row attends to need no masks
      |   no masks    |   masks    |        with WINDOW all tiles have masks, from the first that a row attends to
    """
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if WINDOW > 0:
        middle = first + tl.maximum(oldest - first, 0) // BLOCK_N * BLOCK_N
    else:
        middle = first + tl.maximum(tl.minimum(whole, stop) - first, 0) // BLOCK_N * BLOCK_N
        acc, top, total = _scan(
            acc, top, total, queries, seen, own, path, stand, first, middle, keys, values, table, kv_head, scale, cap,
            oldest, KV_HEADS, D, PAGE, BLOCK_D, BLOCK_N, False, PRECISION, WINDOW, CAP, WORDS,
        )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, queries, seen, own, path, stand, middle, stop, keys, values, table, kv_head, scale, cap,
        oldest, KV_HEADS, D, PAGE, BLOCK_D, BLOCK_N, True, PRECISION, WINDOW, CAP, WORDS,
    )  # fmt: skip
    return acc, top, total


@triton.jit
def _attend_in_order(
    queries,
    seen,
    own,
    path,
    stand,
    whole,
    stop,
    keys,
    values,
    table,
    kv_head,
    scale,
    cap,
    oldest,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Compute all positions [0:stop) in one program, in pieces of SPLIT positions if SPLIT > 0.

    0           SPLIT       2 * SPLIT   stop
    |   piece 0   |   piece 1   | piece 2 |        ((0 + piece 0) + piece 1) + piece 2
    """
    origin = _origin(oldest, WINDOW, BLOCK_N, SPLIT)
    if SPLIT == 0:
        acc, top, total = _attend(
            queries, seen, own, path, stand, origin, whole, stop, keys, values, table, kv_head, scale, cap, oldest,
            KV_HEADS, D, PAGE, BLOCK_M, BLOCK_D, BLOCK_N, PRECISION, WINDOW, CAP, WORDS,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(origin, stop, SPLIT):
            part, part_top, part_total = _attend(
                queries, seen, own, path, stand, first, whole, tl.minimum(first + SPLIT, stop), keys, values, table,
                kv_head, scale, cap, oldest, KV_HEADS, D, PAGE, BLOCK_M, BLOCK_D, BLOCK_N, PRECISION, WINDOW, CAP,
                WORDS,
            )  # fmt: skip
            acc, top, total = _add(acc, top, total, part, part_top, part_total)
    return acc, top, total


@triton.jit
def _paths(paths, tokens, stand, WORDS: tl.constexpr):
    """Return the position of each token of trees, and pointers to the words of its path; shape [rows] both.

    Args: tokens: numbers of the tokens among those of `paths`; stand: position of slot 0 of their tree.
    """
    path = paths + tokens * (1 + WORDS)
    return stand + tl.load(path).to(tl.int32), path + 1


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def extend(
    query,  # [tokens, heads, D], strides given
    keys,
    values,
    out,  # [tokens, heads, D], contiguous
    page_table,  # int32 [table rows, width]
    rows,  # int32 [rows]
    indptr,  # int32 [rows + 1]
    lengths,  # int32 [rows]
    query_token,
    query_head,
    table_row,
    scale,
    value_scale,  # scale of values in fp8; that of keys is part of `scale`
    cap,  # bound of scores, in units of log 2 as `scale`
    sinks,  # [heads], scores of sinks; anything without SINKS
    paths,  # int64 [new tokens, 1 + WORDS], depth in the tree and the path of each; None without WORDS
    spans,  # int32 [rows + 1], slots of the trees of the rows before; None without WORDS
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Attend from the new tokens of rows with earlier KV: prefill, chunks, prefixes from the cache.

    Grid (tiles over new tokens, KV heads, rows). What a tile reads, for a row of length 11 with 6 new tokens:

              positions 0 . . . . | 5 . . . . 10
      tile 0   tokens 5, 6       x x x x x   x x
      tile 1   tokens 7, 8       x x x x x   x x x x            x computed; to the right of the diagonal
      tile 2   tokens 9, 10      x x x x x   x x x x x x        inside of a tile, masked

    With WORDS all rows have trees. Numbers of tokens ascend, so that no token attends behind the same diagonal.

    Tiles with the most positions start first, so that only short tiles run at the end, when the GPU is no longer full.
    """
    row = tl.program_id(2)
    kv_head = tl.program_id(1)
    first_token = tl.load(indptr + row)
    new = tl.load(indptr + row + 1) - first_token
    first_packed = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_packed >= new * GROUP:
        return
    length = tl.load(lengths + row)
    start = length - new
    table = page_table + tl.load(rows + row).to(tl.int64) * table_row

    packed = first_packed + tl.arange(0, BLOCK_M)
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    seen = tl.where(token < new, start + token, -1)
    dims = tl.arange(0, BLOCK_D)
    inside = (token[:, None] < new) & (dims[None, :] < D)
    token_at = (first_token + token).to(tl.int64)
    where_query = query + token_at[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    queries = tl.load(where_query, mask=inside, other=0.0)

    whole = start + first_packed // GROUP + 1
    stop = tl.minimum(start + (first_packed + BLOCK_M - 1) // GROUP + 1, length)
    oldest = start + first_packed // GROUP - WINDOW + 1
    own = seen
    path = seen
    stand = start
    if WORDS > 0:
        stand = length - (tl.load(spans + row + 1) - tl.load(spans + row))
        within = first_token - tl.load(indptr) + tl.minimum(token, new - 1)
        own, path = _paths(paths, within.to(tl.int64), stand, WORDS)
        seen = tl.where(token < new, stand - 1, -1)
        whole = stand
        oldest = stand - WINDOW + 1
    acc, top, total = _attend_in_order(
        queries, seen, own, path, stand, whole, stop, keys, values, table, kv_head, scale, cap, oldest,
        KV_HEADS, D, PAGE, BLOCK_M, BLOCK_D, BLOCK_N, SPLIT, PRECISION, WINDOW, CAP, WORDS,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        acc, total = _with_sink(acc, top, total, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8:
        acc = acc * value_scale
    where_out = out + (token_at[:, None] * (KV_HEADS * GROUP) + head[:, None]) * D + dims[None, :]
    tl.store(where_out, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=ANYWHERE)
def decode(
    query,  # [tokens, heads, D], strides given
    keys,
    values,
    out,  # [tokens, heads, D], contiguous
    page_table,  # int32 [table rows, width]
    rows,  # int32 [rows]
    indptr,  # int32 [rows + 1]
    lengths,  # int32 [rows]
    first_row,  # index of the first row that decodes
    query_token,
    query_head,
    table_row,
    scale,
    value_scale,  # scale of values in fp8; that of keys is part of `scale`
    cap,  # bound of scores, in units of log 2 as `scale`
    sinks,  # [heads], scores of sinks; anything without SINKS
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # GROUP, rounded up to the rows that a tensor core takes
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend from one new token per row, with one program for all positions of a row.

    For batches with enough rows to fill the GPU. Grid (KV heads, rows). Programs of neighbouring KV heads run side by
    side and read neighbouring memory.
    """
    kv_head = tl.program_id(0)
    row = first_row + tl.program_id(1)
    length = tl.load(lengths + row)
    token = tl.load(indptr + row).to(tl.int64)
    table = page_table + tl.load(rows + row).to(tl.int64) * table_row

    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = (member[:, None] < GROUP) & (dims[None, :] < D)
    head = kv_head * GROUP + member
    where_query = query + token * query_token + head[:, None] * query_head + dims[None, :]
    queries = tl.load(where_query, mask=inside, other=0.0)
    seen = tl.where(member < GROUP, length - 1, -1)
    acc, top, total = _attend_in_order(
        queries, seen, seen, seen, length, length, length, keys, values, table, kv_head, scale, cap, length - WINDOW,
        KV_HEADS, D, PAGE, BLOCK_M, BLOCK_D, BLOCK_N, SPLIT, PRECISION, WINDOW, CAP, 0,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2_E
        acc, total = _with_sink(acc, top, total, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8:
        acc = acc * value_scale
    where_out = out + (token * (KV_HEADS * GROUP) + head[:, None]) * D + dims[None, :]
    tl.store(where_out, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _units(begins, stops, row, there, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the tiles, or with SPLIT the pieces, that rows read; 0 for rows that are not `there`. Shape [rows]."""
    length = tl.load(stops + row, mask=there, other=0)
    new = tl.load(begins + row + 1, mask=there, other=0) - tl.load(begins + row, mask=there, other=0)
    count = length - _origin(length - new - WINDOW + 1, WINDOW, BLOCK_N, SPLIT)
    if SPLIT == 0:
        units = tl.cdiv(count, BLOCK_N)
    else:
        units = tl.cdiv(count, SPLIT)
    return tl.where(there, units, 0)


@triton.jit(do_not_specialize=["first_row", "rows", "slots", "most"], do_not_specialize_on_alignment=ANYWHERE)
def divide(
    divided,  # int32 [1 + 2 * rows]
    indptr,
    lengths,
    first_row,
    rows,
    slots,  # items that the GPU runs at once for each KV head
    most,  # items of one row
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,  # rows that are read at once
):
    """Divide rows into items of about equal numbers of positions, one for each program of `attend_split`.

    One program. A unit is a tile of positions, or with SPLIT a piece.

      row 0  | unit unit unit | unit unit |         2 items of up to 3 units
      row 1  | unit |                               1 item
      divided [0]                 units of an item                                  3
              [1 : 1 + rows]      items of this row and those before it             2, 3
              [1 + rows : ]       cells, likewise: parts that items store           2, 3      with SPLIT: 5, 6

    Reference: `triton_backend.divide_reference`, which has the rule.
    """
    column = tl.arange(0, ROWS)
    total = 0
    longest = 1
    for base in range(0, rows, ROWS):
        at = base + column
        units = _units(indptr, lengths, first_row + at, at < rows, BLOCK_N, SPLIT, WINDOW)
        total += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
    least = tl.maximum(tl.cdiv(longest, most), 1)
    even = longest
    cost = longest
    if rows > slots:
        cost = longest + tl.cdiv(total, slots)
    else:
        even = tl.cdiv(total, slots)
        high = longest
        while even < high:
            middle = (even + high) // 2
            items = 0
            for base in range(0, rows, ROWS):
                at = base + column
                units = _units(indptr, lengths, first_row + at, at < rows, BLOCK_N, SPLIT, WINDOW)
                items += tl.sum(tl.cdiv(units, middle), 0)
            if items <= slots:
                high = middle
            else:
                even = middle + 1
        cost = even
    each = tl.maximum(even, least)
    if cost * slots * 8 > total * 15:
        each = tl.maximum(tl.cdiv(total, 2 * slots), least)
    tl.store(divided, each)
    items_before = 0
    cells_before = 0
    for base in range(0, rows, ROWS):
        at = base + column
        there = at < rows
        units = _units(indptr, lengths, first_row + at, there, BLOCK_N, SPLIT, WINDOW)
        items = tl.cdiv(units, each)
        tl.store(divided + 1 + at, items_before + tl.cumsum(items, 0), mask=there)
        items_before += tl.sum(items, 0)
        if SPLIT == 0:
            cells = items
        else:
            cells = units
        tl.store(divided + 1 + rows + at, cells_before + tl.cumsum(cells, 0), mask=there)
        cells_before += tl.sum(cells, 0)


@triton.jit(do_not_specialize=["first_row", "count", "tile"], do_not_specialize_on_alignment=ANYWHERE)
def attend_split(
    query,
    keys,
    values,
    parts,  # fp32 [cells, KV_HEADS, tile, D]
    sums,  # fp32 [cells, KV_HEADS, tile, 2], top and total
    divided,  # of `divide`
    page_table,
    rows,
    indptr,
    lengths,
    first_row,
    count,  # rows that are divided
    tile,  # GROUP times the most new tokens of a row, at most BLOCK_M
    query_token,
    query_head,
    table_row,
    scale,
    cap,
    paths,  # of `extend`
    spans,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Attend from few new tokens per row, with the positions of a row split over several programs; `merge` adds them.

    For decodes, and for extends whose new tokens fit one tile, such as drafts to verify. Grid (KV heads, items), of
    which those behind the last item of `divide` return. With WINDOW the units begin at the origin of the window of the
    first new token, not at 0.

      SPLIT = 0    | tile tile tile | tile tile |       one part for each item
      SPLIT > 0    |  0  |  1  |  2 |  3  |  4  |       one part for each piece
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    column = tl.arange(0, ROWS)
    index = 0
    for base in range(0, count, ROWS):
        ends = tl.load(divided + 1 + base + column, mask=base + column < count, other=2147483647)
        index += tl.sum((ends <= item).to(tl.int32), 0)
    if index >= count:
        return
    each = tl.load(divided)
    item -= tl.load(divided + index, mask=index > 0, other=0)
    first_cell = tl.load(divided + count + index, mask=index > 0, other=0).to(tl.int64)

    row = first_row + index
    length = tl.load(lengths + row)
    first_token = tl.load(indptr + row)
    new = tl.load(indptr + row + 1) - first_token
    start = length - new
    if WORDS > 0:
        start = length - (tl.load(spans + index + 1) - tl.load(spans + index))
    oldest = start - WINDOW + 1
    origin = _origin(oldest, WINDOW, BLOCK_N, SPLIT)
    table = page_table + tl.load(rows + row).to(tl.int64) * table_row

    member = tl.arange(0, BLOCK_M)
    token = member // GROUP
    head = kv_head * GROUP + member % GROUP
    seen = tl.where(token < new, start + token, -1)
    whole = start + 1
    own = seen
    path = seen
    if WORDS > 0:
        within = first_token - tl.load(indptr + first_row) + tl.minimum(token, new - 1)
        own, path = _paths(paths, within.to(tl.int64), start, WORDS)
        seen = tl.where(token < new, start - 1, -1)
        whole = start
    dims = tl.arange(0, BLOCK_D)
    inside = (token[:, None] < new) & (dims[None, :] < D)
    token_at = (first_token + token).to(tl.int64)
    where_query = query + token_at[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    queries = tl.load(where_query, mask=inside, other=0.0)
    if SPLIT == 0:
        piece = each * BLOCK_N
        begin = item
        end = item + 1
    else:
        piece = SPLIT
        begin = item * each
        end = tl.minimum(begin + each, tl.cdiv(length - origin, SPLIT))
    for unit in range(begin, end):
        first = origin + unit * piece
        part, part_top, part_total = _attend(
            queries, seen, own, path, start, first, whole, tl.minimum(first + piece, length), keys, values, table,
            kv_head, scale, cap, oldest, KV_HEADS, D, PAGE, BLOCK_M, BLOCK_D, BLOCK_N, PRECISION, WINDOW, CAP, WORDS,
        )  # fmt: skip
        cell = ((first_cell + unit) * KV_HEADS + kv_head) * tile + member
        tl.store(parts + cell[:, None] * D + dims[None, :], part, mask=inside)
        tl.store(sums + cell * 2, part_top, mask=token < new)
        tl.store(sums + cell * 2 + 1, part_total, mask=token < new)


@triton.jit(do_not_specialize=["first_row", "count", "tile"], do_not_specialize_on_alignment=ANYWHERE)
def merge(
    parts,
    sums,
    out,
    divided,
    indptr,
    first_row,
    count,
    tile,
    value_scale,
    sinks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add the parts of a row from left to right. Grid (KV heads times `tile`, rows); see `attend_split`.

    | 0 1 2 ... AHEAD - 1 | AHEAD ...         AHEAD parts are loaded at a time, additions stay in order
    """
    kv_head = tl.program_id(0) // tile
    member = tl.program_id(0) % tile
    index = tl.program_id(1)
    row = first_row + index
    first_token = tl.load(indptr + row)
    if member // GROUP >= tl.load(indptr + row + 1) - first_token:
        return
    head = kv_head * GROUP + member % GROUP
    first_cell = tl.load(divided + count + index, mask=index > 0, other=0).to(tl.int64)
    pieces = tl.load(divided + 1 + count + index) - first_cell
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for base in range(0, pieces, AHEAD):
        for offset in tl.static_range(AHEAD):
            unit = base + offset + tl.arange(0, 1)
            cell = ((first_cell + unit) * KV_HEADS + kv_head) * tile + member
            there = unit < pieces
            part = tl.load(
                parts + cell[:, None] * D + dims[None, :], mask=there[:, None] & (dims[None, :] < D), other=0.0
            )
            part_top = tl.load(sums + cell * 2, mask=there, other=float("-inf"))
            part_total = tl.load(sums + cell * 2 + 1, mask=there, other=0.0)
            acc, top, total = _add(acc, top, total, part, part_top, part_total)
    if SINKS:
        sink = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        acc, total = _with_sink(acc, top, total, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8:
        acc = acc * value_scale
    token = (first_token + member // GROUP).to(tl.int64)
    where_out = out + (token * (KV_HEADS * GROUP) + head) * D + dims[None, :]
    tl.store(where_out, acc.to(out.dtype.element_ty), mask=dims[None, :] < D)
