"""Methods of variables, and of their shards and tables, that write and read files of rows."""

from collections.abc import Sequence
from typing import Any

from sok_lite.dynamic_embedding import file_system
from sok_lite.engine.files.key_value_files import BUFFER_SIZE


def save_to_file_system(
    variable: Any,
    dirpath: Any,
    proc_size: int = 1,
    proc_rank: int = 0,
    file_name_list: Sequence[str] | None = None,
    dirpath_env: str | None = "TFRA_SAVED_KV",
    append_to_file: bool = False,
    buffer_size: int = BUFFER_SIZE,
    name: str | None = None,
) -> Any:
    """Writes keys and rows to files, two for each shard and a third that says what they hold.

    Optimizer states and scores are not in them.

    Args:
      dirpath: the folder, a string tensor too; it is made.
      proc_size, proc_rank: how many processes save, and which this one is.
      file_name_list: names without their endings, one for each shard; None: those that loading
        looks for.
      dirpath_env: an environment variable that names the folder in place of `dirpath`.
      append_to_file: behind what the files hold.
      buffer_size: keys that are written together.
      name: not used.

    Returns:
      None in eager mode, the operation in a graph. There an error of a file is TensorFlow's
      InvalidArgumentError.

    Raises:
      ValueError: the keys are texts, which such files cannot hold, or a rank that there is not.
    """
    return file_system.save(
        variable,
        dirpath,
        proc_size,
        proc_rank,
        file_name_list,
        dirpath_env,
        append_to_file,
        buffer_size,
    )


def load_from_file_system(
    variable: Any,
    dirpath: Any,
    proc_size: int = 1,
    proc_rank: int = 0,
    file_name_list: Sequence[str] | None = None,
    dirpath_env: str | None = "TFRA_SAVED_KV",
    load_entire_dir: bool = False,
    buffer_size: int = BUFFER_SIZE,
    name: str | None = None,
) -> Any:
    """Makes the variable hold what files do: other keys go, states begin anew.

    All files are checked before anything changes. How many shards wrote them does not matter.

    Args:
      dirpath: the folder, a string tensor too.
      dirpath_env: an environment variable that names the folder in place of `dirpath`.
      buffer_size: keys that are read together.
      name: not used.
      proc_size, proc_rank: the files that process `proc_rank` of `proc_size` wrote.
      file_name_list: names without their endings, any number of them, instead.
      load_entire_dir: the files of all processes instead, of one save.

    Returns:
      None in eager mode, the operation in a graph.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: files of another variable, of another type or dim, or corrupt.
    """
    return file_system.load(
        variable,
        dirpath,
        proc_size,
        proc_rank,
        file_name_list,
        dirpath_env,
        load_entire_dir,
        buffer_size,
    )


def load_from_file_system_with_restore_function(
    variable: Any,
    dirpath: Any,
    proc_size: int = 1,
    proc_rank: int = 0,
    buffer_size: int = BUFFER_SIZE,
) -> Any:
    """Makes the variable hold its part of what any number of processes have written.

    Where `proc_size` processes have, those are the files of this one. Else all files are read
    that there are, and the partitioner says for `proc_size` processes which keys are of this
    one.

    Args:
      dirpath: the folder, a string tensor too.
      proc_size, proc_rank: how many processes load, and which this one is.
      buffer_size: keys that are read together.

    Returns:
      None in eager mode, the operation in a graph.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: files of another variable, of another type or dim, or corrupt.
    """
    return file_system.load_spread(variable, dirpath, proc_size, proc_rank, buffer_size)


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
    return file_system.save(
        holder, dirpath, 1, 0, names, dirpath_env, append_to_file, buffer_size, only
    )


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
      file_name: of the files, without their endings; None: that which a variable gives them.
      dirpath_env: an environment variable that names the folder in place of `dirpath`.
      load_entire_dir: the files of all processes instead, of one save.
      buffer_size: keys that are read together.
      name: not used.
    """
    names = None if file_name is None else [file_name]
    holder, only = table.saved_as
    return file_system.load(
        holder, dirpath, 1, 0, names, dirpath_env, load_entire_dir, buffer_size, only
    )
