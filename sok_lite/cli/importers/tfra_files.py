"""Files of keys and values: what TFRA's `FileSystemSaver` and `save_to_file_system` write.

They have no header. What they hold must be said; rows' length follows from their sizes. Files that
this package has written have a third one, `<base>-meta.json`, that says it all, and the optimizer
states in a file for each process, which engine/files/key_value_files.py describes.
"""

import os
import re
from collections.abc import Iterator, Sequence

import numpy as np

from sok_lite.cli.importers.tfra_tables import Keyed, StoredRows, with_slots
from sok_lite.cli.options import chosen, dim_of_table, of_table
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.key_value_files import (
    Layout,
    StoredShard,
    checksums,
    described,
    make_layout,
    open_shards,
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

# Tables of restrict policies, which have numbers of int32.
_POLICIES = ("timestamp", "frequency")
_STATES_FILE = re.compile(r".+_rank\d+_size\d+-states\.npz")


def detect(path: str | os.PathLike[str]) -> bool:
    """Whether a path looks like a folder of such files."""
    return os.path.isdir(path) and bool(bases_by_prefix(os.fspath(path)))


def others(path: str) -> list[str]:
    """Returns what else than such files is in a folder."""
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
    """Returns the tables of a folder of files of keys and values.

    A table is named as its files are, which have "_" for each "/" of the variable's name. Slots
    of optimizers become states of their table. The keys of a table are
    in memory while it is read.

    Args:
      path: of the folder, such as `TFRADynamicEmbedding-1000`.
      key_type: of the keys, "int64" or "int32"; else "int64". This and what follows may be one for
        each table, and for its slots then, such as "int64,items=int32".
      dtype: of the rows, such as "float16"; else "float32". Tables of restrict policies have int32.
      dim: elements of a row; else what the sizes of the files say. Empty files do not say it.
      size: of how many processes' files are meant, where there are those of several jobs.
      tables: names of files with commas between them; others are not looked at.
      names: other names for the tables, such as "old=new".
      initial: what new rows have in states, such as "accumulator=0.25"; else 0.1 in "accumulator"
        and 0 in all others.
      slots: "states", or "tables": no table is taken for a slot.

    Raises:
      FileNotFoundError: there are no such files, or not all of a save.
      ValueError: the files contradict each other or what was said, or it is not clear which are
        meant.
    """
    folder = os.fspath(path)
    found = bases_by_prefix(folder)
    if not found:
        raise FileNotFoundError(
            f"{folder!r} holds no files of keys and values. Expected some with names such as "
            f"{ShardPlace().base('table')}-keys."
        )
    keyed, known = {}, {}
    for name in chosen(found, tables, folder, (key_type, dtype, dim, names)):
        bases = _bases(folder, name, found[name], None if size is None else int(size))
        layout = described(folder, bases[0])
        if layout is None:
            # Slots and tables of policies are as the table that they are of.
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
        keyed[name] = Keyed(its_name, layout.key_dtype, layout.value_dtype, layout.dim, parts)
        if slots == "states" and found[name][0][1]:
            known[name] = _states_beside(folder, layout, bases, parts)
    return with_slots(keyed, "_", initial, slots, known)


def write(
    path: str | os.PathLike[str], sources: Sequence[Source], *, trainable: str | None = None
) -> None:
    """Writes tables as files of keys and values, which TFRA and this package load.

    Each table is one shard of one process: TFRA spreads that over those that there are then. The
    states become slots. Stamps, scores and keys without a row are left out.

    Args:
      path: of the folder; it is made if it is not there.
      sources: the tables.
      trainable: what TFRA's program calls the trainable of a table, or the optimizer in TF1: it is
        in the names of slots. One for all tables, in which "{name}" is the table's, or one for
        each; else "{name}-shadow".

    Raises:
      FileExistsError: there are files of a table.
      ValueError: TFRA has no such keys or rows, two tables have files of one name, or a source is
        corrupt.
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
    """Returns the bases of the files of a table.

    Args:
      found: every base, and whether it says of which process it is.
    """
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
    """Returns the length of rows that the files' sizes say."""
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
    return os.path.getsize(path) if os.path.exists(path) else 0  # open_shards names what is missing


def _map_files(shard: StoredShard) -> StoredRows:
    layout, count = shard.layout, shard.count
    if not count:  # nobody can map an empty file
        none = np.empty((0, layout.dim), layout.value_storage)
        return StoredRows(np.empty(0, layout.key_storage), none)
    keys = np.fromfile(f"{shard.base}-keys", layout.key_storage, count)
    shape = (count, layout.dim)
    return StoredRows(
        keys, np.memmap(f"{shard.base}-values", layout.value_storage, "r", shape=shape)
    )


def _states_beside(
    folder: str, layout: Layout, bases: Sequence[str], parts: Sequence[StoredRows]
) -> list[tuple[State, Keyed]]:
    """Returns the states in the files of this package that are beside those of a table, if any."""
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
        (state, Keyed(layout.name, layout.key_dtype, "float32", state.dim, rows[number]))
        for number, state in enumerate(kinds[0] or ())
    ]


def _tables(source: Source, layout: Layout, trainable: str) -> Iterator[tuple[str, Layout]]:
    """Yields the tables that a table becomes: each column of rows, and what its files hold."""
    yield "values", layout
    for state in source.states:
        name = f"{source.name}/{trainable}/{state.name}"
        yield state.tensor, make_layout(name, source.key_type, source.dtype, state.dim)
