"""TFRA's files of keys and values, of its `FileSystemSaver` and `save_to_file_system`.

They have no header: types are given by the user, the row length follows from file sizes. Files from
this package add `<base>-meta.json`, which has all of this, and a file of optimizer states per
process; see engine/files/key_value_files.py.
"""

import os
import re
from collections.abc import Iterator, Sequence

import numpy as np

from sok_lite.cli.importers.tfra_tables import KeyedRows, StoredRows, with_slots
from sok_lite.cli.options import choose_tables, dim_of_table, of_table
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.key_value_files import (
    Layout,
    StoredShard,
    checksums,
    make_layout,
    open_shards,
    read_layout,
    read_states,
    states_path,
    write_shard,
)
from sok_lite.engine.files.key_value_names import (
    ShardPlace,
    bases_by_prefix,
    file_prefix,
    find_shards,
)
from sok_lite.engine.files.source import Source
from sok_lite.engine.json_text import parsed
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.table.named_arrays import states_of

# Tables of restrict policies, with int32 rows.
_POLICIES = ("timestamp", "frequency")
_STATES_FILE = re.compile(r".+_rank\d+_size\d+-states\.npz")


def detect(path: str | os.PathLike[str]) -> bool:
    """Whether a path looks like a folder of such files."""
    return os.path.isdir(path) and bool(bases_by_prefix(os.fspath(path)))


def others(path: str) -> list[str]:
    """Returns the names in a folder that are not such files."""
    found = bases_by_prefix(path)
    ours = {
        f"{base}-{what}"
        for bases in found.values()
        for base, _ in bases
        for what in ("keys", "values", "meta.json")
    }
    return [
        name
        for name in sorted(os.listdir(path))
        if os.path.isdir(os.path.join(path, name))
        or not (name in ours or _STATES_FILE.fullmatch(name))
    ]


def sources(
    path: str | os.PathLike[str],
    *,
    key_type: str | None = None,
    dtype: str | None = None,
    dim: str | None = None,
    size: int | str | None = None,
    tables: str | None = None,
    names: str | None = None,
    initial: str = "",
    slots: str = "states",
) -> list[Source]:
    """Returns the tables of a folder of key and value files.

    A table is named like its files, with "_" for each "/" of the variable's name. Optimizer slots
    become states of their table. A table's keys are in memory while it is read.

    Args:
      key_type: "int64" (default) or "int32". This and the next two may differ per table, whose
        slots follow: "int64,items=int32".
      dtype: of the rows, such as "float16"; default "float32". Tables of restrict policies have
        int32.
      dim: elements of a row; by default from file sizes, which empty files do not give.
      size: number of saving processes, to choose among the files of several jobs.
      tables: names of files to read, separated by commas.
      names: new names of tables, such as "old=new".
      initial: initial values of states in new rows, such as "accumulator=0.25"; default 0.1 for
        "accumulator" and 0 for others.
      slots: "states", or "tables": treat slots as tables.

    Raises:
      FileNotFoundError: there are no such files, or some of a save are missing.
      ValueError: the files contradict each other or the options, or are ambiguous.
    """
    folder = os.fspath(path)
    found = bases_by_prefix(folder)
    if not found:
        raise FileNotFoundError(
            f"{folder!r} holds no files of keys and values. Expected some with names such as "
            f"{ShardPlace().base('table')}-keys."
        )
    keyed, known = {}, {}
    for name in choose_tables(found, tables, folder, (key_type, dtype, dim, names)):
        bases = _bases(folder, name, found[name], None if size is None else int(size))
        layout = read_layout(folder, bases[0])
        if layout is None:
            # Slots and policy tables take the options of their table.
            kin = sorted((n for n in found if name.startswith(f"{n}_")), key=len, reverse=True)
            is_of_policy = any(name == f"{other}_{each}" for other in kin for each in _POLICIES)
            its_dtype = "int32" if is_of_policy else of_table(dtype, name, "float32", kin)
            its_dim = 1 if is_of_policy else dim_of_table(dim, name, kin)
            types = of_table(key_type, name, "int64", kin), its_dtype
            layout = make_layout(name, *types, its_dim or 1)
            if its_dim is None:
                layout = layout._replace(dim=_dim_of(folder, bases, layout))
        shards = open_shards(folder, layout, file_name_list=bases)
        parts = [_map_files(shard) for shard in shards]
        its_name = of_table(names, name, layout.name)
        keyed[name] = KeyedRows(its_name, layout.key_dtype, layout.value_dtype, layout.dim, parts)
        if slots == "states" and found[name][0][1]:
            known[name] = _states_beside(folder, layout, bases, parts)
    return with_slots(keyed, "_", initial, slots, known)


def write(
    path: str | os.PathLike[str], sources: Sequence[Source], *, trainable: str | None = None
) -> None:
    """Writes tables as key and value files, for TFRA and this package.

    Each table is one shard of one process, which TFRA redistributes. States become slots. Stamps,
    scores and keys without a row are left out.

    Args:
      trainable: the TFRA program's name of a table's trainable, or of the optimizer in TF1, which
        is part of slot names. One for all tables, with "{name}" for the table's, or one for each;
        default "{name}-shadow".

    Raises:
      FileExistsError: files of a table exist. ValueError: TFRA has no such keys or rows, two tables
        have the same file names, or a source is corrupt.
    """
    folder = os.fspath(path)
    layouts: dict[str, tuple[Source, Layout, str]] = {}
    for source in sources:
        layout = make_layout(source.name, source.key_type, source.dtype, source.dim)
        middle = str(of_table(trainable, source.name, "{name}-shadow")).format(name=source.name)
        for column, its in _tables(source, layout, middle):
            prefix = file_prefix(its.name)
            if prefix in layouts:
                other = layouts[prefix][1].name
                raise ValueError(
                    f"The files of {its.name!r} and {other!r} have one name, {prefix!r}. Rename "
                    "one, or write them into two folders."
                )
            layouts[prefix] = source, its, column
    there = sorted(layouts.keys() & bases_by_prefix(folder).keys())
    if there:
        raise FileExistsError(
            f"{folder!r} has files of {', '.join(map(repr, there))}. Take a new folder: TFRA reads "
            "all that it finds of a table."
        )
    for source, layout, column in layouts.values():
        rows = (row_dtype(source.dtype).to_storage(np, each) for each in source.read(column))
        pieces = zip(source.read("keys"), rows, strict=True)
        write_shard(folder, layout, ShardPlace(), pieces)


def _bases(
    folder: str, name: str, found: Sequence[tuple[str, bool]], size: int | None
) -> list[str]:
    """Chooses a table's files among base names, each with whether it names its process."""
    if all(is_of_process for _, is_of_process in found):
        return find_shards(folder, name, size)
    if any(is_of_process for _, is_of_process in found):
        raise ValueError(
            f"{folder!r} holds files of table {name!r} that name a process and files that do not, "
            "from two saves. Move those of one of them away."
        )
    count = max(int(base.rpartition("of")[2]) for base, _ in found)
    bases = [f"{name}_mht_{i + 1}of{count}" for i in range(count)]
    if set(bases) != {base for base, _ in found}:
        raise FileNotFoundError(
            f"{folder!r} has not one file of each shard of table {name!r}. Expected those of "
            f"{count}. Received: {', '.join(sorted(base for base, _ in found))}."
        )
    return bases


def _dim_of(folder: str, bases: Sequence[str], layout: Layout) -> int:
    """Returns the row length from the file sizes."""
    keys, values = (
        sum(_size(os.path.join(folder, f"{base}-{what}")) for base in bases)
        for what in ("keys", "values")
    )
    count, elements = keys // layout.key_storage.itemsize, values // layout.value_storage.itemsize
    if not count:
        raise ValueError(
            f"The files of table {layout.name!r} in {folder!r} hold no key, so nobody knows how "
            f"long its rows are. Give `dim`, such as dim={layout.name}=8."
        )
    if elements % count or not elements:
        raise ValueError(
            f"The files of table {layout.name!r} in {folder!r} do not hold {count:,} keys of "
            f"{layout.key_dtype} and as many rows of {layout.value_dtype}: they have {keys:,} and "
            f"{values:,} bytes. Give the types that they have; if these are right the files are "
            "cut or from two saves."
        )
    return elements // count


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0  # open_shards names missing ones


def _map_files(shard: StoredShard) -> StoredRows:
    layout, count = shard.layout, shard.count
    if not count:  # an empty file cannot be mapped
        none = np.empty((0, layout.dim), layout.value_storage)
        return StoredRows(np.empty(0, layout.key_storage), none)
    keys = np.fromfile(f"{shard.base}-keys", layout.key_storage, count)
    shape = (count, layout.dim)
    return StoredRows(
        keys, np.memmap(f"{shard.base}-values", layout.value_storage, "r", shape=shape)
    )


def _states_beside(
    folder: str, layout: Layout, bases: Sequence[str], parts: Sequence[StoredRows]
) -> list[tuple[State, KeyedRows]]:
    """Returns the states in this package's files beside those of a table."""
    by_process: dict[tuple[int, int], list[int]] = {}
    for i, base in enumerate(bases):
        rank, size = map(int, base.rpartition("_rank")[2].split("_size"))
        by_process.setdefault((rank, size), []).append(i)
    rows: dict[int, list[StoredRows]] = {}
    kinds: list[list[State] | None] = []
    for process, places in by_process.items():
        sums = [checksums(folder, bases[i]) for i in places]
        arrays = read_states(states_path(folder, layout.name, *process), sums)
        if arrays is None:
            kinds.append(None)
            continue
        keys = np.sort(np.concatenate([parts[i].keys for i in places]))
        text = arrays["state_columns"].tobytes()
        states = states_of(arrays["states"], parsed(text), f"{layout.name!r} in {folder!r}")
        for number, state in enumerate(states):
            if state.rows.shape != (keys.size, state.dim):
                raise ValueError(
                    f"The states of {layout.name!r} in {folder!r} are corrupt: they are of "
                    f"{len(state.rows):,} keys, and there are {keys.size:,}."
                )
            rows.setdefault(number, []).append(StoredRows(keys, state.rows))
        kinds.append([state._replace(rows=None) for state in states])
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            f"The processes that wrote {layout.name!r} in {folder!r} have states of several kinds. "
            "Give slots=tables to leave them out."
        )
    return [
        (state, KeyedRows(layout.name, layout.key_dtype, "float32", state.dim, rows[number]))
        for number, state in enumerate(kinds[0] or ())
    ]


def _tables(source: Source, layout: Layout, trainable: str) -> Iterator[tuple[str, Layout]]:
    """Yields the TFRA tables of a table, one per column of rows, with their file layout."""
    yield "values", layout
    for state in source.states:
        name = f"{source.name}/{trainable}/{state.name}"
        yield state.tensor, make_layout(name, source.key_type, source.dtype, state.dim)
