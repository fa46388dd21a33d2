"""TFRA's tables in TensorFlow's checkpoints: of `tf.train.Checkpoint`, SavedModels and TF1's Saver.

Tensors of a shard are, by who wrote them,

    <path>/tables_of_<name>/<i>/.ATTRIBUTES/table-keys   and -values, i from 0; ".S" stands for "/"
    <op>/<name>_mht_<i>of<n>-keys                        and -values, i from 1; "_" stands for "/"
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_lite.cli.importers.tensorflow_reader import looks_like_one, open_checkpoint, tensor
from sok_lite.cli.importers.tfra_tables import KeyedRows, StoredRows, with_slots
from sok_lite.cli.options import choose_tables, of_table
from sok_lite.engine.files.key_value_files import make_layout
from sok_lite.engine.files.source import Source

_OF_OBJECTS = re.compile(r"(.+/)?tables_of_([^/]+)/(\d+)/\.ATTRIBUTES/table-keys")
_OF_SAVER = re.compile(r"(?:.+/)?([^/]+)_mht_(\d+)of(\d+)-keys")
# How `tf.train.Checkpoint` escapes names.
_ESCAPED = {".S": "/", "..": "."}


def detect(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a TensorFlow checkpoint with such tensors. Needs TensorFlow."""
    if not looks_like_one(path):
        return False
    names = open_checkpoint(path).get_variable_to_shape_map()
    return any(_OF_OBJECTS.fullmatch(name) or _OF_SAVER.fullmatch(name) for name in names)


def sources(
    path: str | os.PathLike[str],
    *,
    tables: str | None = None,
    names: str | None = None,
    initial: str = "",
    slots: str = "states",
) -> list[Source]:
    """Returns the tables of a TensorFlow checkpoint of TFRA, in memory.

    Tables of `tf.train.Checkpoint` have the names of their variables; a Saver replaces each "/" by
    "_". Optimizer slots become states of their table. Dense variables, such as step counts, are
    left out.

    Args:
      path: of the checkpoint's .index file, or the prefix of its files; in a SavedModel
        `variables/variables.index`.
      tables: names to read, separated by commas.
      names: new names of tables, such as "old=new".
      initial: initial values of states in new rows, such as "accumulator=0.25"; default 0.1 for
        "accumulator" and 0 for others.
      slots: "states", or "tables": treat slots as tables.

    Raises:
      ImportError: no TensorFlow. OSError: the checkpoint cannot be read.
      ValueError: it has no such tables, or shards are missing, or it is corrupt.
    """
    reader = open_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    is_of_saver = False
    for name in sorted(shapes):
        if match := _OF_OBJECTS.fullmatch(name):
            table, index = _unescape(match[2]), int(match[3])
        elif match := _OF_SAVER.fullmatch(name):
            table, index, is_of_saver = match[1], int(match[2]) - 1, True
            counts[table] = max(counts.get(table, 0), int(match[3]))
        else:
            continue
        shards = found.setdefault(table, {})
        if index in shards:
            raise ValueError(
                f"{os.fspath(path)} has several tables {table!r}: {shards[index]!r} and {name!r}. "
                "Save them under different names."
            )
        shards[index] = name.removesuffix("-keys")
    if not found:
        raise ValueError(
            f"{os.fspath(path)} has no tables of TFRA: no tensor is named as theirs, such as "
            "'.../tables_of_NAME/0/.ATTRIBUTES/table-keys'. Where a FileSystemSaver has written "
            "the rows, give the folder TFRADynamicEmbedding beside it."
        )
    keyed = {}
    for name in choose_tables(found, tables, os.fspath(path), (names,)):
        shards, count = found[name], counts.get(name, max(found[name]) + 1)
        if sorted(shards) != list(range(count)):
            raise ValueError(
                f"{os.fspath(path)} has not all shards of table {name!r}. Expected {count}. "
                f"Received: {', '.join(map(repr, shards.values()))}."
            )
        its_name = of_table(names, name, name)
        keyed[name] = _keyed_rows(
            reader, os.fspath(path), its_name, [shards[i] for i in range(count)]
        )
    return with_slots(keyed, "_" if is_of_saver else "/", initial, slots)


def _keyed_rows(reader: Any, path: str, name: str, prefixes: Sequence[str]) -> KeyedRows:
    dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    forms = set()
    for prefix in prefixes:
        keys, values = f"{prefix}-keys", f"{prefix}-values"
        shape = shapes.get(values, [])
        if len(shape) != 2 or shapes[keys] != shape[:1]:
            raise ValueError(
                f"{path} is corrupt: {keys!r} has shape {shapes[keys]} and {values!r} "
                f"{shape or 'is missing'}. Take another checkpoint."
            )
        forms.add((dtypes[keys].name, dtypes[values].name, shape[1]))
    if len(forms) > 1:
        raise ValueError(f"{path} is corrupt: the shards of table {name!r} differ: {forms}.")
    layout = make_layout(name, *forms.pop())
    parts = [
        StoredRows(
            tensor(reader, f"{prefix}-keys"),
            np.ascontiguousarray(tensor(reader, f"{prefix}-values")).view(layout.value_storage),
        )
        for prefix in prefixes
    ]
    return KeyedRows(name, layout.key_dtype, layout.value_dtype, layout.dim, parts)


def _unescape(name: str) -> str:
    return re.sub(r"\.[S.]", lambda match: _ESCAPED[match[0]], name)
