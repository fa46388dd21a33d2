"""Contents of tables as one message between ranks.

It is the length of a JSON text, the text, which describes the arrays, and then the arrays, each
from a multiple of 8 bytes on.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from sok_lite.engine.table.content import Content
from sok_lite.engine.table.state_columns import State

# Rows of a message have as many bytes, so that their number fits into 31 bits.
WORD = np.dtype((np.int64, (8,)))
_ALIGNED = 8


def as_message(contents: Mapping[int, Content]) -> np.ndarray:
    """Returns contents by number as (n,) of `WORD`."""
    about, arrays = [], []
    for number, content in contents.items():
        columns, pending = dict(content.columns), dict(content.pending)
        its = [content.keys, content.values, *(state.rows for state in content.states)]
        its += [*columns.values(), content.pending_keys, *pending.values()]
        arrays += its
        about.append(
            {
                "number": number,
                "arrays": [(array.dtype.str, array.shape) for array in its],
                "states": [(s.name, s.dim, s.initial, s.group) for s in content.states],
                "columns": list(columns),
                "sighted": list(pending),
                "facts": dict(content.facts),
            }
        )
    text = json.dumps(about).encode()
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    begins = [0, *itertools.accumulate(_pad(each.nbytes) for each in [head, *arrays])]
    message = np.zeros(-(-begins[-1] // WORD.itemsize), WORD)
    flat = message.reshape(-1).view(np.uint8)
    for begin, array in zip(begins, [head, *arrays], strict=False):
        flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return message


def from_message(message: np.ndarray) -> dict[int, Content]:
    """Returns the contents of a message, whose memory they use."""
    flat = message.reshape(-1).view(np.uint8)
    end = 8 + int(flat[:8].view("<i8")[0])
    contents = {}
    begin = _pad(end)
    for about in json.loads(flat[8:end].tobytes()):
        arrays = []
        for dtype, shape in about["arrays"]:
            whole = np.ndarray(shape, dtype, flat, begin)
            arrays.append(whole)
            begin += _pad(whole.nbytes)
        contents[about["number"]] = _content(about, iter(arrays))
    return contents


def _content(about: Mapping[str, Any], arrays: Any) -> Content:
    # In the order in which `as_message` lists them.
    keys, values = next(arrays), next(arrays)
    states = [
        State(name, dim, initial, next(arrays), group)
        for name, dim, initial, group in about["states"]
    ]
    columns = {name: next(arrays) for name in about["columns"]}
    pending_keys = next(arrays)
    pending = {name: next(arrays) for name in about["sighted"]}
    return Content(keys, values, states, columns, pending_keys, pending, about["facts"])


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
