"""Reads and writes the rows of a variable, or of a table, as files of keys and values.

One pass per shard writes the table in chunks; the table is locked, so all shards are from one
moment. A table in Redis is exported once for all shards, and writes by other programs may or may
not be included. See `key_value_files` for the format, `key_value_names` for the names.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge import table_exports, writes
from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.type_spec import alive
from sok_lite.dynamic_embedding.checkpoint_folder import directory
from sok_lite.dynamic_embedding.partition import Partitioner, default_partition_fn, partition_keys
from sok_lite.engine.files.key_value_files import (
    BUFFER_SIZE,
    Layout,
    StoredShard,
    make_layout,
    open_shards,
    write_shard,
)
from sok_lite.engine.files.key_value_names import ShardPlace, bases_of_save, find_shards
from sok_lite.engine.table.locking import with_lock

_SLOTS = 1 << 16  # index slots per read


class Source(NamedTuple):
    """A table and the layout of its files."""

    rows: Any  # the `HashTable`
    layout: Layout
    num_shards: int = 1  # in this process
    partitioner: Partitioner = default_partition_fn  # maps keys to shards, and to processes

    def owners(self, keys: Any, number: int) -> np.ndarray:
        """Returns the shard or process of each key (n,), out of `number`."""
        keys = tf.convert_to_tensor(keys, self.rows.key_dtype)
        return np.asarray(partition_keys(self.partitioner, keys, number))

    def tensor(self, rows: np.ndarray) -> tf.Tensor:
        """Converts rows from a file to a tensor."""
        if self.layout.value_dtype == "bfloat16":
            rows = rows.view(tf.bfloat16.as_numpy_dtype)
        return tf.constant(rows)


def rows_of(holder: Any) -> Any:
    """Returns the `HashTable` of a `Variable`, or the table itself."""
    return holder.rows if getattr(holder, "is_dynamic_embedding", False) else holder


def source_of(holder: Any) -> Source:
    """Returns the `Source` of a holder. ValueError: files cannot hold such keys or rows."""
    rows = rows_of(holder)
    layout = make_layout(
        rows.table.name, rows.key_dtype.name, rows.value_dtype.name, rows.dimension
    )
    shards = () if rows is holder else (holder.shard_num, holder.partition_fn)
    return Source(rows, layout, *shards)


def save(
    holder: Any,
    dirpath: Any,
    size: int,
    rank: int,
    file_name_list: Sequence[str] | None,
    dirpath_env: str | None,
    append_to_file: bool,
    buffer_size: int,
    only: int | None = None,
) -> Any:
    """Writes this process's shards, or only one, to files of keys and rows."""
    source = source_of(holder)
    _check_ranks(source, size)
    numbers = range(source.num_shards) if only is None else [only]
    places = [ShardPlace(i + 1, source.num_shards, rank, size) for i in numbers]
    bases = [place.base(source.layout.name) for place in places]  # checks the rank
    if file_name_list is not None:
        if len(file_name_list) != len(bases):
            raise ValueError(
                f"`file_name_list` must have one name for each of the {len(bases)} shards of "
                f"{source.layout.name!r}. Received: {list(file_name_list)}."
            )
        bases = list(file_name_list)

    def run(source: Source, folder: str) -> None:
        def write_all() -> None:
            pieces = _chunks_of(source)
            for place, base in zip(places, bases, strict=True):
                write_shard(
                    folder,
                    source.layout,
                    place,
                    _pieces_of(source, place.index - 1, pieces),
                    file_name=base,
                    append_to_file=append_to_file,
                    buffer_size=buffer_size,
                )

        with_lock(source.rows.table, write_all)

    return _call(holder, "save_to_file_system", dirpath, dirpath_env, run)


def load(
    holder: Any,
    dirpath: Any,
    size: int,
    rank: int,
    file_name_list: Sequence[str] | None,
    dirpath_env: str | None,
    load_entire_dir: bool,
    buffer_size: int,
    only: int | None = None,
) -> Any:
    """Loads this process's files, all or only a shard; optimizer states start fresh."""
    ShardPlace(rank=rank, size=size).base("")  # checks the rank
    _check_ranks(source_of(holder), size)

    def run(source: Source, folder: str) -> None:
        name, bases = source.layout.name, file_name_list
        if load_entire_dir:
            bases = bases_of_save(folder, [name] if bases is None else bases)
        if bases is None and only is not None:
            bases = [ShardPlace(only + 1, source.num_shards, rank, size).base(name)]
        if bases is None:
            try:
                bases = find_shards(folder, name, size, rank)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{error} Where another number of processes has written them, call "
                    "load_from_file_system_with_restore_function()."
                ) from error
        # Named files may belong to another variable.
        is_own = file_name_list is None
        shards = open_shards(folder, source.layout, file_name_list=bases, is_own=is_own)
        part = None if only is None else (source.num_shards, only)
        _replace(source, shards, buffer_size, part, only)

    return _call(holder, "load_from_file_system", dirpath, dirpath_env, run)


def load_spread(holder: Any, dirpath: Any, size: int, rank: int, buffer_size: int) -> Any:
    """Reads the keys of this process from the files of any number of processes."""
    ShardPlace(rank=rank, size=size).base("")  # checks the rank
    _check_ranks(source_of(holder), size)

    def run(source: Source, folder: str) -> None:
        name = source.layout.name
        try:
            bases, is_spread = find_shards(folder, name, size, rank), False
        except FileNotFoundError:
            bases, is_spread = find_shards(folder, name), True
        shards = open_shards(folder, source.layout, file_name_list=bases)
        _replace(source, shards, buffer_size, (size, rank) if is_spread else None)

    what = "load_from_file_system_with_restore_function"
    return _call(holder, what, dirpath, "TFRA_SAVED_KV", run)


def _check_ranks(source: Source, size: int) -> None:
    """Raises ValueError if several processes would save or load a table that they share."""
    if source.rows.is_shared and size > 1:
        raise ValueError(
            f"{source.layout.name!r} is one table of all processes: one of them saves and loads "
            f"it. Received: proc_size={size}. Leave it out, and call it in one process."
        )


def _chunks_of(source: Source) -> Callable[[], Iterable[Any]]:
    """Returns a function that yields all keys and rows as tensors, in chunks."""
    if source.rows.is_shared:  # rows in a server have no index slots
        whole = source.rows.export()
        return lambda: [whole]
    return lambda: table_exports.export_chunks(source.rows, _SLOTS)


def _pieces_of(
    source: Source, shard: int, chunks: Callable[[], Iterable[Any]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the keys and rows of a shard, in no order."""
    for keys, values, *_ in chunks():
        piece = keys.numpy(), values.numpy()
        if source.num_shards > 1:
            is_here = source.owners(keys, source.num_shards) == shard
            piece = piece[0][is_here], piece[1][is_here]
        yield piece


def _replace(
    source: Source,
    shards: Iterable[StoredShard],
    buffer_size: int,
    part: tuple[int, int] | None = None,
    only: int | None = None,
) -> None:
    """Replaces the content of a table by checked files.

    Args:
      part: (number of processes or shards, this one): only its keys; None: all.
      only: number of a single shard to replace; None: all.
    """
    rows = source.rows

    def replace() -> None:
        if only is None:
            rows.clear()
        else:
            for keys in [keys for keys, _ in _pieces_of(source, only, _chunks_of(source))]:
                rows.remove(keys)
        for shard in shards:
            for keys, values in shard.pieces(buffer_size):
                if part is not None:
                    is_here = source.owners(keys, part[0]) == part[1]
                    keys, values = keys[is_here], values[is_here]
                insert(source, keys, values)

    with_lock(rows.table, replace)


def insert(source: Source, keys: np.ndarray, values: np.ndarray) -> None:
    """Inserts keys and rows from a file, without a step of the table's epoch."""
    rows, key_tensor = source.rows, tf.constant(keys)
    writes.insert_or_assign(
        rows, "insert", key_tensor, source.tensor(values), rows.scores_of(key_tensor)
    )


def _call(
    holder: Any,
    method: str,
    dirpath: Any,
    dirpath_env: str | None,
    function: Callable[[Source, str], None],
) -> Any:
    """Calls a function with the source of a holder and a folder (string, path or string tensor).

    Returns None in eager mode, the operation in a graph.
    """
    folder = dirpath if tf.is_tensor(dirpath) else os.fspath(dirpath)

    def run(holder: Any, path: bytes) -> None:
        function(source_of(holder), directory(os.fsdecode(path), dirpath_env))

    what = f"{method} of {holder.name!r}"
    return file_call(holder, what, run, [tf.convert_to_tensor(folder, tf.string)])


def file_call(
    holder: Any,
    what: str,
    function: Callable[..., str | None],
    texts: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType] = (),
) -> Any:
    """Calls a function with a holder and scalar string tensors, at once or from a graph.

    In a graph, file errors become TensorFlow's InvalidArgumentError with the same text.

    Args:
      holder: a graph keeps only a weak reference.
      what: names the operation in errors.
      function: takes the holder and bytes.
      dtypes: [tf.string] if the function returns a string.

    Returns:
      A list with the string; otherwise None in eager mode, the operation in a graph.
    """
    reference, is_eager = weakref.ref(holder), tf.executing_eagerly()

    def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        try:
            result = function(alive(reference), *(tensor.numpy() for tensor in tensors))
        except (OSError, RuntimeError) as error:
            if is_eager:
                raise
            raise ValueError(str(error)) from error  # TensorFlow keeps this type and text
        return () if result is None else (tf.constant(result),)

    handles = rows_of(holder).handles
    done = host_call(run, texts, dtypes, get_backend("cpu"), what, handles=handles)
    return done if dtypes or not is_eager else None


# ---- methods of tables, and of the shards of a variable ------------------------------------------


def save_table(
    table: Any,
    dirpath: Any,
    file_name: str | None = None,
    dirpath_env: str | None = "TFRA_SAVED_KV",
    append_to_file: bool = False,
    buffer_size: int = BUFFER_SIZE,
    name: str | None = None,
) -> Any:
    """Writes all keys and rows of a table, or of one shard of a variable.

    Arguments as for `Variable.save_to_file_system`; `file_name` has no ending, None: as a variable.
    """
    names = None if file_name is None else [file_name]
    holder, only = table.saved_as
    return save(holder, dirpath, 1, 0, names, dirpath_env, append_to_file, buffer_size, only)


def load_table(
    table: Any,
    dirpath: Any,
    file_name: str | None = None,
    dirpath_env: str | None = "TFRA_SAVED_KV",
    load_entire_dir: bool = False,
    buffer_size: int = BUFFER_SIZE,
    name: str | None = None,
) -> Any:
    """Loads files into a table, or into a shard its keys in them, replacing the content.

    Arguments as for `Variable.load_from_file_system`. Other shards stay as they are.

    Args:
      file_name: of the files, without endings, which another table may have written; None: the name
        that a variable uses.
      load_entire_dir: load all files of one save, of any shards and processes, of the table or the
        table whose shard `file_name` names.
    """
    names = None if file_name is None else [file_name]
    holder, only = table.saved_as
    return load(holder, dirpath, 1, 0, names, dirpath_env, load_entire_dir, buffer_size, only)
