"""A table in a checkpoint, beside it a description, so that no other one is restored from it."""

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.tf_private import SaveSpec
from sok_lite.dynamic_embedding.file_system import file_call
from sok_lite.engine.json_text import parsed

_FIELDS = ("name", "key_dtype", "value_dtype", "dim")


def described(rows: Any, checksums: Sequence[Sequence[int]] | None = None) -> str:
    """Returns the JSON of a `HashTable`'s name, dtypes and dim.

    Args:
      checksums: of the files that this process has written of it; None: it has no files.
    """
    facts = (rows.table.name, rows.key_dtype.name, rows.value_dtype.name, rows.dimension)
    description = dict(zip(_FIELDS, facts, strict=True))
    return json.dumps(description if checksums is None else description | {"files": checksums})


def described_checksums(saved: str | bytes) -> list[tuple[int, int]] | None:
    """Returns the checksums that were passed to `described`."""
    checksums = parsed(saved, "a table").get("files")
    return None if checksums is None else [tuple(pair) for pair in checksums]


def check_described(rows: Any, saved: str | bytes) -> None:
    """Raises ValueError if what was saved is of another table.

    Args:
      rows: a `HashTable`, which is to be restored.
      saved: what `described` gave of the table that was saved.
    """
    facts, expected = parsed(saved, "a table"), json.loads(described(rows))
    wrong = [field for field in _FIELDS if facts.get(field) != expected[field]]
    if wrong:
        raise ValueError(
            f"The checkpoint is of another variable than {rows.table.name!r}, or of one of another "
            f"form: its {', '.join(f'{field} is {facts.get(field)!r}' for field in wrong)}. "
            f"Expected {', '.join(f'{field}={expected[field]!r}' for field in wrong)}. Nothing "
            "was changed. Restore it into a variable of that form, and copy its export()."
        )


def serialize_to_tensors(table: Any) -> dict[str, Any]:
    """Returns what a checkpoint has of a table: tensors, or a SaveSpec where rows are in files."""
    if table.files is not None:
        return {"files": _write(table)}
    tensors = table.saved_tensors()
    tensors["description"] = tf.constant(described(table))
    if tf.executing_eagerly():
        return tensors
    with tf.device("CPU:0"):  # where files are written; a saver of TF1 wants all in one place
        return {name: tf.identity(tensor) for name, tensor in tensors.items()}


def restore_from_tensors(table: Any, restored_tensors: dict[str, tf.Tensor]) -> Any:
    """Makes a table what `serialize_to_tensors` gave of one like it; returns the operation."""
    tensors = dict(restored_tensors)
    if table.files is not None:
        return _read(table, tensors["files"])
    description = tensors.pop("description")
    checked = file_call(table, f"The restore of {table.name!r}", check_described, [description])
    with tf.control_dependencies([] if checked is None else [checked]):
        tensors = {name: tf.identity(tensor) for name, tensor in tensors.items()}
    return table.restore_tensors(tensors)


def _write(table: Any) -> Any:
    """Writes the files of the rows, and returns the description that a checkpoint has instead."""

    def write(rows: Any) -> str:
        return described(rows, rows.files.write())

    def written() -> tf.Tensor:
        return file_call(table, f"Saving {table.name!r}", write, [], [tf.string])[0]

    if not tf.executing_eagerly():
        return written()
    # TensorFlow asks before it restores as well; it calls this only where it saves.
    with tf.device("CPU:0"):
        device = tf.constant("").device
    return SaveSpec(written, "", "files", tf.string, device)


def _read(table: Any, description: tf.Tensor) -> Any:
    def read(rows: Any, saved: bytes) -> None:
        check_described(rows, saved)
        rows.files.read(described_checksums(saved))

    done = file_call(table, f"The restore of {table.name!r}", read, [description])
    return tf.no_op() if done is None else done
