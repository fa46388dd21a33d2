"""`inference_mode`: lookups change no table while it is open."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.bridge.tf_private import graphs_around
from sok_lite.native.plans import Policy, set_mode

_MISSING = ("initial", "zeros")
# Codes of native code.
_NUMBERS = {None: -1, "initial": 0, "zeros": 1}
_PIPELINES = ("Dataset_map_", "Dataset_flat_map_", "Dataset_interleave_", "Dataset_filter_")


class MissingKeyPolicy(NamedTuple):
    """What a lookup does for keys without a row: the arguments of the call.

    Attributes:
      training: whether to insert keys; None: yes unless `inference_mode` is open.
      missing: what a key without a row returns, "initial" or "zeros"; None: the mode decides.
      has_filter: whether the low-frequency filter admits new keys by chance.
      reading_only: what such a key returns if nothing is inserted; None: as otherwise.
    """

    training: bool | None = None
    missing: str | None = None
    has_filter: bool = False
    reading_only: str | None = None

    def now(self, tables: Sequence[Any] = (), pipeline: str | None = None) -> tuple[bool, str]:
        """Resolves the policy when the lookup runs, for `pipeline_of_trace` when it was built.

        Returns:
          (whether keys without a row get one, if not nothing changes; what a key still without a
          row returns, "initial" or "zeros").

        Raises:
          RuntimeError: a function of tf.data would insert keys.
        """
        mode, missing = _open, self.missing
        insert = not mode if self.training is None else self.training
        if insert and pipeline:
            _refuse_to_insert(pipeline, ", ".join(table.name for table in tables))
        if missing is None and mode and not insert:
            missing = mode[-1][1]
        if missing is None and not insert:
            missing = self.reading_only
        return insert, missing or ("zeros" if self.has_filter else "initial")

    def planned(self, pipeline: str | None) -> Policy:
        """Returns the policy as native code reads it (kernels/ops/lookup.cpp)."""
        training = -1 if self.training is None else int(self.training)
        of_missing = [_NUMBERS[each] for each in (self.missing, self.reading_only)]
        missing, reading_only = of_missing
        return Policy(training, missing, int(self.has_filter), reading_only, int(bool(pipeline)))


# Inserts keys unless `inference_mode` is open.
AS_USUAL = MissingKeyPolicy()

# Open blocks, the latest last. TensorFlow runs host calls on its own threads, so this is not
# thread-local. It is replaced as a whole: readers need no lock.
_open: tuple[tuple[object, str | None], ...] = ()
_changing = threading.Lock()


@contextmanager
def inference_mode(missing: str | None = None) -> Iterator[None]:
    """A `with` block in which lookups insert nothing, evict nothing and refresh no score.

    It applies to all tables and threads of the process, and to functions traced before: it has to
    be open when a lookup runs, so open it around the call of a tf.function or around session.run.
    With several open blocks, the one opened last decides what a missing key returns. A lookup with
    `training=True` still inserts. With several ranks the mode of a key's owner rank applies, so
    open it on every rank; ranks that differ do not wait for each other.

    Args:
      missing: what a key without a row returns: "initial", its initial value, or "zeros"; None: as
        in training, which is "zeros" with the low-frequency filter and "initial" without.

    Raises:
      ValueError: another `missing`.
      RuntimeError: it is opened within a tf.function, where it would cover only the tracing.

    Examples:
      >>> items = sok_lite.DynamicVariable(2, name="item")
      >>> with sok_lite.inference_mode(missing="zeros"):
      ...     rows = tf.nn.embedding_lookup(items, tf.constant([5]))
      >>> rows.numpy().tolist(), len(items)
      ([[0.0, 0.0]], 0)
    """
    if tf.inside_function():
        raise RuntimeError(
            "inference_mode() within a tf.function would be open while it is traced and closed "
            "when it runs. Open it around the call. Or give its lookups training=False, which "
            "sok_lite.lookup_sparse and table.sparse_read take; tf.nn.embedding_lookup does not."
        )
    checked_missing(missing)
    entry = (object(), missing)
    with _changing:
        _set_open((*_open, entry))
    try:
        yield
    finally:
        with _changing:
            _set_open(tuple(other for other in _open if other is not entry))


def _set_open(entries: tuple[tuple[object, str | None], ...]) -> None:
    """Sets the open blocks for Python and native code at once, uninterrupted."""
    global _open
    mode = 2 + _NUMBERS[entries[-1][1]] if entries else 0
    with uninterrupted():
        set_mode(mode)
        _open = entries


def pipeline_of_trace() -> str | None:
    """Returns the name of the tf.data function being traced, such as "Dataset_map_parse".

    None elsewhere, also in a loop over a dataset in a tf.function, where programs train.
    """
    if not tf.inside_function():
        return None
    # TensorFlow's names for the graphs of dataset functions.
    names = (getattr(graph, "name", "") for graph in graphs_around())
    return next((name for name in names if name.startswith(_PIPELINES)), None)


def _refuse_to_insert(pipeline: str, name: str) -> NoReturn:
    raise RuntimeError(
        f"A lookup in {name!r} cannot insert new keys in a function of tf.data ({pipeline}): no "
        "gradient comes back from there, so their rows would never be trained. Look up in the "
        "training step; or give it training=False, or iterate within sok_lite.inference_mode(), "
        "and it reads."
    )


def checked_training(training: Any) -> bool | None:
    """Returns the argument of a lookup, or raises TypeError."""
    if training is None:
        return None
    if not isinstance(training, (bool, np.bool_)):
        raise TypeError(
            "`training` must be True, False or None, known when the lookup is built. "
            f"Received: training={training!r}. For a mode that changes while a tf.function stays, "
            "use sok_lite.inference_mode()."
        )
    return bool(training)


def checked_missing(missing: Any) -> str | None:
    """Returns the argument of a lookup, or raises ValueError."""
    if missing is not None and missing not in _MISSING:
        raise ValueError(f"`missing` must be 'initial' or 'zeros'. Received: missing={missing!r}.")
    return missing
