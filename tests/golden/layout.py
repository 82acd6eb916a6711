"""Where bytes lie: packed rows, scale tiles, operand parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from exact import Bytes, Ints

UNTOUCHED = 0xA5  # what a test fills its buffers with; a byte that must not be written is stored as this


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def nvfp4_row_bytes(hidden: int) -> int:
    return round_up(nvfp4_token_scale_at(hidden) + 4, 16)


def nvfp4_token_scale_at(hidden: int) -> int:
    return round_up(hidden // 2 + hidden // 16, 4)


def mxfp8_row_bytes(hidden: int) -> int:
    return round_up(hidden + hidden // 32, 16)


def offsets(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


def scale_row_offsets(rows_per_expert: Sequence[int]) -> list[int]:
    return offsets([round_up(rows, 128) for rows in rows_per_expert])


def tile_bytes(rows: int, columns: int) -> int:
    return round_up(rows, 128) * round_up(columns, 4)


def swizzle_index(rows: int, columns: int) -> Ints:
    """[rows, columns]: the byte at which scale (i, j) lies. Tiles of 128 x 4, tile after tile along a band of
    128 rows; in a tile, line i % 32 is 16 bytes wide and holds the groups (i % 128) / 32 of four columns."""
    tiles_per_band = round_up(columns, 4) // 4
    index = np.zeros((rows, columns), np.int64)
    for i in range(rows):
        for j in range(columns):
            band, row = divmod(i, 128)
            group, line = divmod(row, 32)
            tile, column = divmod(j, 4)
            index[i, j] = (band * tiles_per_band + tile) * 512 + line * 16 + group * 4 + column
    return index


def swizzle(scales: Bytes) -> Bytes:
    tiles = np.zeros(tile_bytes(*scales.shape), np.uint8)
    tiles[swizzle_index(*scales.shape)] = scales
    return tiles


def swizzle_per_expert(scales: Bytes, rows_per_expert: Sequence[int]) -> Bytes:
    """[slots, columns]: each expert's rows on their own, one after the other."""
    bounds = offsets(rows_per_expert)
    return np.concatenate([swizzle(scales[low:high]) for low, high in pairwise(bounds)])
