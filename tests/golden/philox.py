"""Philox4x32-10 and the stream that stochastic rounding draws from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from exact import Bytes

Words = npt.NDArray[np.uint64]

PACK = 0
COLUMNWISE = 1
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """counter [..., 4], words in [0, 2^32); ten rounds."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def random_bytes(seed: int, offset: int, stream: int, block_id: Words) -> Bytes:
    """[..., 16]: byte i of the four words, little endian, belongs to element i of the block."""
    offset %= 2**63
    counter = np.zeros((*block_id.shape, 4), np.uint64)
    counter[..., 0] = offset & 0xFFFFFFFF
    counter[..., 1] = (offset >> 32) | (stream << 31)
    counter[..., 2] = block_id & _LOW
    counter[..., 3] = block_id >> np.uint64(32)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return words.astype("<u4").view(np.uint8).reshape((*block_id.shape, 16))


# Counter, key, result as published with the generator's first implementation.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def self_check() -> None:
    for counter, key, answer in KNOWN_ANSWERS:
        got = philox4x32(np.array(counter, np.uint64), key)
        if tuple(int(word) for word in got) != answer:
            raise AssertionError(f"Philox4x32-10 of {counter} with {key} gave {got}")
