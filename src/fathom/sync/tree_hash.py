"""BLAKE3 where the tensors lie, so that the bytes of a model on a device need not cross to the host to be digested.

BLAKE3 is a tree: chunks of 1024 bytes are hashed on their own, each in 16 steps of 64 bytes, and their values are
joined in pairs, level by level. Here all chunks of many tensors take each step at once, in 32-bit integer operations of
torch. It is the plain form: on CPUs the `blake3` package is far faster (`sync/digest.py` chooses).

C: chunks in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_BYTES, _BLOCK_BYTES, _CHUNK_WORDS = 1024, 64, 256
_START, _END, _PARENT, _ROOT = 1, 2, 4, 8
_INITIAL = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_ROUNDS = 7

BATCH_CHUNKS = 1 << 18
"""Chunks hashed at once: enough work for each of the many small operations. It takes 0.6 GB of memory meanwhile."""


def tree_hashes(tensors: Sequence[Tensor], *, batch_chunks: int = BATCH_CHUNKS) -> list[str]:
    """BLAKE3 (hex) of each tensor's contiguous bytes. All tensors lie on one device; only the hashes leave it."""
    found: list[str] = []
    for group in _groups([tensor.detach().contiguous() for tensor in tensors], batch_chunks):
        found += _hash_group(group, batch_chunks)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive chunks of one tensor."""

    content: Tensor
    """uint8: at most `chunks` times 1024 bytes."""
    first: int
    """Number of the first of them in the tensor."""
    chunks: int
    """How many; 1 where the tensor is empty."""
    whole: bool
    """Nothing else belongs to the tensor."""


def _groups(tensors: Sequence[Tensor], batch_chunks: int) -> Iterator[list[Tensor]]:
    """Neighbours that fill a batch together; one that fills more is on its own."""
    group: list[Tensor] = []
    room = batch_chunks
    for tensor in tensors:
        chunks = _chunks(tensor)
        if group and chunks > room:
            yield group
            group, room = [], batch_chunks
        group.append(tensor)
        room -= chunks
    if group:
        yield group


def _hash_group(tensors: Sequence[Tensor], batch_chunks: int) -> list[str]:
    counts = [_chunks(tensor) for tensor in tensors]
    values = [_chunk_values(batch) for batch in _batches(tensors, batch_chunks)]
    roots = _join(torch.cat(values, 1), counts)
    return [bytes(row).hex() for row in roots.t().contiguous().view(torch.uint8).cpu().numpy()]


def _batches(tensors: Sequence[Tensor], batch_chunks: int) -> Iterator[list[_Piece]]:
    if len(tensors) > 1:  # a group of several is one batch
        yield [_piece(tensor, 0, _chunks(tensor)) for tensor in tensors]
        return
    chunks = _chunks(tensors[0])
    for first in range(0, chunks, batch_chunks):
        yield [_piece(tensors[0], first, min(batch_chunks, chunks - first))]


def _piece(tensor: Tensor, first: int, chunks: int) -> _Piece:
    content = tensor.view(-1).view(torch.uint8)[first * _CHUNK_BYTES : (first + chunks) * _CHUNK_BYTES]
    return _Piece(content=content, first=first, chunks=chunks, whole=chunks == _chunks(tensor))


def _chunks(tensor: Tensor) -> int:
    return max(1, -(-tensor.numel() * tensor.element_size() // _CHUNK_BYTES))


def _chunk_values(pieces: Sequence[_Piece]) -> Tensor:
    """int32 [8, C]: the chaining value of every chunk; of a chunk that is a whole tensor, its hash."""
    words = torch.cat([_words(piece) for piece in pieces], 1) if len(pieces) > 1 else _words(pieces[0])
    device = words.device
    numbers = torch.cat([torch.arange(each.first, each.first + each.chunks, device=device) for each in pieces])
    sizes = torch.full_like(numbers, _CHUNK_BYTES)
    ends = torch.tensor([piece.chunks for piece in pieces], device=device).cumsum(0) - 1
    sizes[ends] = torch.tensor(
        [piece.content.numel() - (piece.chunks - 1) * _CHUNK_BYTES for piece in pieces], device=device
    )
    root = torch.zeros_like(numbers)
    root[ends] = torch.tensor([_ROOT if piece.whole and piece.chunks == 1 else 0 for piece in pieces], device=device)
    blocks = ((sizes + _BLOCK_BYTES - 1) // _BLOCK_BYTES).clamp_(min=1)
    schedule = _schedule(device)
    values = _initial(device).expand(8, numbers.numel())
    for block in range(int(blocks.max())):
        last = blocks == block + 1
        flags = (_START if block == 0 else 0) + last * (root + _END)
        lengths = (sizes - block * _BLOCK_BYTES).clamp_(0, _BLOCK_BYTES)
        step = _compress(values, words[16 * block : 16 * block + 16], numbers, lengths, flags, schedule)
        values = torch.where(blocks > block, step, values)
    return values


def _words(piece: _Piece) -> Tensor:
    """int32 [256, C]: the little-endian words of the chunks, zeros after the end."""
    content = piece.content
    missing = piece.chunks * _CHUNK_BYTES - content.numel()
    if missing or content.storage_offset() % 4 or content.data_ptr() % 4:
        content = torch.cat([content, content.new_zeros(missing)])
    return content.view(torch.int32).view(piece.chunks, _CHUNK_WORDS).t().contiguous()


def _join(values: Tensor, counts: Sequence[int]) -> Tensor:
    """int32 [8, tensors]: neighbours joined in pairs within each tensor until one is left; an odd last one waits."""
    device, schedule = values.device, _schedule(values.device)
    remaining = torch.tensor(counts)
    while int(remaining.max()) > 1:
        starts, pairs = remaining.cumsum(0) - remaining, remaining // 2
        pair_ends = pairs.cumsum(0)
        left = 2 * torch.arange(int(pairs.sum())) + (starts - 2 * (pair_ends - pairs)).repeat_interleave(pairs)
        flags = torch.full_like(left, _PARENT)
        flags[(pair_ends - 1)[remaining == 2]] += _ROOT
        left, flags = left.to(device), flags.to(device)
        words = torch.cat([values[:, left], values[:, left + 1]])
        zeros, lengths = torch.zeros_like(left), torch.full_like(left, _BLOCK_BYTES)
        joined = _compress(_initial(device).expand(8, left.numel()), words, zeros, lengths, flags, schedule)
        values, remaining = _with_odd(values, joined, remaining), (remaining + 1) // 2
    return values


def _with_odd(values: Tensor, joined: Tensor, counts: Tensor) -> Tensor:
    """The next level: each tensor's joined values, and after them its last one where that had no partner."""
    device, odd, after = values.device, counts % 2 == 1, (counts + 1) // 2
    ends = after.cumsum(0) - 1
    is_joined = torch.ones(int(after.sum()), dtype=torch.bool)
    is_joined[ends[odd]] = False
    level = values.new_empty((8, len(is_joined)))
    level[:, is_joined.to(device)] = joined
    level[:, ends[odd].to(device)] = values[:, (counts.cumsum(0) - 1)[odd].to(device)]
    return level


def _compress(cv: Tensor, words: Tensor, counter: Tensor, length: Tensor, flags: Tensor, schedule: Tensor) -> Tensor:
    """One step: int32 [8, C] from chaining values [8, C], words [16, C], and int64 [C] each of the rest."""
    state = torch.cat(
        [cv, _initial(cv.device)[:4].expand(4, cv.shape[1]), torch.stack([counter, counter >> 32, length, flags]).int()]
    )
    a, b, c, d = state[0:4], state[4:8], state[8:12], state[12:16]
    for columns_x, columns_y, diagonals_x, diagonals_y in schedule:
        _mix(a, b, c, d, words[columns_x], words[columns_y])
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _mix(a, b, c, d, words[diagonals_x], words[diagonals_y])
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a ^ c, b ^ d])


def _mix(a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor, y: Tensor) -> None:
    """Four mixing functions at once, in place. All are int32 [4, C], and wrap around."""
    for words, right_d, right_b in ((x, 16, 12), (y, 8, 7)):
        a.add_(b).add_(words)
        _rotate(d.bitwise_xor_(a), right_d)
        c.add_(d)
        _rotate(b.bitwise_xor_(c), right_b)


def _rotate(words: Tensor, right: int) -> None:
    low = (words >> right).bitwise_and_((1 << (32 - right)) - 1)  # torch shifts the sign in
    words.bitwise_left_shift_(32 - right).bitwise_or_(low)


def _initial(device: torch.device) -> Tensor:
    """int32 [8, 1]."""
    return torch.tensor(_INITIAL, device=device).int().unsqueeze(1)


def _schedule(device: torch.device) -> Tensor:
    """int64 [rounds, 4, 4]: which words each round mixes in: x and y of the columns, x and y of the diagonals."""
    order, rounds = list(range(16)), list[list[list[int]]]()
    for _ in range(_ROUNDS):
        rounds.append([order[0:8:2], order[1:8:2], order[8:16:2], order[9:16:2]])
        order = [order[index] for index in _PERMUTATION]
    return torch.tensor(rounds, device=device)
