"""Files whose columns have names: which is which, and what a file says of its table beside them.

The names are those of docs/checkpoint_format.md: keys, values, stamps, scores, states.<i>.<name>.
What columns do not say is JSON that our own files have, as `about`:

  {"table", "var_type", "dtype", "num_lookups", "strategy", "epoch",
   "columns": [...], of "stamps" and "scores" what there is,
   "states": [{"name", "initial", "group"}, ...]}

Every field may be missing. Files of others have none.
"""

import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.file_source import NUMBERS, FileSource, Stored
from sok_lite.cli.options import initial_values
from sok_lite.cli.wrapped import plain_columns
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import Column, Source, TableInfo
from sok_lite.engine.json_text import parsed
from sok_lite.reports.text import listed

ABOUT = "about"
_MOST_SHOWN = 20  # columns in an error
_STATE = re.compile(r"states\.(\d{1,9})\.(.+)", re.DOTALL)
_LAST_NUMBER = 0xFFFFFFFF


def named_source(
    path: str,
    found: Mapping[str, Stored],
    about: Any,
    name: str | None = None,
    dtype: str | None = None,
    key_type: str | None = None,
    columns: str = "",
    initial: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
    rows_are: str = "an array of numbers of shape (n, dim)",
) -> FileSource:
    """Returns the table of a file.

    Args:
      about: the JSON text of our own files, or None.
      name: of the table; None: from `about`, or the file name without its ending.
      columns: columns with other names, such as "keys=id,values=row,m=adam_m": keys, values,
        stamps, scores or an optimizer's name of a state, and the name in the file.
      initial: initial values of states in new rows, such as "accumulator=0.1"; by default from
        `about`, else 0.
      names: the format's own names, such as {"keys": "key"}.
      rows_are: the format's form of rows, for errors.

    Raises:
      ValueError: columns are missing or do not match. WrongUse: an invalid option.
    """
    said = _parse_about(about, path)
    places = {name: name for name in ("keys", "values", *NUMBERS) if name in found}
    for ours, theirs in names.items():
        if theirs in found:
            places.setdefault(ours, theirs)
    stored = {ours: found[theirs] for ours, theirs in places.items()}
    named = sorted((int(m[1]), m[2], each) for each in found if (m := _STATE.fullmatch(each)))
    states = [(state, found[each]) for _, state, each in named]
    missing = [each for each in map(str, said.get("columns", [])) if each not in stored]
    if missing or len(said.get("states", [])) > len(states):
        raise _corrupt(path, f"it has no {missing[0]!r}" if missing else "a state is missing")
    for ours, theirs in _pairs(columns).items():
        if theirs not in found:
            raise WrongUse(f"{path} has no column {theirs!r}; it has: {_names_in(found)}")
        if ours in ("keys", "values", *NUMBERS):
            places[ours], stored[ours] = theirs, found[theirs]
        else:
            states.append((ours, found[theirs]))
    _check_has_rows(path, found, places, rows_are)
    facts = []
    for i, (state, column) in enumerate(states):
        stored[f"states.{i}.{state}"] = column
        facts.append(_state_facts(path, said, i, state, column))
    initial_by_state = initial_values(initial, [state.name for state in facts])
    facts = [each._replace(initial=initial_by_state.get(each.name, each.initial)) for each in facts]
    if dtype is None and said.get("dtype") == "bfloat16":
        dtype = "bfloat16"
    name = name or said.get("table") or os.path.splitext(os.path.basename(path))[0]
    known_of = _about_of(path, said, stored.get("stamps"))
    return FileSource(path, stored, name, dtype, key_type, tuple(facts), known_of)


def _check_has_rows(
    path: str, found: Mapping[str, Stored], places: Mapping[str, str], rows_are: str
) -> None:
    """Raises ValueError unless a file has values, and keys of a suitable type."""
    of_texts = "Of texts sok.hash_strings makes keys: write those into the file."
    for ours in ("keys", "values"):
        if ours in places:
            continue
        keys = places.get("keys") or next((n for n in found if _may_be(found[n], 1)), None)
        rows = places.get("values") or next((n for n in found if _may_be(found[n], 2)), None)
        pairs = f"columns=keys={keys or 'NAME'},values={rows or 'NAME'}"
        if keys is None:
            advice = f"Keys are a column of integers, and none is. {of_texts}"
        elif rows is None:
            advice = f"Rows are {rows_are}, and none is such."
        else:
            advice = "Say which columns are a table's:"
        advice += f" `--from-option {pairs}`" if keys and rows else ""
        raise ValueError(f"{path} has no column of {ours}. It has: {_names_in(found)}. {advice}")
    column = found[places["keys"]]
    if not column.is_of_integers:
        advice = "" if column.is_of_numbers else f" {of_texts}"
        raise ValueError(
            f"{path}: column {places['keys']!r} must be of integers. Received: {column.dtype}."
            f"{advice}"
        )


def _may_be(column: Stored, num_dims: int) -> bool:
    """Whether a column may have the keys (1) or the rows (2) of a table."""
    return len(column.shape) == num_dims and (
        column.is_of_integers if num_dims == 1 else column.is_of_numbers
    )


def _names_in(found: Mapping[str, Stored]) -> str:
    """Returns the column names of a file, with the columns of one row as one."""
    parts = {part for column in found.values() for part in column.parts}
    names = [
        f"{name!r} ({column.parts[0]} to {column.parts[-1]})" if column.parts else repr(name)
        for name, column in found.items()
        if name not in parts
    ]
    return listed(names[:_MOST_SHOWN], len(names)) or "none"


def reader(
    opened: Callable[[str], tuple[dict[str, Stored], Any]],
    *errors: type[Exception],
    check: Callable[[], object] | None = None,
) -> Callable[..., list[Source]]:
    """Returns `sources` of a format whose files have one table, with the options of `named_source`.

    Args:
      opened: returns the columns of a file by name, and the text about its table or None.
    """

    def sources(
        path: str,
        name: str | None = None,
        dtype: str | None = None,
        key_type: str | None = None,
        columns: str = "",
        initial: str = "",
    ) -> list[Source]:
        if check is not None:
            check()
        check_opens(path)
        with naming(path, *errors):
            found, about = opened(path)
        return [named_source(path, found, about, name, dtype, key_type, columns, initial)]

    return sources


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for part in filter(None, text.split(",")):
        ours, is_there, theirs = part.partition("=")
        if not is_there or not ours or not theirs:
            raise WrongUse(f"columns={text!r} must be names and names, such as keys=id,values=row")
        pairs[ours.strip()] = theirs.strip()
    return pairs


def _parse_about(text: Any, path: str) -> dict[str, Any]:
    """Parses the text about a table."""
    if text is None:
        return {}
    texts, numbers = ("table", "var_type", "dtype", "strategy"), ("num_lookups", "epoch")
    try:
        said = dict(parsed(text))
        wrong = [field for field in texts if type(said.get(field, "")) is not str]
        wrong += [field for field in numbers if not _is_number(said.get(field, 0))]
        wrong += [f for f in ("columns", "states") if type(said.get(f, [])) is not list]
    except (TypeError, ValueError) as error:
        raise _corrupt(path, f"what it says of its table is no JSON object ({error})") from error
    if wrong:
        raise _corrupt(path, f"what it says of its table has a {wrong[0]} that is none")
    return said


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LAST_NUMBER


def _state_facts(path: str, said: dict[str, Any], i: int, name: str, column: Stored) -> StateFacts:
    if len(column.shape) != 2:
        raise ValueError(
            f"{path}: state {name!r} must have shape (n, dim). Received: {column.shape}."
        )
    initial, group = 0.0, None
    if i < len(said.get("states", [])):
        each = said["states"][i]
        try:
            if each["name"] != name:
                raise ValueError(f"it names state {each['name']!r} where {name!r} is")
            initial, group = float(each["initial"]), each["group"]
            if group is not None and (type(group) is not int or not 1 <= group < 1 << 31):
                raise ValueError(f"group {group!r}")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise _corrupt(path, f"what it says of its states does not fit ({error})") from error
    return StateFacts(f"states.{i}.{name}", name, column.shape[1], initial, group)


def _about_of(path: str, said: dict[str, Any], last_seen: Stored | None) -> TableInfo:
    num_lookups = said.get("num_lookups", 0)
    if last_seen is not None and last_seen.is_of_integers:
        # No key was seen after the last lookup, whatever the file says.
        found = (int(piece.max()) for piece in last_seen.read(1 << 20) if piece.size)
        num_lookups = min(max(num_lookups, max(found, default=0)), _LAST_NUMBER)
    facts: dict[str, Any] = {"num_lookups": num_lookups}
    if "strategy" in said:
        facts |= {"strategy": said["strategy"], "epoch": said.get("epoch", 0)}
    return TableInfo(var_type=said.get("var_type", "hbm"), facts=facts)


def about_text(source: Source) -> str:
    """Returns the text about a table for a file."""
    facts = source.about.facts
    said: dict[str, Any] = {
        "table": source.name,
        "var_type": source.about.var_type,
        "dtype": source.dtype,
    }
    said |= {name: facts[name] for name in ("num_lookups", "strategy", "epoch") if name in facts}
    states = [
        {"name": state.name, "initial": state.initial, "group": state.group}
        for state in source.states
    ]
    said |= {"columns": list(source.columns), "states": states}
    return json.dumps(said, separators=(",", ":"))


def named_columns(source: Source) -> list[tuple[str, Column]]:
    """Returns the columns of a table as numbers, with their names in a file."""
    names = {state.tensor: f"states.{i}.{state.name}" for i, state in enumerate(source.states)}
    return [(names.get(column.name, column.name), column) for column in plain_columns(source)]


def shape_of(source: Source, column: Column) -> tuple[int, ...]:
    """Returns the shape of a whole column."""
    return (source.num_keys,) if column.dim is None else (source.num_keys, column.dim)


def regroup(pieces: Iterable[np.ndarray], num_rows: int) -> Iterator[np.ndarray]:
    """Yields rows in pieces of `num_rows`, the last of which may be shorter."""
    waiting: list[np.ndarray] = []
    count = 0
    for piece in pieces:
        while count + len(piece) >= num_rows:
            part, piece = piece[: num_rows - count], piece[num_rows - count :]
            yield np.concatenate([*waiting, part]) if waiting else part
            waiting, count = [], 0
        if len(piece):
            waiting.append(piece)
            count += len(piece)
    if waiting:
        yield np.concatenate(waiting)


def package(module: str, what: str, install: str) -> Any:
    """Imports a `module` that `what` needs and pip can `install`, or raises ImportError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(
            f"{what} need {name}, which cannot be imported ({error}). Install it with "
            f'`pip install "{install}"`.'
        ) from error


def check_opens(path: str) -> None:
    """Raises OSError if a path cannot be opened, or is a pipe or device, which may never end."""
    with open_file(path):
        pass


@contextmanager
def naming(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Converts errors of a library to a ValueError that names the file."""
    try:
        yield
    except errors as error:
        raise _corrupt(path, str(error) or type(error).__name__) from error


def _corrupt(path: str, reason: str) -> ValueError:
    return ValueError(f"{path} is corrupt, or another kind of file: {reason}.")
