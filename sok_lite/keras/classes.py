"""The layers and callbacks as classes of each Keras version that a program uses."""

import functools
import importlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok_lite.bridge.keras import guard, held
from sok_lite.bridge.keras.callbacks import help_callbacks
from sok_lite.bridge.keras.classes import (
    layer_class,
    made_class,
    register_as_layer,
    root_of,
    share_in_copies,
)
from sok_lite.bridge.keras.input_wait import time_input
from sok_lite.bridge.keras.ranks import AllRanksPart, check_ranks
from sok_lite.bridge.keras.saving import keep_tables
from sok_lite.bridge.keras.steps import count_by_rows
from sok_lite.bridge.optimizers.patched import patch_optimizers
from sok_lite.keras.checkpoint import CheckpointPart, resume_fit
from sok_lite.keras.data_sharding import equal_steps, shard
from sok_lite.keras.expire import ExpirePart
from sok_lite.keras.features import Feature
from sok_lite.keras.layers import EmbeddingPart, EmbeddingsPart
from sok_lite.keras.lookup_fusion import look_up_together, plain
from sok_lite.keras.metrics import TableMetricsPart
from sok_lite.keras.table import TablePart

if TYPE_CHECKING:
    import keras

__all__ = [
    "AllRanks",
    "Checkpoint",
    "Embedding",
    "Embeddings",
    "Expire",
    "Table",
    "TableMetrics",
    "classes_for",
]

_REGISTERED = "sok_lite.keras"


def classes_for(package: Any) -> SimpleNamespace:
    """Returns the layers and callbacks for a Keras, and registers the layers there by name.

    The package is `keras`, `tf_keras` or `tf.keras`; else TypeError is raised. `Feature`, `shard`
    and `equal_steps`, which work with any Keras, are included.
    """
    return _classes_of(root_of(package))


@functools.cache
def _classes_of(package: Any) -> SimpleNamespace:
    members = {"__module__": __name__, "package": package}
    layer, callback = layer_class(package), package.callbacks.Callback

    def make_class(name: str, part: type, base: Any, **more: Any) -> Any:
        return register_as_layer(_REGISTERED, name, part, base, {**members, **more})

    table = make_class("Table", TablePart, layer)
    several = make_class("Embeddings", EmbeddingsPart, layer, table_class=table)
    single = make_class("Embedding", EmbeddingPart, layer, table_class=table)
    plain.update((table, several, single))
    return SimpleNamespace(
        Table=table,
        Embeddings=several,
        Embedding=single,
        AllRanks=made_class("AllRanks", AllRanksPart, callback),
        Checkpoint=made_class("Checkpoint", CheckpointPart, callback),
        Expire=made_class("Expire", ExpirePart, callback),
        TableMetrics=made_class("TableMetrics", TableMetricsPart, callback),
        Feature=Feature,
        shard=shard,
        equal_steps=equal_steps,
    )


def know_optimizers(name: str, package: Any) -> None:
    """Registers our optimizers with Keras 3 by name, for models to be loaded."""
    if name == "keras":
        for module in ("group", "rowwise_adagrad"):
            importlib.import_module(f"sok_lite.bridge.optimizers.{module}")


patch_optimizers()
for _told in (
    *(keep_tables, help_callbacks, share_in_copies, resume_fit, check_ranks, count_by_rows),
    *(look_up_together, know_optimizers, time_input),
):
    guard.tell(_told)
if TYPE_CHECKING:  # for type checkers and editors; Keras 3 stands for both

    class Table(TablePart, keras.layers.Layer):
        """See `TablePart`."""

    class Embeddings(EmbeddingsPart, keras.layers.Layer):
        """See `EmbeddingsPart`."""

    class Embedding(EmbeddingPart, keras.layers.Layer):
        """See `EmbeddingPart`."""

    class AllRanks(AllRanksPart, keras.callbacks.Callback):
        """See `AllRanksPart`."""

    class Checkpoint(CheckpointPart, keras.callbacks.Callback):
        """See `CheckpointPart`."""

    class Expire(ExpirePart, keras.callbacks.Callback):
        """See `ExpirePart`."""

    class TableMetrics(TableMetricsPart, keras.callbacks.Callback):
        """See `TableMetricsPart`."""

else:
    _of_program = classes_for(tf.keras)
    Table = _of_program.Table
    Embeddings = _of_program.Embeddings
    Embedding = _of_program.Embedding
    AllRanks = _of_program.AllRanks
    Checkpoint = _of_program.Checkpoint
    Expire = _of_program.Expire
    TableMetrics = _of_program.TableMetrics
# A program that also imported tf_keras may load a model with it.
for _name in held.PACKAGES:
    if hasattr(sys.modules.get(_name), "layers"):
        classes_for(sys.modules[_name])
