"""SOK's dump and load, for any number of ranks; docs/checkpoint_format.md describes the files."""

import base64
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import communicator
from sok_lite.bridge.keras.held import is_layer
from sok_lite.bridge.optimizers.dense_slots import dense_slots
from sok_lite.bridge.optimizers.fallback_step import CarriedState, carried_by
from sok_lite.bridge.optimizers.keras3 import batch_counter, num_batches
from sok_lite.bridge.optimizers.loss_scale import inner_of
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.bridge.optimizers.wrapped import WrappedOptimizer
from sok_lite.bridge.static_variable import StaticVariable
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.files.dump import BackgroundDump, dump_in_background
from sok_lite.engine.files.dump import dump as engine_dump
from sok_lite.engine.files.item import ItemOrTable
from sok_lite.engine.files.load import load as engine_load
from sok_lite.engine.files.progress import checked_progress, progress_bar
from sok_lite.engine.files.static_part import ReadRows, StaticPart
from sok_lite.engine.incremental_export import changes_since
from sok_lite.sok.dynamic_variable import DynamicVariable
from sok_lite.sok.optimizer import wrapper_of
from sok_lite.sok.static_variable import FixedVariable
from sok_lite.sok.table_functions import table_variable, tables_of

__all__ = ["dump", "incremental_model_dump", "load", "log_removals"]

Path = str | os.PathLike[str]
# Key in the `extra` of a dump with several optimizers: the entries of all but the first, which
# `extra` itself holds.
_OTHERS = "other_optimizers"


def dump(
    path: Path,
    dump_vars: Any,
    optimizer: Any = None,
    *,
    incremental: bool = False,
    background: bool = False,
    progress: bool | None = None,
) -> BackgroundDump | None:
    """Writes variables of all ranks into a folder. Every rank must call it, in eager mode.

    It writes keys, rows, the states of all optimizers, scores, pending counts and times. An
    existing checkpoint is replaced once the new one is complete; until then, or after a failure, it
    stays. The memory needed does not grow with the variables.

    With `incremental`, changes since the existing checkpoint are added to it: rows and states of
    keys that a lookup saw or a write changed, and the set of keys. `sok.load` then restores exactly
    the last dump. Without a checkpoint everything is written; also, with a warning, if the changes
    since the last dump into this folder or load from it are unknown: another process dumped there,
    the number of ranks differs, a variable was restored or merged, or scores were set that are
    numbers of lookups. A dump without `incremental` now and then saves time and space.

    Args:
      path: of the folder, which all ranks must see; created if missing. It is local or mounted, or
        an address such as s3://bucket/ck (docs/howto/object-stores.md). Only one dump may write
        into it at a time.
      dump_vars: a DynamicVariable, a sok.Variable, a sok_lite.keras.Table, a Keras layer or model,
        whose tables it takes, or a list, tuple or dict of these; table names must differ. All rows
        of a sok.Variable are written each time.
      optimizer: a sok.OptimizerWrapper, the optimizer in it, or a list of these, to also save its
        step count, its states of static variables and, without an update rule, rank 0's state
        beside the rows. Only a DynamicVariable needs the wrapper. Static variables allow one
        optimizer. Optimizer states of dense weights are not saved.
      incremental: whether to add to the existing checkpoint.
      background: whether to return once the content is copied to the host, which needs memory for
        all of it; a thread writes the copy while training continues.
      progress: whether rank 0 shows a progress bar; None: if it writes to a terminal and tqdm is
        installed.

    Returns:
      With `background` an object to `wait()` for on every rank: only then the checkpoint exists, or
        a rank's error is raised. The next dump into the folder, or load from it, waits itself.
        Otherwise None.

    Raises:
      TypeError, ValueError: an argument is invalid or differs between ranks, or a key has rows on
        several ranks. The previous checkpoint is unchanged.
      RuntimeError: not in eager mode, or `sok.init` has not connected the ranks.
      OSError, MemoryError: a rank cannot write its files, or another process or thread dumps into
        the folder. All ranks raise the same.
      ImportError: `progress` is True and tqdm is not installed.

    Examples:
      >>> items = sok.DynamicVariable(2, name="item")
      >>> _ = sok.assign(items, [7, 9], [[1.0, 1.0], [2.0, 2.0]])
      >>> sok.dump("saved", items)
      >>> again = sok.DynamicVariable(2, name="item")
      >>> sok.load("saved", again)
      >>> sok.export(again)[0].numpy().tolist()
      [7, 9]
    """
    _check_eager("dump")
    variables, wrappers = _checked_arguments(dump_vars, optimizer, "dump")
    comm = communicator()
    tables = _items(variables, wrappers, makes=False)
    extra = _extra(wrappers)
    backend = variables[0].table.backend
    if background:
        if progress:
            raise ValueError("A dump in the background has no bar. Leave `progress` out.")
        begin = partial(dump_in_background, path, tables, comm, extra)
        return on_device(backend, partial(begin, incremental=bool(incremental)))
    shown = checked_progress(progress, comm.rank)
    with progress_bar(shown, f"Dump to {os.fspath(path)}", comm.size) as report:
        write = partial(engine_dump, path, tables, comm, extra, report=report)
        on_device(backend, partial(write, incremental=bool(incremental)))
    return None


def load(
    path: Path,
    load_vars: Any,
    optimizer: Any = None,
    mode: str = "replace",
    cast: bool = False,
    progress: bool | None = None,
    on_full: str = "error",
) -> None:
    """Loads a checkpoint of `dump` into variables, on any number of ranks. Every rank must call it.

    `progress` and further errors are as for `dump`. Either all variables change on all ranks, or
    none. Their kind (`var_type`) and options may differ from the saved ones; dimension, key_type
    and dtype must match.

    Args:
      path: of the folder, or its address; for the folder of a sok_lite.keras.Checkpoint, its newest
        save.
      load_vars: as `dump_vars` of `dump`, with the same names. A static variable gets all of its
        rows, in both modes.
      optimizer: the dumped optimizer or one like it, wrapped or not, which continues from the saved
        state; several as a list in the order of the dump. States of dynamic variables are restored
        even without it.
      mode: "replace": a variable has exactly the saved keys. "merge": it keeps its other keys.
      cast: whether to convert rows saved in another float dtype.
      on_full: what happens if a "hybrid" table has no room for all keys, as on fewer ranks:
        "error": nothing is loaded. "evict": keys with the lowest scores are left out, as the table
        would evict them, and the logger `sok_lite` reports their number. That takes about 40 bytes
        per key on the host.

    Raises:
      TypeError, ValueError: an argument is invalid or differs between ranks, variables do not match
        the checkpoint, or a file is corrupt.
      OSError, MemoryError: there is no checkpoint, or a rank cannot read or hold its part. All
        ranks raise the same, and no variable has changed.
    """
    _check_eager("load")
    variables, wrappers = _checked_arguments(load_vars, optimizer, "load")
    comm = communicator()
    tables = _items(variables, wrappers, makes=True)
    shown = checked_progress(progress, comm.rank)
    with progress_bar(shown, f"Load from {os.fspath(path)}", comm.size) as report:
        accept = partial(_check_extra, path, len(wrappers)) if wrappers else None
        read = partial(engine_load, path, tables, comm, mode, cast, report, accept, on_full)
        extra = on_device(variables[0].table.backend, read)
    if wrappers:
        _go_on_from(wrappers, extra, path)


def incremental_model_dump(
    sok_vars: Any, time_threshold: Any, sess: Any = None, *, removed: bool = False
) -> tuple[list[np.ndarray], ...]:
    """Returns the keys that were seen or changed since a time, and their rows, from all ranks.

    Every rank must call it, outside of a tf.function, and gets the same result. Both kinds of
    variables work. In TF1 call it between two session runs: it reads the current state, and adds
    nothing to the graph. Take the time between two training steps: a write that inserts no key,
    such as an optimizer's, counts as of the last lookup before it. Keys from up to a second before
    the time may be included, and for times long ago, from up to 1/128 of the elapsed time before
    it.

    Args:
      sok_vars: a DynamicVariable or a sok_lite.keras.Table, or a list or tuple of these; for a
        Keras layer or model its tables, by name.
      time_threshold: a datetime, or a list or tuple of one, or of one per variable. Without a time
        zone it is local time.
      sess: in TF1 the session, as in SOK; optional, because nothing is run in it.
      removed: whether to also return keys that lost their rows since the time, by eviction, expiry
        or erasure, and have none now. Call `sok.log_removals` before the time. Older removals are
        then forgotten: the next time must not be earlier.

    Returns:
      (keys_list, values_list): per variable the keys (n,) of its key type and the rows (n,
      dimension) of its dtype, as NumPy arrays: those of rank 0, ascending, then of rank 1 and so
      on. With `removed` a third list of the removed keys (m,) of each variable, which the others
      leave out. A key with rows on several ranks, as after lookups on one rank only, appears once
      for each; lookups over ranks use the owner's row.

    Raises:
      TypeError, ValueError: an argument is invalid, the variables differ between ranks, or removals
        since the time are not known.
      RuntimeError: in a tf.function, or `sok.init` has not connected the ranks.
      MemoryError: a rank has no memory for its rows. All ranks raise the same.
    """
    if tf.inside_function():
        raise RuntimeError("Call sok.incremental_model_dump outside of the tf.function.")
    if sess is not None and not hasattr(sess, "run"):
        raise TypeError(
            f"`sess` must be a session of TF1, or None. Received: sess={sess!r}. Leave it out."
        )
    variables = _checked_tables(sok_vars, "incremental_model_dump")
    times = _checked_times(time_threshold, len(variables))
    tables = [variable.table for variable in variables]
    comm = communicator()
    changes = on_device(
        tables[0].backend, lambda: changes_since(tables, times, comm, bool(removed))
    )
    keys, rows, *gone = map(list, zip(*changes, strict=True))
    # bfloat16 is stored as its bits.
    rows = [
        each.view(variable.dtype.as_numpy_dtype)
        for variable, each in zip(variables, rows, strict=True)
    ]
    return (keys, rows, *gone)


def log_removals(sok_vars: Any) -> None:
    """Starts logging removed keys, for `sok.incremental_model_dump(removed=True)`.

    Increments of `sok.dump` then list them too, so a refreshing reader need not compare all keys.
    The log takes 23 to 34 bytes per removed key until that is forgotten. A log that exists
    continues; a table that is loaded starts a new one. No communication: each rank calls it for its
    own part. Other objects raise TypeError.

    Args:
      sok_vars: a DynamicVariable or a sok_lite.keras.Table, or a list or tuple of these; for a
        Keras layer or model its tables.

    Examples:
      >>> from datetime import datetime, timedelta
      >>> items = sok.DynamicVariable(2, name="item")
      >>> sok.log_removals(items)
      >>> _ = sok.assign(items, [7, 9], [[1.0, 1.0], [2.0, 2.0]])
      >>> since = datetime.now() - timedelta(hours=1)
      >>> _ = items.erase([7])
      >>> keys, rows, removed = sok.incremental_model_dump(items, since, removed=True)
      >>> keys[0].tolist(), removed[0].tolist()
      ([9], [7])
    """
    for variable in _checked_tables(sok_vars, "log_removals"):
        on_device(variable.table.backend, variable.table.log_removals)


def _checked_tables(value: Any, what: str) -> list[TableVariable]:
    """Returns the variables of an argument; raises TypeError for a static one."""
    variables, _ = _checked_arguments(value, None, what)
    for variable in variables:
        if isinstance(variable, FixedVariable):
            raise TypeError(
                f"sok.{what} takes sok.DynamicVariable. Received: a static variable, "
                f"{variable.name!r}, all of whose rows are there: read it as it is."
            )
    return [variable for variable in variables if isinstance(variable, TableVariable)]


def _checked_times(value: Any, num_variables: int) -> list[float]:
    """Returns a time per variable, in seconds since 1970."""
    times = list(value) if isinstance(value, (list, tuple)) else [value]
    for time in times:
        if not isinstance(time, datetime):
            raise TypeError(
                "`time_threshold` must be a datetime.datetime, or a list of such. Received: "
                f"{time!r}."
            )
    if len(times) not in (1, num_variables):
        raise ValueError(
            f"`time_threshold` must be one time, or one for each of {num_variables} variables. "
            f"Received: {len(times)}."
        )
    seconds = [_seconds(time) for time in times]
    return seconds if len(seconds) == num_variables else seconds * num_variables


def _seconds(time: datetime) -> float:
    """Returns a time in seconds since 1970."""
    try:
        return time.timestamp()
    except (ValueError, OverflowError, OSError):
        # Within a day of datetime.min or max Python knows no local time; no key is that old.
        return time.replace(tzinfo=timezone.utc).timestamp()


def _check_eager(what: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"sok.{what} works in eager mode only. Call it outside of tf.function and of graphs of "
            "TF1, or use tf.train.Checkpoint there."
        )


def _checked_arguments(
    value: Any, optimizer: Any, what: str
) -> tuple[list[TableVariable | FixedVariable], list[WrappedOptimizer]]:
    """Returns the variables and optimizers of a call's arguments."""
    variables = tables_of(value)
    if not variables:
        raise ValueError(f"sok.{what} takes at least one variable. Received: none.")
    for variable in variables:
        if not isinstance(variable, FixedVariable) and table_variable(variable) is None:
            raise TypeError(
                f"sok.{what} takes sok.DynamicVariable, sok.Variable, sok_lite.keras.Table, and "
                f"layers and models that hold such. Received: {type(variable).__name__}"
                f"{' without a table' * is_layer(variable)}. Save other variables with "
                "tf.train.Checkpoint."
            )
    if optimizer is None:
        return variables, []
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    static = [variable for variable in variables if isinstance(variable, FixedVariable)]
    if static and len(optimizers) > 1:
        raise ValueError(
            f"sok.{what} takes one optimizer with static variables, whose states it has. Received: "
            f"{len(optimizers)}, with {static[0].name!r}. Give static variables a folder of their "
            "own, with the optimizer that trains them."
        )
    is_dynamic = any(isinstance(variable, DynamicVariable) for variable in variables)
    return variables, [_wrapper(each, is_dynamic, what) for each in optimizers]


def _wrapper(optimizer: Any, is_dynamic: bool, what: str) -> WrappedOptimizer:
    """Returns the object that counts an optimizer's steps, which must train dynamic ones or not."""
    around = optimizer if isinstance(optimizer, WrappedOptimizer) else wrapper_of(optimizer)
    if around is not None:
        return around
    # As in SOK. States, and the count if it steps by itself, belong to the optimizer.
    made = WrappedOptimizer(optimizer)  # rejects what is not an optimizer
    if is_dynamic:
        raise TypeError(
            f"sok.{what} needs the sok.OptimizerWrapper that trains dynamic variables: it counts "
            f"their steps. Received: {type(optimizer).__name__}, with none around it. Leave out "
            "an optimizer that trains dense weights alone."
        )
    return made


def _items(
    variables: list[TableVariable | FixedVariable], wrappers: list[WrappedOptimizer], makes: bool
) -> list[ItemOrTable]:
    """Returns variables in the engine's form; `makes`: creates missing states of static ones."""

    def item(variable: TableVariable | FixedVariable) -> ItemOrTable:
        if isinstance(variable, TableVariable):
            return variable.table
        if not wrappers:
            return _VariableRows(variable)
        inner = inner_of(wrappers[0].optimizer)
        return _VariableRows(variable, dense_slots(inner, family_of(inner), variable, makes))

    return [item(variable) for variable in variables]


def _counters(wrapper: WrappedOptimizer) -> list[Any]:
    """Returns the step counters: the wrapper's, and the inner optimizer's if any."""
    inner = inner_of(wrapper.optimizer)
    own = getattr(wrapper.optimizer, "iterations", None)
    if num_batches(inner) > 1:  # then it is not a variable
        own = batch_counter(inner)
    return [wrapper.iterations, *([] if own is None else [own])]


def _extra(wrappers: list[WrappedOptimizer]) -> dict[str, Any]:
    """Returns rank 0's optimizer state that is not of rows."""
    if not wrappers:
        return {}
    first, *others = map(_kept_of, wrappers)
    return {**first, _OTHERS: others} if others else first


def _kept_of(wrapper: WrappedOptimizer) -> dict[str, Any]:
    carried = carried_by(inner_of(wrapper.optimizer))
    kept: dict[str, Any] = {"iterations": [int(counter) for counter in _counters(wrapper)]}
    if carried.values:
        kept["carried"] = base64.b64encode(carried.serialize()).decode()
    return kept


def _carried_in(kept: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the carried values of `_kept_of`, if any. ValueError, TypeError: they are corrupt."""
    if "carried" not in kept:
        return {}
    return CarriedState.read(base64.b64decode(kept["carried"], validate=True))


def _check_extra(path: Path, num_optimizers: int, extra: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint has another number of optimizers, or is corrupt."""
    others = extra.get(_OTHERS, [])
    is_list = type(others) is list and all(type(each) is dict for each in others)
    if is_list and "iterations" in extra and num_optimizers != 1 + len(others):
        raise ValueError(
            f"The checkpoint at {os.fspath(path)} has the step counts of {1 + len(others)} "
            f"optimizers. Received: {num_optimizers}. Nothing was loaded. Give as many, in the "
            "order of the dump, or none."
        )
    for kept in [extra, *others] if is_list else [{"iterations": others}]:
        _check_kept(path, kept)


def _check_kept(path: Path, kept: dict[str, Any]) -> None:
    """Raises ValueError for invalid step counts or unreadable carried values."""
    counts = kept.get("iterations", [0])
    is_list = type(counts) is list and counts
    if not is_list or not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
        raise ValueError(
            f"The checkpoint at {os.fspath(path)} is corrupt: its step counts are {counts!r:.100}. "
            "Nothing was loaded. Take another checkpoint."
        )
    try:
        _carried_in(kept)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The checkpoint at {os.fspath(path)} is corrupt: what its optimizer keeps beside the "
            f"states of rows cannot be read. Nothing was loaded. Take another checkpoint. ({error})"
        ) from error


def _go_on_from(wrappers: list[WrappedOptimizer], extra: dict[str, Any], path: Path) -> None:
    if "iterations" not in extra:
        raise ValueError(
            f"The checkpoint at {os.fspath(path)} has no step count: it was dumped without an "
            "optimizer. The variables were loaded. Leave `optimizer` out here, or give it to "
            "sok.dump as well."
        )
    for wrapper, kept in zip(wrappers, [extra, *extra.get(_OTHERS, [])], strict=True):
        for counter, count in zip(_counters(wrapper), kept.get("iterations", []), strict=False):
            counter.assign(count)
        carried_by(inner_of(wrapper.optimizer)).values = _carried_in(kept)


# ---- static variables ----------------------------------------------------------------------------


class _VariableRows(StaticPart):
    """This rank's rows of a static variable, and its optimizer variables, `slots`, by name."""

    def __init__(self, variable: StaticVariable, slots: Mapping[str, Any] | None = None) -> None:
        super().__init__(variable.table, None if slots is None else tuple(slots))
        # A Keras 3 variable wraps TensorFlow's.
        of_tf = {
            name: slot if isinstance(slot, tf.Variable) else slot.value
            for name, slot in (slots or {}).items()
        }
        self._variables = {"value": variable, **of_tf}

    def row_reader(self) -> ReadRows:
        # TensorFlow copies a value before writing it if it is still being read.
        tensors = {name: variable.read_value() for name, variable in self._variables.items()}

        def read(column: str, first: int, last: int) -> np.ndarray:
            rows = tensors[column][first:last]
            if column != "value":
                return tf.cast(rows, tf.float32).numpy()
            return rows.numpy().view(self.table.row_dtype.storage)

        return read

    def assignment(self, columns: Mapping[str, np.ndarray]) -> Callable[[], None]:
        pairs = []
        for name, rows in columns.items():
            variable = self._variables[name]
            with tf.device(variable.device):
                if name == "value":
                    tensor = tf.constant(rows.view(variable.dtype.as_numpy_dtype))
                else:
                    tensor = tf.cast(tf.constant(rows), variable.dtype)
                tensor = tf.identity(tensor)
            pairs.append((variable, tensor))

        def assign() -> None:
            for variable, tensor in pairs:
                variable.assign(tensor)

        return assign
