"""A decode step of one row in one launch. Programs stay on their processors, and wait for one another where kernels would follow one
another: for models whose layers are read in a few microseconds, launches would take longer than anything else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model.kernels import cache
from banyan_runtime.model.kernels.paged_attention import joined, none_of, over, seen_from
from banyan_runtime.model.kernels.products import bias_part, lines, norm_part, part
from banyan_runtime.model.kernels.rows import head_norms, placed

PHASES = 7
ALL: tl.constexpr = tl.constexpr(-1)  # phases, with all that they wait for
QKV: tl.constexpr = tl.constexpr(0)
ATTEND: tl.constexpr = tl.constexpr(1)
JOIN: tl.constexpr = tl.constexpr(2)
OUT: tl.constexpr = tl.constexpr(3)
GATE_UP: tl.constexpr = tl.constexpr(4)
DOWN: tl.constexpr = tl.constexpr(5)
LAST: tl.constexpr = tl.constexpr(6)  # behind all layers

COUNTERS = 64
"""int32, of which the two that are used lie in lines of their own."""


@triton.jit(do_not_specialize=["begin", "end", "table_stride"])
def decode(
    ids,  # int32 [1]: the token; negative: the latest one of its row
    rows,  # int32 [1]: its row of `latest` and `table`
    positions,  # int32 [1]
    slots,  # int32 [1]: where its keys and values go
    ends,  # int32 [1]: keys that it sees, its own the last; 0: it is padding
    latest,  # int64 [rows]
    table,  # int32 [rows, table_stride]: in which slot each position's key lies
    table_stride,
    embed,  # [vocabulary, HIDDEN]
    cos,  # [positions, DIM]
    sin,  # likewise, with the sign that the first half gets
    windows,  # int64 [layers]: positions that are seen
    input_norms,  # int64 [layers]: where weights lie, in embed's type
    qkv_weights,
    qkv_biases,
    q_norms,
    k_norms,
    out_weights,
    out_biases,
    mlp_norms,
    gate_up_weights,
    gate_up_biases,
    down_weights,
    down_biases,
    keys,  # [layers, KV_HEADS, slots, DIM], head_stride apart; in embed's type, or NARROW: in a narrower one
    values,  # likewise
    head_stride,
    nothing,  # [HIDDEN] zeros
    sums,  # [2, HIDDEN]: hidden states, before attention and behind it
    delta,  # [HIDDEN]: what is still to be added to them
    qkv,  # [(HEADS + 2 * KV_HEADS) * DIM]
    queries,  # [programs, HEADS * DIM]: those that a program attends for
    parts,  # fp32 [STRETCHES, HEADS, DIM]
    highs,  # fp32 [STRETCHES, HEADS]
    masses,  # likewise
    attended,  # [HEADS * DIM]
    inner,  # [INNER]
    hidden,  # [HIDDEN]: the result
    counters,  # int32 [COUNTERS] zeros, before and afterwards
    eps,
    scale,
    begin,  # layer
    end,  # layer behind the last one
    ONLY: tl.constexpr,  # a phase, for as many launches as there would be kernels; or ALL
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QKV_BIASED: tl.constexpr,
    OUT_BIASED: tl.constexpr,
    MLP_BIASED: tl.constexpr,
    NORMED: tl.constexpr,  # heads
    WINDOWED: tl.constexpr,  # any layer
    QKV_LINES: tl.constexpr,  # of a weight that a program multiplies at a time
    OUT_LINES: tl.constexpr,
    GATE_UP_LINES: tl.constexpr,  # of gates, and as many of ups
    DOWN_LINES: tl.constexpr,
    COLUMNS: tl.constexpr,  # likewise
    AHEAD: tl.constexpr,  # bytes of a weight that a program brings into the cache while it waits for others, at most; 0: none
    STRETCHES: tl.constexpr,  # that a context is cut into, at most
    STRETCH: tl.constexpr,  # keys that are not worth a cut
    KEYS: tl.constexpr,  # at a time
    ROWS: tl.constexpr,  # heads that share a KV head, or the next power of two that tensor cores take
    GROUP: tl.constexpr,  # as many, and one more: the next power of two
    HALF: tl.constexpr,  # DIM // 2, or the next power of two
    TOGETHER: tl.constexpr,  # stretches that are joined at once
    PADDING: tl.constexpr,
    LARGEST: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of fp32
):
    """One token through some layers: every program takes its share of each phase."""
    WHOLE: tl.constexpr = ONLY == ALL
    program, programs = tl.program_id(0), tl.num_programs(0)
    kind = embed.dtype.element_ty
    row, position, slot, seen = tl.load(rows).to(tl.int64), tl.load(positions), tl.load(slots).to(tl.int64), tl.load(ends)
    token = tl.load(ids).to(tl.int64)
    if token < 0:
        token = tl.load(latest + row)
    own_slots = table + row * table_stride
    passed = 0
    for layer in range(begin, end):
        if WHOLE or ONLY == QKV:
            if WHOLE and layer > 0:
                _arrive(counters)
            before, added = sums, delta
            if layer == 0:
                before, added = embed + token * HIDDEN, nothing
            passed = _product(
                before, added, input_norms, qkv_weights, qkv_biases, sums + HIDDEN, qkv, layer, (HEADS + 2 * KV_HEADS) * DIM, eps, counters,
                passed, layer > 0, kind, WHOLE, True, QKV_BIASED, False, HIDDEN, COLUMNS, QKV_LINES,
            )  # fmt: skip
        # Of a window only, and begun at a multiple of KEYS.
        window = tl.load(windows + layer).to(tl.int32)
        unseen = tl.maximum(seen - window, 0) // KEYS * KEYS
        length = tl.maximum(STRETCH, seen - unseen)
        if seen - unseen > STRETCH:
            length = tl.cdiv(tl.cdiv(seen - unseen, STRETCHES), KEYS) * KEYS
        stretches = tl.maximum(tl.cdiv(seen - unseen, length), 1)
        if WHOLE or ONLY == ATTEND:
            if WHOLE:
                _arrive(counters)
                _ahead(out_weights, layer, HIDDEN, kind, False, HEADS * DIM, AHEAD)
                _beside(out_biases, layer, HIDDEN, kind, OUT_BIASED, AHEAD)
                _ahead(gate_up_weights, layer, INNER, kind, True, HIDDEN, AHEAD)
                _beside(gate_up_biases, layer, 2 * INNER, kind, MLP_BIASED, AHEAD)
                _beside(mlp_norms, layer, HIDDEN, kind, True, AHEAD)
                passed = _await(counters, passed)
            shift = tl.cast(layer, tl.int64) * KV_HEADS * head_stride
            for item in range(program, KV_HEADS * stretches, programs):
                head, stretch = item % KV_HEADS, item // KV_HEADS
                _attend(
                    qkv, cos + position.to(tl.int64) * DIM, sin + position.to(tl.int64) * DIM, _at(q_norms, layer, kind),
                    _at(k_norms, layer, kind), keys + shift, values + shift, head_stride, own_slots, position, seen, slot,
                    queries + program * HEADS * DIM, parts, highs, masses, attended, head, stretch, stretches,
                    unseen + stretch * length, tl.minimum(unseen + stretch * length + length, seen), window, eps, scale,
                    HEADS, KV_HEADS, DIM, NORMED, WINDOWED, KEYS, ROWS, GROUP, HALF, PADDING, LARGEST, NARROW, PRECISION,
                )  # fmt: skip
        if WHOLE or ONLY == JOIN:  # noqa: SIM102 (known when it is compiled, as others below)
            if stretches > 1:
                if WHOLE:
                    _arrive(counters)
                    passed = _await(counters, passed)
                for head in range(program, HEADS, programs):
                    joined(parts, highs, masses, attended, head, HEADS, stretches, DIM, 2 * HALF, TOGETHER)
        if WHOLE or ONLY == OUT:
            if WHOLE:
                _arrive(counters)
            passed = _product(
                attended, attended, out_biases, out_weights, out_biases, attended, delta, layer, HIDDEN, eps, counters,
                passed, True, kind, WHOLE, False, OUT_BIASED, False, HEADS * DIM, COLUMNS, OUT_LINES,
            )  # fmt: skip
        if WHOLE or ONLY == GATE_UP:
            if WHOLE:
                _arrive(counters)
                _ahead(down_weights, layer, HIDDEN, kind, False, INNER, AHEAD)
                _beside(down_biases, layer, HIDDEN, kind, MLP_BIASED, AHEAD)
            passed = _product(
                sums + HIDDEN, delta, mlp_norms, gate_up_weights, gate_up_biases, sums, inner, layer, INNER, eps, counters,
                passed, True, kind, WHOLE, True, MLP_BIASED, True, HIDDEN, COLUMNS, GATE_UP_LINES,
            )  # fmt: skip
        if WHOLE or ONLY == DOWN:
            if WHOLE:
                _arrive(counters)
                if layer + 1 < end:
                    _ahead(qkv_weights, layer + 1, (HEADS + 2 * KV_HEADS) * DIM, kind, False, HIDDEN, AHEAD)
                    _beside(qkv_biases, layer + 1, (HEADS + 2 * KV_HEADS) * DIM, kind, QKV_BIASED, AHEAD)
                    _beside(input_norms, layer + 1, HIDDEN, kind, True, AHEAD)
            passed = _product(
                inner, inner, down_biases, down_weights, down_biases, inner, delta, layer, HIDDEN, eps, counters,
                passed, True, kind, WHOLE, False, MLP_BIASED, False, INNER, COLUMNS, DOWN_LINES,
            )  # fmt: skip
    if WHOLE or ONLY == LAST:
        if WHOLE:
            _arrive(counters)
            _await(counters, passed)
        for first in range(program * COLUMNS, HIDDEN, programs * COLUMNS):
            at = first + tl.arange(0, COLUMNS)
            own = tl.load(sums + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
            result = own + tl.load(delta + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
            tl.store(hidden + at, result.to(kind), mask=at < HIDDEN)
    if WHOLE:  # noqa: SIM102
        # Whoever leaves last knows that nobody looks at the counters any more.
        if tl.atomic_add(counters + 32, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.store(counters, 0)
            tl.store(counters + 32, 0)


@triton.jit
def _arrive(counters):
    """Say that this program has come to where all of them meet: what it wrote before is there for them then."""
    tl.debug_barrier()
    tl.atomic_add(counters, 1, sem="release", scope="gpu")


@triton.jit
def _await(counters, passed):
    """Wait until all have come; `passed`: how often they have met before."""
    all_of_them = (passed + 1) * tl.num_programs(0)
    while tl.atomic_add(counters, 0, sem="acquire", scope="gpu") < all_of_them:  # of 0: a load, of one thread
        pass
    tl.debug_barrier()
    return passed + 1


@triton.jit
def _ahead(
    weights, layer, outputs: tl.constexpr, kind: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Bring the beginning of what this program will multiply into the cache, so that memory is read while programs wait for one another."""
    if MOST > 0:
        share = tl.cdiv(outputs, tl.num_programs(0))
        first = tl.program_id(0) * share
        count = tl.minimum(tl.minimum(share, outputs - first) * WIDTH, MOST // (kind.primitive_bitwidth // 8))
        weight = _at(weights, layer, kind) + first.to(tl.int64) * WIDTH
        if count > 0:
            cache.piece(weight, count)
            if GATED:
                cache.piece(weight + tl.cast(outputs, tl.int64) * WIDTH, count)


@triton.jit
def _beside(places, layer, count: tl.constexpr, kind: tl.constexpr, THERE: tl.constexpr, MOST: tl.constexpr):
    """Likewise a bias or a norm, for all programs."""
    if MOST > 0 and THERE:  # noqa: SIM102
        if tl.program_id(0) == 0:
            cache.piece(_at(places, layer, kind), count)


@triton.jit
def _at(places, layer, kind: tl.constexpr):
    return tl.multiple_of(tl.load(places + layer).to(tl.pointer_type(kind)), 16)


@triton.jit
def _product(
    x,  # [WIDTH]
    delta,  # likewise; ENTRY: what is added to it
    norms,  # ENTRY: of the norm that follows
    weights,
    biases,
    sums,  # ENTRY: x + delta
    out,  # [outputs]
    layer,
    outputs,
    eps,
    counters,
    passed,
    waiting,  # for what is multiplied
    kind: tl.constexpr,
    WAITING: tl.constexpr,  # if at all
    ENTRY: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINES: tl.constexpr,
):
    """A program's share of a layer's product; how often all have met by then."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    share = tl.cdiv(outputs, programs)
    first = program * share
    end = tl.minimum(first + share, outputs)
    # On its way while the others are waited for: a program that has them to wait for has arrived.
    weight, norm, bias = _at(weights, layer, kind), _at(norms, layer, kind), _at(biases, layer, kind)
    own, also = part(weight, first, end, 0, outputs, GATED, WIDTH, COLUMNS, LINES)
    own_norms = norm_part(norm, 0, ENTRY, WIDTH, COLUMNS)
    own_bias, also_bias = bias_part(bias, first, end, outputs, BIASED, GATED, LINES)
    if WAITING:  # noqa: SIM102
        if waiting:
            passed = _await(counters, passed)
    lines(
        x, delta, norm, weight, bias, sums, program == 0, out, first, end, own, also, own_norms, own_bias, also_bias, outputs, eps,
        ENTRY, ENTRY, BIASED, GATED, True, WIDTH, triton.next_power_of_2(WIDTH), COLUMNS, LINES,
    )  # fmt: skip
    return passed


@triton.jit
def _attend(
    qkv,
    cos,  # [DIM]
    sin,
    q_norm,
    k_norm,
    keys,  # of the layer
    values,
    head_stride,
    own_slots,  # of the row
    position,
    seen,
    slot,
    queries,  # [HEADS * DIM]
    parts,
    highs,
    masses,
    attended,
    head,  # that shares its keys
    stretch,
    stretches,
    begin,  # of the stretch
    end,
    window,
    eps,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORMED: tl.constexpr,
    WINDOWED: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PADDING: tl.constexpr,
    LARGEST: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One stretch for the heads that share a KV head. The last one puts the token's key and value to the others."""
    SHARING: tl.constexpr = HEADS // KV_HEADS
    tl.debug_barrier()  # the heads before have been read
    each = tl.arange(0, GROUP)
    newest = stretch == stretches - 1
    own_head = tl.where(each < SHARING, head * SHARING + each, HEADS + head)
    low_norms, high_norms = head_norms(q_norm, k_norm, own_head, NORMED, HEADS, DIM // 2, HALF)
    placed(
        qkv, cos, sin, low_norms, high_norms, tl.where(newest, slot, PADDING), queries, keys, values,
        own_head, each <= SHARING, head_stride, eps, NORMED, HEADS, KV_HEADS, DIM // 2, HALF, PADDING, LARGEST, NARROW,
    )  # fmt: skip
    tl.store(own_slots + position, slot.to(tl.int32), mask=newest & (seen > 0))
    tl.debug_barrier()
    row, dims = tl.arange(0, ROWS), tl.arange(0, 2 * HALF)
    own, inside = head * SHARING + row, dims < DIM
    writable = (row < SHARING)[:, None] & inside[None, :]
    asked = tl.load(queries + own[:, None] * DIM + dims[None, :], mask=writable, other=0.0)
    shift = tl.cast(head, tl.int64) * head_stride
    begin = seen_from(begin, position, window, KEYS, WINDOWED)
    none = none_of(keys, KEYS, 2 * HALF)
    high, mass, total = over(
        asked, position + 0 * row, keys + shift, values + shift, own_slots, none, none, begin, end, position, scale, window,
        False, DIM, 2 * HALF, ROWS, KEYS, WINDOWED, PRECISION,
    )  # fmt: skip
    if stretches > 1:
        piece = stretch * HEADS + own
        tl.store(parts + piece[:, None] * DIM + dims[None, :], total, mask=writable)
        tl.store(highs + piece, high, mask=row < SHARING)
        tl.store(masses + piece, mass, mask=row < SHARING)
    else:
        result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]  # of padding
        tl.store(attended + own[:, None] * DIM + dims[None, :], result.to(attended.dtype.element_ty), mask=writable)
