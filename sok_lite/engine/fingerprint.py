"""Fingerprint64 of FarmHash 1.1, by Geoff Pike: equal bytes have equal numbers everywhere.

`tf.fingerprint`, BigQuery's FARM_FINGERPRINT and Redshift's farmFingerprint64 compute the same.
Each step is vectorized over all strings of similar length.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_K0, _K1, _K2 = (np.uint64(k) for k in (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F))
_SEED = np.uint64(81)
_BLOCK = 64


def fingerprints(strings: Sequence[bytes]) -> np.ndarray:
    """Returns the fingerprint of each string, (n,) int64."""
    sizes = np.fromiter(map(len, strings), np.int64, len(strings))
    starts = np.cumsum(sizes) - sizes
    data = np.frombuffer(b"".join([*strings, bytes(_BLOCK)]), np.uint8)
    # The word that begins at each byte; no string uses the bytes after the last one.
    words = np.ndarray((data.size - 7,), "<u8", data, 0, (1,))
    result = np.full(len(strings), _K2)
    for least, most, function in _BY_SIZE:
        chosen = np.flatnonzero((sizes >= least) & (sizes <= most))
        if chosen.size:
            result[chosen] = function(_Strings(words, starts[chosen], sizes[chosen]))
    return result.view(np.int64)


class _Strings(NamedTuple):
    """Strings of similar length.

    Attributes:
      words: the little-endian uint64 that begins at each byte of all strings.
      starts, sizes: (m,) int64, of each string, in bytes.
    """

    words: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    def word(self, offset: int) -> np.ndarray:
        """Returns the word at an offset, from the end if it is negative, of each string."""
        return self.words[self.starts + (self.sizes + offset if offset < 0 else offset)]

    def byte(self, offsets: np.ndarray) -> np.ndarray:
        return self.words[self.starts + offsets] & np.uint64(0xFF)

    @property
    def mul(self) -> np.ndarray:
        return _K2 + self.sizes.view(np.uint64) * np.uint64(2)


def _rotate(x: np.ndarray, bits: int) -> np.ndarray:
    return (x >> np.uint64(bits)) | (x << np.uint64(64 - bits))


def _mix(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint64(47))


def _of_two(u: np.ndarray, v: np.ndarray, mul: np.ndarray) -> np.ndarray:
    return _mix((v ^ _mix((u ^ v) * mul)) * mul) * mul


def _of_1_to_3(strings: _Strings) -> np.ndarray:
    sizes = strings.sizes
    first, middle, last = (strings.byte(at) for at in (0 * sizes, sizes >> 1, sizes - 1))
    y = first + (middle << np.uint64(8))
    z = sizes.view(np.uint64) + (last << np.uint64(2))
    return _mix(y * _K2 ^ z * _K0) * _K2


def _of_4_to_7(strings: _Strings) -> np.ndarray:
    low = np.uint64(0xFFFFFFFF)
    first, last = strings.word(0) & low, strings.word(-4) & low
    return _of_two(strings.sizes.view(np.uint64) + (first << np.uint64(3)), last, strings.mul)


def _of_8_to_16(strings: _Strings) -> np.ndarray:
    mul = strings.mul
    a, b = strings.word(0) + _K2, strings.word(-8)
    return _of_two(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)


def _outer(strings: _Strings, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mixes the first and last 16 bytes to two words; `a` is made from the first 8."""
    b, c = strings.word(8), strings.word(-8) * strings.mul
    y = _rotate(a + b, 43) + _rotate(c, 30) + strings.word(-16) * _K2
    return y, a + _rotate(b + _K2, 18) + c


def _of_17_to_32(strings: _Strings) -> np.ndarray:
    return _of_two(*_outer(strings, strings.word(0) * _K1), strings.mul)


def _of_33_to_64(strings: _Strings) -> np.ndarray:
    mul, a = strings.mul, strings.word(0) * _K2
    y, rest = _outer(strings, a)
    z = _of_two(y, rest, mul)
    e, f = strings.word(16) * mul, strings.word(24)
    g, h = (y + strings.word(-32)) * mul, (z + strings.word(-24)) * mul
    return _of_two(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)


# The running state of strings of more than 64 bytes: x, y, z and the pairs v and w.
_State = list[np.ndarray]


def _weak(
    words: Sequence[np.ndarray], a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    a = a + words[0]
    b = _rotate(b + a + words[3], 21)
    c = a + words[1] + words[2]
    return c + words[3], b + _rotate(c, 44) + a


def _step(state: _State, words: Sequence[np.ndarray], mul: Any, nine: int) -> _State:
    """Returns the state after 8 more words. Before the last step, `mul` is K1 and `nine` is 1."""
    (x, y, z, v0, v1, w0, w1), times = state, np.uint64(nine)
    x = _rotate(x + y + v0 + words[1], 37) * mul
    y = _rotate(y + v1 + words[6], 42) * mul
    x = x ^ (w1 * times)
    y = y + v0 * times + words[5]
    z = _rotate(z + w0, 33) * mul
    v = _weak(words[:4], v1 * mul, x + w0)
    w = _weak(words[4:], z + w1, y + words[2])
    return [z, y, x, *v, *w]


def _of_more(strings: _Strings) -> np.ndarray:
    # In falling order of blocks: the strings that have another block are always the first ones.
    order = np.argsort(-strings.sizes, kind="stable")
    words, starts, sizes = strings.words, strings.starts[order], strings.sizes[order]
    num_blocks = (sizes - 1) // _BLOCK
    none = np.zeros(sizes.size, np.uint64)
    # Arrays throughout: NumPy warns of scalars that wrap.
    x, y = none + _SEED, (none + _SEED) * _K1 + np.uint64(113)
    z = _mix(y * _K2 + np.uint64(113)) * _K2
    state = [x * _K2 + words[starts], y, z, none, none, none, none]
    ended = []
    for block in range(int(num_blocks[0])):
        going = int(np.count_nonzero(num_blocks > block))
        ended.append([part[going:] for part in state])
        state = [part[:going] for part in state]
        state = _step(state, _block(words, starts[:going] + block * _BLOCK), _K1, 1)
    state = [np.concatenate(parts) for parts in zip(state, *reversed(ended), strict=True)]
    result = np.empty_like(x)
    result[order] = _last(state, _block(words, starts + sizes - _BLOCK), sizes)
    return result


def _block(words: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
    return [words[at + 8 * i] for i in range(8)]


def _last(state: _State, words: Sequence[np.ndarray], sizes: np.ndarray) -> np.ndarray:
    x, y, z, v0, v1, w0, w1 = state
    mul = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w0 = w0 + ((sizes - 1) & (_BLOCK - 1)).view(np.uint64)
    v0 = v0 + w0
    x, y, z, v0, v1, w0, w1 = _step([x, y, z, v0, v1, w0 + v0, w1], words, mul, 9)
    return _of_two(_of_two(v0, w0, mul) + _mix(y) * _K0 + z, _of_two(v1, w1, mul) + x, mul)


_BY_SIZE = (
    (1, 3, _of_1_to_3),
    (4, 7, _of_4_to_7),
    (8, 16, _of_8_to_16),
    (17, 32, _of_17_to_32),
    (33, 64, _of_33_to_64),
    (65, np.iinfo(np.int64).max, _of_more),
)
