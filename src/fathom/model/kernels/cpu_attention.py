"""Attention on CPUs, with one order of arithmetic per row: a row's bits depend on nothing but its own context.

Batch, chunking, the place of a page and the other rows of a tile change nothing: every score is one chain of fused
multiply-adds over the head's dimensions, every sum runs over fixed lanes, every output is one chain over the tokens,
and what is masked is added as exact zero (as long as all is finite: zero times a NaN is a NaN). The trainer and the
engine run this same code.

Compiled by numba, the vectors written in LLVM's own terms: no C compiler is needed, and where a machine has shorter
vectors LLVM splits them without a change of result.

Letters: T tokens of a forward, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D size of a query or key head, E size
of a value head, R rows of a tile (tokens times G) that share their keys and values, W lanes.
"""
# numba's compiler and llvmlite's builder have no types that pyright could check.
# pyright: basic, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

PAGE_TOKENS = 32
"""Tokens whose keys, and whose values, lie together: keys as [D, PAGE_TOKENS], values as [PAGE_TOKENS, E]."""
LANES = 16
"""Elements of a vector; PAGE_TOKENS and E are multiples of it."""
TILE_ROWS = 8
"""Rows of a tile at most."""

_PARTS = PAGE_TOKENS // LANES

# LLVM in short --------------------------------------------------------------------------------------------------------

_FLOAT, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _I16S, _I32S = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _I16, _I32))


def _is_half(kind: Any) -> bool:
    return kind.dtype == types.uint16


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(value))] * LANES)


def _at(builder, address, offset, kind):
    """Pointer to element `offset` of an array of `kind` that begins at `address`."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [offset])


def _splat(builder, value, kind):
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(_I32S, [0] * LANES))


def _load(builder, address, offset, half):
    """LANES floats; `half`: stored as bfloat16."""
    if not half:
        pointer = builder.bitcast(_at(builder, address, offset, _FLOAT), _FLOATS.as_pointer())
        return builder.load(pointer, align=4)
    pointer = builder.bitcast(_at(builder, address, offset, _I16), _I16S.as_pointer())
    wide = builder.zext(builder.load(pointer, align=2), _I32S)
    return builder.bitcast(builder.shl(wide, ir.Constant(_I32S, [16] * LANES)), _FLOATS)


def _store(builder, address, offset, value):
    builder.store(value, builder.bitcast(_at(builder, address, offset, _FLOAT), _FLOATS.as_pointer()), align=4)


def _call(builder, name, arguments):
    """One of LLVM's own functions over vectors of floats."""
    full = f"llvm.{name}.v{LANES}f32"
    function = builder.module.globals.get(full)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments)), full)
    return builder.call(function, arguments)


def _fused(builder, left, right, plus):
    return _call(builder, "fma", [left, right, plus])


def _larger(builder, left, right):
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _loop(builder, count, carried, body):
    """for i in range(count): carried = body(i, carried)"""
    before, head = builder.block, builder.append_basic_block("head")
    inside, after = builder.append_basic_block("body"), builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(_int(0), before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    for phi, value in zip(values, body(index, values), strict=True):
        phi.add_incoming(value, builder.block)
    index.add_incoming(builder.add(index, _int(1)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _fold_lanes(builder, vector, combine):
    """All lanes combined, from the first to the last."""
    lanes = [builder.extract_element(vector, ir.Constant(_I32, lane)) for lane in range(LANES)]
    result = lanes[0]
    for lane in lanes[1:]:
        result = combine(result, lane)
    return result


# The three steps of a tile --------------------------------------------------------------------------------------------


@intrinsic
def _scores(_, rows, kind, queries, keys, out, out_stride, dims):
    """Scores of queries with the keys of one page.

    float32 queries [R, dims]; keys [dims, PAGE_TOKENS] of `kind`; float32 out, `out_stride` from row to row.
    """
    count, half = rows.count, _is_half(kind)

    def generate(context, builder, _signature, arguments):
        queries, keys, out, out_stride, dims = arguments[2:]
        starts = [builder.mul(dims, _int(row)) for row in range(count)]

        def body(dim, sums):
            at = builder.mul(dim, _int(PAGE_TOKENS))
            parts = [_load(builder, keys, builder.add(at, _int(p * LANES)), half) for p in range(_PARTS)]
            result = []
            for row in range(count):
                pointer = _at(builder, queries, builder.add(starts[row], dim), _FLOAT)
                query = _splat(builder, builder.load(pointer), _FLOATS)
                result += [_fused(builder, query, parts[p], sums[row * _PARTS + p]) for p in range(_PARTS)]
            return result

        sums = _loop(builder, dims, [_floats(0.0)] * (count * _PARTS), body)
        for row in range(count):
            for part in range(_PARTS):
                at = builder.add(builder.mul(out_stride, _int(row)), _int(part * LANES))
                _store(builder, out, at, sums[row * _PARTS + part])
        return context.get_dummy_value()

    return types.void(rows, kind, *[types.intp] * 5), generate


@intrinsic
def _mix(_, rows, vectors, kind, weights, weight_stride, values, value_stride, out, tokens):
    """Add to outputs, as wide as `vectors`, the weighted values of one page.

    float32 weights [R, tokens], `weight_stride` from row to row; values [tokens, .] of `kind` and float32 out [R, .],
    both `value_stride` from row to row.
    """
    count, wide, half = rows.count, vectors.count, _is_half(kind)

    def generate(context, builder, _signature, arguments):
        weights, weight_stride, values, value_stride, out, tokens = arguments[3:]
        starts = [builder.mul(weight_stride, _int(row)) for row in range(count)]
        places = [
            builder.add(builder.mul(value_stride, _int(row)), _int(v * LANES))
            for row in range(count)
            for v in range(wide)
        ]

        def body(token, sums):
            at = builder.mul(token, value_stride)
            parts = [_load(builder, values, builder.add(at, _int(v * LANES)), half) for v in range(wide)]
            result = []
            for row in range(count):
                pointer = _at(builder, weights, builder.add(starts[row], token), _FLOAT)
                weight = _splat(builder, builder.load(pointer), _FLOATS)
                result += [_fused(builder, weight, parts[v], sums[row * wide + v]) for v in range(wide)]
            return result

        begun = [_load(builder, out, place, False) for place in places]
        for place, value in zip(places, _loop(builder, tokens, begun, body), strict=True):
            _store(builder, out, place, value)
        return context.get_dummy_value()

    return types.void(rows, vectors, kind, *[types.intp] * 6), generate


_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Cephes' minimax polynomial for exp on [-ln 2 / 2, ln 2 / 2]; below 2 ulp in float32."""
_EXP_LOWEST = -87.0
"""exp of anything lower counts as exp of this, 1.6e-38: the smallest normal float32 is near."""


def _exp(builder, x):
    """exp of floats that are not above 0."""
    x = _larger(builder, x, _floats(_EXP_LOWEST))
    power = _call(builder, "floor", [_fused(builder, x, _floats(_LOG2_E), _floats(0.5))])
    rest = _fused(builder, power, _floats(-_LN2_HIGH), x)
    rest = _fused(builder, power, _floats(-_LN2_LOW), rest)
    series = _floats(_EXP[0])
    for coefficient in _EXP[1:]:
        series = _fused(builder, series, rest, _floats(coefficient))
    series = builder.fadd(_fused(builder, series, builder.fmul(rest, rest), rest), _floats(1.0))
    biased = builder.add(builder.fptosi(power, _I32S), ir.Constant(_I32S, [127] * LANES))
    return builder.fmul(series, builder.bitcast(builder.shl(biased, ir.Constant(_I32S, [23] * LANES)), _FLOATS))


@intrinsic
def _softmax(_, scores, seen, vectors):
    """In place, exp(score - largest) of the first `seen` of float32 scores [vectors * LANES], and 0 after them.

    Returns the sum of what it left.
    """

    def generate(_context, builder, _signature, arguments):
        scores, seen, vectors = arguments
        limit = _splat(builder, builder.trunc(seen, _I32), _I32S)
        lanes = ir.Constant(_I32S, list(range(LANES)))

        def visible(index):
            first = builder.trunc(builder.mul(index, _int(LANES)), _I32)
            return builder.icmp_signed("<", builder.add(_splat(builder, first, _I32S), lanes), limit)

        def largest(index, carried):
            score = _load(builder, scores, builder.mul(index, _int(LANES)), False)
            return [_larger(builder, builder.select(visible(index), score, _floats(-np.inf)), carried[0])]

        top = _loop(builder, vectors, [_floats(-np.inf)], largest)[0]
        top = _splat(builder, _fold_lanes(builder, top, lambda x, y: _larger(builder, x, y)), _FLOATS)

        def exponentials(index, carried):
            at = builder.mul(index, _int(LANES))
            value = _exp(builder, builder.fsub(_load(builder, scores, at, False), top))
            value = builder.select(visible(index), value, _floats(0.0))
            _store(builder, scores, at, value)
            return [builder.fadd(carried[0], value)]

        total = _loop(builder, vectors, [_floats(0.0)], exponentials)[0]
        return _fold_lanes(builder, total, builder.fadd)

    return types.float32(*[types.intp] * 3), generate


@intrinsic
def _number_at(_, address, offset):
    """int64 element."""

    def generate(_context, builder, _signature, arguments):
        return builder.load(_at(builder, *arguments, _I64))

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _get(_, kind, address, offset):
    """An element of `kind`, as float32."""

    def generate(_context, builder, _signature, arguments):
        address, offset = arguments[1:]
        if not _is_half(kind):
            return builder.load(_at(builder, address, offset, _FLOAT))
        wide = builder.zext(builder.load(_at(builder, address, offset, _I16)), _I32)
        return builder.bitcast(builder.shl(wide, ir.Constant(_I32, 16)), _FLOAT)

    return types.float32(kind, types.intp, types.intp), generate


@intrinsic
def _put(_, kind, address, offset, value):
    """Write float32 as `kind`; bfloat16 rounds to nearest even and keeps a NaN one."""

    def generate(context, builder, _signature, arguments):
        address, offset, value = arguments[1:]
        if not _is_half(kind):
            builder.store(value, _at(builder, address, offset, _FLOAT))
            return context.get_dummy_value()
        bits = builder.bitcast(value, _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        kept = builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(_I32, 0x7FC00000), rounded)
        short = builder.trunc(builder.lshr(kept, ir.Constant(_I32, 16)), _I16)
        builder.store(short, _at(builder, address, offset, _I16))
        return context.get_dummy_value()

    return types.void(kind, types.intp, types.intp, types.float32), generate


# One tile, and all of them --------------------------------------------------------------------------------------------

_COMPILE: dict[str, Any] = {"boundscheck": False, "error_model": "numpy", "nogil": True, "cache": True}

FLOAT32, BFLOAT16 = np.empty(0, np.float32), np.empty(0, np.uint16)
"""The kinds: an array of the kind tells the compiler how elements lie in memory."""


@njit(**_COMPILE)
def _tile(rows, vectors, kind, queries, keys, values, table, head, heads, dims, value_dims, seen, weights, stride, out):
    """Leave in float32 `out` [R, value_dims] what `queries` [R, dims] see: row r its first `seen[r]` tokens.

    `rows` is a tuple of R anything; `vectors` one of as many as an inner step is wide; `weights` float32 scratch
    [R, stride]; `table` the address of the sequence's page numbers.
    """
    size, width = kind.itemsize, len(vectors) * LANES
    most = seen[0]
    for row in range(1, len(rows)):
        most = max(most, seen[row])
    pages = (most + PAGE_TOKENS - 1) // PAGE_TOKENS
    for page in range(pages):
        at = (_number_at(table, page) * heads + head) * dims * PAGE_TOKENS
        _scores(rows, kind, queries, keys + at * size, weights + page * PAGE_TOKENS * 4, stride, dims)
    for row in range(len(rows)):
        first = weights + row * stride * 4
        scale = np.float32(1) / _softmax(first, seen[row], pages * _PARTS)
        for token in range(pages * PAGE_TOKENS):
            _put(FLOAT32, first, token, _get(FLOAT32, first, token) * scale)
        for dim in range(value_dims):
            _put(FLOAT32, out, row * value_dims + dim, np.float32(0))
    for page in range(pages):
        tokens = min(PAGE_TOKENS, most - page * PAGE_TOKENS)
        at = (_number_at(table, page) * heads + head) * PAGE_TOKENS * value_dims
        these = weights + page * PAGE_TOKENS * 4
        dim = 0
        while dim + width <= value_dims:
            _mix(rows, vectors, kind, these, stride, values + (at + dim) * size, value_dims, out + dim * 4, tokens)
            dim += width
        while dim < value_dims:
            _mix(rows, (0,), kind, these, stride, values + (at + dim) * size, value_dims, out + dim * 4, tokens)
            dim += LANES


@njit(**_COMPILE)
def store(kind, source, head_stride, token_stride, pages, page_of, offset_of, heads, dims, across):
    """Write the new keys (`across`: [dims, PAGE_TOKENS]) or values ([PAGE_TOKENS, dims]) of tokens into their pages.

    `source` is the address of [heads, T, dims] with two strides, `pages` that of the pages of one layer; int64 [T]
    `page_of` and `offset_of` say where each token goes.
    """
    for token in range(len(page_of)):
        for head in range(heads):
            begin = (page_of[token] * heads + head) * dims * PAGE_TOKENS
            first, step = (offset_of[token], PAGE_TOKENS) if across else (offset_of[token] * dims, 1)
            for dim in range(dims):
                value = _get(kind, source, head * head_stride + token * token_stride + dim)
                _put(kind, pages, begin + first + dim * step, value)


@njit(**_COMPILE)
def attend(
    kind, query, head_stride, token_stride, keys, values, tables, tiles, heads, group, dims, value_dims, scale, out
):
    """Attention of `tiles`, int64 [N, 4]: first token of the forward, number of tokens, sequence, tokens before.

    `query` is the address of [Hq, T, dims] with two strides, `keys` and `values` those of the pages of one layer;
    `tables` int64 [B, P] page numbers; `out` the address of [T, Hq, value_dims]. All but `tables` is of `kind`.
    """
    longest = 0
    for index in range(len(tiles)):
        longest = max(longest, tiles[index, 3] + tiles[index, 1])
    stride = (longest + PAGE_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    queries = np.empty(TILE_ROWS * dims, np.float32)
    weights = np.empty(TILE_ROWS * stride, np.float32)
    mixed = np.empty(TILE_ROWS * value_dims, np.float32)
    seen = np.empty(TILE_ROWS, np.int64)
    for index in range(len(tiles)):
        begin, tokens, sequence, before = tiles[index]
        table = tables[sequence].ctypes.data
        for head in range(heads):
            done = 0
            while done < tokens * group:
                left = tokens * group - done
                rows = 8 if left >= 8 else 6 if left >= 6 else min(left, 4)
                for row in range(rows):
                    token, member = divmod(done + row, group)
                    seen[row] = before + token + 1
                    at = (head * group + member) * head_stride + (begin + token) * token_stride
                    for dim in range(dims):
                        queries[row * dims + dim] = _get(kind, query, at + dim) * scale
                place = (queries.ctypes.data, keys, values, table, head, heads, dims, value_dims)
                scratch = (seen, weights.ctypes.data, stride, mixed.ctypes.data)
                if rows == 8:
                    _tile((0,) * 8, (0,) * 2, kind, *place, *scratch)
                elif rows == 6:
                    _tile((0,) * 6, (0,) * 4, kind, *place, *scratch)
                elif rows == 4:
                    _tile((0,) * 4, (0,) * 4, kind, *place, *scratch)
                elif rows == 3:
                    _tile((0,) * 3, (0,) * 4, kind, *place, *scratch)
                elif rows == 2:
                    _tile((0,) * 2, (0,) * 4, kind, *place, *scratch)
                else:
                    _tile((0,), (0,) * 4, kind, *place, *scratch)
                for row in range(rows):
                    token, member = divmod(done + row, group)
                    at = ((begin + token) * heads * group + head * group + member) * value_dims
                    for dim in range(value_dims):
                        _put(kind, out, at + dim, mixed[row * value_dims + dim])
                done += rows
