"""Rows of a variable, or of a table by itself, to files of keys and values and back.

A pass over the table for each shard writes it piece by piece; the table is held meanwhile, so that
all shards are of one moment. Of a table in a Redis one export gives the pieces of all, and what
other programs write meanwhile may be in it or not. `key_value_files` has the format,
`key_value_names` the names.
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
from sok_lite.dynamic_embedding.partition import Partitioner, default_partition_fn, partitioned
from sok_lite.engine.files.key_value_files import (
    BUFFER_SIZE,
    Layout,
    StoredShard,
    make_layout,
    open_shards,
    write_shard,
)
from sok_lite.engine.files.key_value_names import ShardPlace, bases_of_save, find_shards
from sok_lite.engine.table.exclusive import alone

_SLOTS = 1 << 16  # places of an index that are read together


class Source(NamedTuple):
    """A table with the layout of its files, which are written of it or read into it.

    Attributes:
      rows: the `HashTable`.
      layout: of the files.
      num_shards: in this process.
      partitioner: says the shard of a key, and the process.
    """

    rows: Any
    layout: Layout
    num_shards: int = 1
    partitioner: Partitioner = default_partition_fn

    def owners(self, keys: Any, number: int) -> np.ndarray:
        """Returns the shard, or process, of each key (n,), of `number` of them."""
        keys = tf.convert_to_tensor(keys, self.rows.key_dtype)
        return np.asarray(partitioned(self.partitioner, keys, number))

    def tensor(self, rows: np.ndarray) -> tf.Tensor:
        """Returns rows, as they are in a file, as a tensor."""
        if self.layout.value_dtype == "bfloat16":
            rows = rows.view(tf.bfloat16.as_numpy_dtype)
        return tf.constant(rows)


def rows_of(holder: Any) -> Any:
    """Returns the `HashTable` of a `Variable`, or one that is by itself."""
    return holder.rows if getattr(holder, "is_dynamic_embedding", False) else holder


def source_of(holder: Any) -> Source:
    """Returns what the files of a `Variable`, or of a `HashTable` by itself, are of.

    Raises:
      ValueError: files cannot hold such keys or rows.
    """
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
    """Writes the shards of this process to files of keys and rows.

    Args:
      only: the number of the one shard that is meant; None: all are.
    """
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

        alone(source.rows.table, write_all)

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
    """Reads files of keys and rows, those of this process: other keys go, states begin anew.

    Args:
      only: the number of the one shard that takes its keys of them; None: all do.
    """
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
        # Files that a program names may be another variable's.
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
    """Raises ValueError where several processes would each save or load what all of them share."""
    if source.rows.is_shared and size > 1:
        raise ValueError(
            f"{source.layout.name!r} is one table of all processes: one of them saves and loads "
            f"it. Received: proc_size={size}. Leave it out, and call it in one process."
        )


def _chunks_of(source: Source) -> Callable[[], Iterable[Any]]:
    """Returns what gives all keys and rows as tensors, a piece at a time."""
    if source.rows.is_shared:  # another service has them, and no places of them
        whole = source.rows.export()
        return lambda: [whole]
    return lambda: table_exports.export_chunks(source.rows, _SLOTS)


def _pieces_of(
    source: Source, shard: int, chunks: Callable[[], Iterable[Any]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the keys and rows of a shard, in no order.

    Args:
      chunks: as of `_chunks_of`.
    """
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
    """Makes a table hold what files do, which were checked.

    Args:
      part: (processes or shards, this one): only keys of this one; None: all.
      only: the number of the one shard whose keys go first; None: all do.
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

    alone(rows.table, replace)


def insert(source: Source, keys: np.ndarray, values: np.ndarray) -> None:
    """Inserts keys and rows as they are in a file. It is no step of the table's epoch."""
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
    """Calls a function of what a holder has and of a folder.

    Args:
      dirpath: the folder, a text, a path or a string tensor.

    Returns:
      None in eager mode, the operation in a graph.
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
    """Calls a function of a holder and of texts, at once or from a graph.

    In a graph an error of a file becomes TensorFlow's InvalidArgumentError, with its text.

    Args:
      holder: a graph keeps a weak reference only.
      what: does it, for errors.
      function: takes the holder and bytes.
      texts: scalar string tensors.
      dtypes: [tf.string] where the function gives a text.

    Returns:
      A list of the text; without one None in eager mode and the operation in a graph.
    """
    reference, is_eager = weakref.ref(holder), tf.executing_eagerly()

    def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        try:
            result = function(alive(reference), *(tensor.numpy() for tensor in tensors))
        except (OSError, RuntimeError) as error:
            if is_eager:
                raise
            raise ValueError(str(error)) from error  # TensorFlow keeps its kind and text
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
    """Writes all keys and rows of a table by itself, or of one shard of a variable.

    Args:
      file_name: of the files, without their endings; None: that which a variable gives them.
      dirpath: the folder, a string tensor too; it is made.
      dirpath_env: an environment variable that names the folder in place of `dirpath`.
      append_to_file: behind what the files hold.
      buffer_size: keys that are written together.
      name: not used.
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
    """Makes a table by itself hold what files do, or a shard those of the keys that are its own.

    Other shards stay as they are.

    Args:
      dirpath: the folder, a string tensor too.
      file_name: of the files, without their endings, which another table may have written; None:
        that which a variable gives them.
      dirpath_env: an environment variable that names the folder in place of `dirpath`.
      load_entire_dir: all files of one save instead, whatever shards and processes wrote them: of
        the table, or of the one that `file_name` is a shard of.
      buffer_size: keys that are read together.
      name: not used.
    """
    names = None if file_name is None else [file_name]
    holder, only = table.saved_as
    return load(holder, dirpath, 1, 0, names, dirpath_env, load_entire_dir, buffer_size, only)
