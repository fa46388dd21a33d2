"""Tunable constants of the kernels, set by SOK_LITE_KERNEL_DEFINES.

They are compiled in. Unsupported values are rejected: kernels would miss keys, or overwrite rows.
"""

import os
import re
from typing import NamedTuple

_VARIABLE = "SOK_LITE_KERNEL_DEFINES"
_DEFINE = re.compile(r"([A-Za-z_]\w*)=(\d{1,9})")
_POWERS_TO_32 = frozenset({1, 2, 4, 8, 16, 32})


class Tunable(NamedTuple):
    """A macro of the kernels."""

    values: frozenset[int]  # permitted ones
    rule: str  # the same in words


THREADS_PER_BLOCK = 256  # the default of SOK_THREADS_PER_BLOCK

# The other defaults are in the sources, listed in kernels/README.md; a warp has 32 lanes.
TUNABLES = {
    "SOK_LINE": Tunable(_POWERS_TO_32, "a power of two from 1 to 32"),
    "SOK_TILE": Tunable(_POWERS_TO_32, "a power of two from 1 to 32"),
    "SOK_ROW_LANES": Tunable(_POWERS_TO_32, "a power of two from 1 to 32"),
    "SOK_THREADS_PER_BLOCK": Tunable(
        frozenset(range(32, 1025, 32)), "a multiple of 32 from 32 to 1024"
    ),
    "HKV_CROWDED_QUARTERS": Tunable(frozenset(range(5)), "from 0 to 4"),
    "SOK_BLOCK": Tunable(frozenset(range(1, 1025)), "from 1 to 1024"),
    "SOK_AHEAD": Tunable(frozenset(range(1025)), "from 0 to 1024"),
}


def kernel_defines() -> dict[str, int]:
    """Returns the macros in SOK_LITE_KERNEL_DEFINES, such as "SOK_LINE=8 SOK_TILE=8".

    ValueError: not a list of NAME=NUMBER, or a value that a tunable does not permit.
    """
    defines: dict[str, int] = {}
    for text in os.environ.get(_VARIABLE, "").split():
        match = _DEFINE.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{_VARIABLE} must be a list of NAME=NUMBER, such as 'SOK_LINE=8 SOK_TILE=8'. "
                f"Received: {text!r}."
            )
        name, value = match.group(1), int(match.group(2))
        tunable = TUNABLES.get(name)
        if tunable is None:
            raise ValueError(
                f"{_VARIABLE} sets a tunable that no kernel has. Received: {name!r}. There are "
                f"{', '.join(TUNABLES)}."
            )
        if value not in tunable.values:
            raise ValueError(
                f"{name} in {_VARIABLE} must be {tunable.rule}. Received: {value}. Leave it out "
                "for its default."
            )
        if defines.setdefault(name, value) != value:
            raise ValueError(
                f"{_VARIABLE} sets {name} twice. Received: {defines[name]} and {value}. Leave one "
                "of them out."
            )
    return defines
