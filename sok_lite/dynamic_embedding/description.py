"""What a checkpoint says of a table, so that no other one is restored from it."""

import json
from collections.abc import Sequence
from typing import Any

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
    """Returns the checksums that `described` was given."""
    checksums = json.loads(saved).get("files")
    return None if checksums is None else [tuple(pair) for pair in checksums]


def check_described(rows: Any, saved: str | bytes) -> None:
    """Raises ValueError if what was saved is of another table.

    Args:
      rows: a `HashTable`, which is to be restored.
      saved: what `described` gave of the table that was saved.
    """
    facts, expected = json.loads(saved), json.loads(described(rows))
    wrong = [field for field in _FIELDS if facts.get(field) != expected[field]]
    if wrong:
        raise ValueError(
            f"The checkpoint is of another variable than {rows.table.name!r}, or of one of another "
            f"form: its {', '.join(f'{field} is {facts.get(field)!r}' for field in wrong)}. "
            f"Expected {', '.join(f'{field}={expected[field]!r}' for field in wrong)}. Nothing "
            "was changed. Restore it into a variable of that form, and copy its export()."
        )
