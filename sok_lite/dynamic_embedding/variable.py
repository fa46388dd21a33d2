"""`Variable` and `get_variable`: a table of embeddings by key, in TFRA's words."""

import inspect
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.bridge.refusals import is_called_from
from sok_lite.bridge.saveable import TableSaveable
from sok_lite.bridge.tf_private import SAVER, WHOLE
from sok_lite.dynamic_embedding import file_methods, rows_by_key, variable_lookups
from sok_lite.dynamic_embedding.arguments import checked_dtypes
from sok_lite.dynamic_embedding.creators import CuckooHashTableCreator, KVCreator
from sok_lite.dynamic_embedding.graph_keys import add_to_graph
from sok_lite.dynamic_embedding.partition import (
    Partitioner,
    default_partition_fn,
    owner_rule,
    partitioned,
)
from sok_lite.dynamic_embedding.ranks import refuse_parameter_servers
from sok_lite.dynamic_embedding.restrict_policies import RestrictPolicy
from sok_lite.dynamic_embedding.saved_by_tfra import LISTED, ShardsOfTfra, check_name
from sok_lite.dynamic_embedding.saved_files import VariableFiles
from sok_lite.dynamic_embedding.savers import FileSystemSaver
from sok_lite.dynamic_embedding.shards import Shard
from sok_lite.dynamic_embedding.slots import SlotVariable, slots_of
from sok_lite.dynamic_embedding.tables import RowOptions
from sok_lite.dynamic_embedding.trainable import ShadowVariable
from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.dtypes import key_dtype as engine_key_dtype

__all__ = ["Variable"]

_TRAINABLE = (tf.float32, tf.float16, tf.bfloat16, tf.float64)


@unconverted
class Variable(tf.__internal__.tracking.Trackable):
    """Embeddings by key: rows of `dim` values, in a table that grows with its keys.

    Lookups never insert; `upsert`, `accum` and training do. A missing key gives its initial value,
    which is a function of the variable's name and the key: training then inserts just that row.

    All shards of a variable lie in one table on the device of the process, the GPU where there is
    one. `devices` says how many shards there are, and the partitioner which one a key is of.

    In a job of several ranks each rank has a table of its own, but where a layer or function looks
    keys up on all ranks (`HvdAllToAllEmbedding`): the partitioner then says whose a key is.

    Args:
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: tf.float32, float16, bfloat16 or float64, which can be trained (a step computes
        in float32, and rounds a row of float64 to it); int32, int64 or int8, which cannot.
      dim: elements of a row.
      devices: one name for each shard; None: one shard. Not on parameter servers that several
        workers share: each would have a table of its own.
      partitioner: takes keys (n,) and the number of shards, gives the shard of each key, (n,)
        int32: the same for a key whenever it is asked.
      shared_name: not used.
      name: of the variable. It also seeds random initial values.
      initializer: initial value of a row: a number, an array of `dim`, an initializer of Keras or
        TensorFlow, or a function that returns one of these; None: 0.
      trainable: whether gradients are taken.
      checkpoint: whether checkpoints have the variable.
      init_size: keys to make room for, in all shards together; 0: the environment variable
        TF_HASHTABLE_INIT_SIZE, else 8,192 in each.
      kv_creator: makes the table; None: `CuckooHashTableCreator()`.
      restrict_policy: a class, by which `restrict` chooses what goes.
      bp_v2: accepted. An update changes a row as it is at the time, in one piece, with it and
        without: two workers that train one key both count.
      short_file_name: whether `get_variable` leaves variable scopes out of the name.
      row_shape: (fan_in, fan_out) that Glorot, He, Lecun and VarianceScaling count with. TFRA takes
        the keys of a lookup for fan_in; None: (dim, dim), and a warning says what TFRA would draw.

    Attributes: all arguments, or their defaults; `shard_num`, the number of shards.

    Raises:
      TypeError: a dtype that there is not (also a ValueError), an argument of a wrong type.
      ValueError: `dim` or `init_size` out of range, an initializer that needs a whole matrix, a
        `row_shape` that is none, or texts as keys with a `FileSystemSaver`.
      NotImplementedError: `devices` are those of a job that has several workers.
    """

    is_dynamic_embedding = True

    def __init__(
        self,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        dim: int = 1,
        devices: str | Sequence[str] | None = None,
        partitioner: Partitioner = default_partition_fn,
        shared_name: str | None = None,
        name: str = "DynamicEmbedding_Variable",
        initializer: Any = None,
        trainable: bool = True,
        checkpoint: bool = True,
        init_size: int = 0,
        kv_creator: KVCreator | None = None,
        restrict_policy: type[RestrictPolicy] | None = None,
        bp_v2: bool = False,
        short_file_name: bool = False,
        row_shape: tuple[int, int] | None = None,
    ) -> None:
        self.key_dtype, self.value_dtype = checked_dtypes(key_dtype, value_dtype)
        check_integer("dim", dim, 1)
        check_integer("init_size", init_size, 0)
        if kv_creator is not None and not isinstance(kv_creator, KVCreator):
            raise TypeError(
                "`kv_creator` must be a KVCreator, such as de.CuckooHashTableCreator(). "
                f"Received: {kv_creator!r}."
            )
        is_policy = inspect.isclass(restrict_policy) and issubclass(restrict_policy, RestrictPolicy)
        if restrict_policy is not None and not is_policy:
            raise TypeError(
                "restrict_policy must be subclass of RestrictPolicy, the class itself. "
                f"Received: {restrict_policy!r}."
            )
        self.dim = int(dim)
        self.devices = listed(devices)
        refuse_parameter_servers(name, self.devices)
        self.shard_num = len(self.devices)
        self.partition_fn = partitioner
        self.name = name
        self.shared_name = shared_name or f"shared_name.{name}"
        self.initializer = initializer
        self.trainable = trainable
        self.checkpoint = checkpoint
        self.init_size = init_size
        self.kv_creator = kv_creator or CuckooHashTableCreator()
        self.bp_v2 = bp_v2
        self.short_file_name = short_file_name
        self.row_shape = row_shape
        engine_keys = engine_key_dtype("int32" if self.key_dtype == tf.int32 else "int64")
        saver = self.kv_creator.saver
        saved = VariableFiles(self, saver) if isinstance(saver, FileSystemSaver) else None
        self.rows = self.kv_creator.create(
            self.key_dtype,
            self.value_dtype,
            RowOptions(
                self.dim, initializer, owner_rule(partitioner, engine_keys), saved, row_shape
            ),
            name,
            checkpoint,
            int(init_size) // self.shard_num * self.shard_num,
            self.kv_creator.config,
            self.devices[0],
        )
        self._trainables: dict[str, ShadowVariable] = {}
        self._naming = threading.RLock()
        self._restored_from: str | None = None
        if checkpoint:
            self._track_trackable(self.rows, "rows")
        self._restrict_policy = None
        if restrict_policy is not None:
            self._restrict_policy = restrict_policy(self)
            if checkpoint:
                self._track_trackable(self._restrict_policy.status, "status")
        if not tf.executing_eagerly() and not tf.inside_function():
            add_to_graph(self)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        """Returns what a saver of TF1 saves where its list has the variable itself.

        Raises:
          NotImplementedError: its rows are elsewhere, and it has nothing to save.
        """
        if not (self.checkpoint and is_called_from(SAVER)):
            return {}
        if not self.rows.checkpoint:
            raise NotImplementedError(
                f"A Saver cannot save {self.name!r}. {self.rows.instead_of_save} Leave it out of "
                "the variables of the Saver, or make it with checkpoint=False."
            )
        # The name that it has where a saver is not told what to save.
        name = self.name if tf.executing_eagerly() else self.rows.op.name
        return {WHOLE: lambda named=name: TableSaveable(self.rows, named)}

    def _checkpoint_adapter(self, path: str) -> None:
        """Notes which checkpoint is being restored, where TensorFlow tells."""
        self._restored_from = path

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        """Returns what a checkpoint has beneath the variable, by name: of TFRA's its rows.

        Raises:
          ValueError: they are of a variable with another name.
        """
        if not (self.rows.checkpoint and name.startswith(LISTED)):
            return super()._lookup_dependency(name, cached_dependencies)
        check_name(name, self.rows)
        self.rows.shards_of_tfra = ShardsOfTfra(self.rows, self._restored_from)
        return self.rows

    def __repr__(self) -> str:
        return (
            f"<de.Variable {self.name!r} key_dtype={self.key_dtype.name} "
            f"value_dtype={self.value_dtype.name} dim={self.dim} shards={self.shard_num}>"
        )

    # ---------------------------------------------------------------- facts

    @property
    def tables(self) -> list[Any]:
        """The tables of the shards: the one there is, or a view of each shard."""
        if self.shard_num == 1:
            return [self.rows]
        return [Shard(self, index) for index in range(self.shard_num)]

    @property
    def restrict_policy(self) -> RestrictPolicy | None:
        """The policy, made for this variable; None: there is none."""
        return self._restrict_policy

    @property
    def trainable_store(self) -> dict[str, ShadowVariable]:
        """The trainables of eager mode by name."""
        return self._trainables

    _trainable_store = trainable_store

    @property
    def tables_held(self) -> list[Any]:
        """The tables that Keras would leave out of a model that holds the variable."""
        policy = self._restrict_policy
        return [self.rows] + ([] if policy is None else policy.status.tables_held)

    @property
    def is_differentiable(self) -> bool:
        """Whether its values are such as can be trained."""
        return self.value_dtype in _TRAINABLE

    @property
    def is_pooled(self) -> bool:
        """Whether the table combines rows itself."""
        return self.is_differentiable and self.rows.table.all_ranks_refusal is None

    def keys_of(self, keys: Any, remember: bool = False) -> tf.Tensor:
        """Returns keys of any shape as the integers that the table knows them by.

        The partitioner is called, and the shards that it returns are checked.
        """
        return self.rows.keys_of(rows_by_key.checked(self, keys), remember)

    def shards_of(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the shard of each key of any shape, (number of keys,) int32."""
        return partitioned(self.partition_fn, tf.reshape(keys, [-1]), self.shard_num)

    # ---------------------------------------------------------------- what programs call

    upsert = rows_by_key.upsert
    accum = rows_by_key.accum
    lookup = rows_by_key.lookup
    remove = rows_by_key.remove
    clear = rows_by_key.clear
    export = rows_by_key.export
    size = rows_by_key.size
    embedding_lookup = variable_lookups.embedding_lookup
    verify_embedding_weights = variable_lookups.verify_embedding_weights
    get_trainable_by_name = variable_lookups.get_trainable_by_name
    get_eager_trainable_by_name = variable_lookups.get_trainable_by_name

    def restrict(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes all but some keys, chosen by the policy, with their states and status.

        Args:
          num_reserved: keys to be kept.
          **kwargs: of the policy's `apply_restriction`, such as `trigger`.

        Returns:
          The operation in a graph; None in eager mode, or where there is no policy: then a warning
          is logged.
        """
        if self._restrict_policy is None:
            tf.get_logger().warning(
                f"restrict() of {self.name!r} does nothing: the variable has no restrict_policy."
            )
            return None
        return self._restrict_policy.apply_restriction(num_reserved, **kwargs)

    def get_slot_variables(self, optimizer: Any) -> list[SlotVariable]:
        """Returns the states that an optimizer keeps of the rows, each by its name.

        Args:
          optimizer: of Keras, tf_keras or tf.compat.v1.train.

        Returns:
          Views; [] where the optimizer has not trained the variable.

        Raises:
          TypeError: it is no optimizer.
        """
        family_of(optimizer)
        return slots_of(self, optimizer)

    def trainable_named(self, names: Sequence[str]) -> ShadowVariable:
        """Returns the trainable that has one of some names; it has all of them from now on."""
        with self._naming:
            found = next((self._trainables[n] for n in names if n in self._trainables), None)
            found = ShadowVariable(self, names[0]) if found is None else found
            for name in names:
                self._trainables.setdefault(name, found)
        return found

    def export_keys_and_scores(
        self, split_size: int, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys (n,) and their scores (n,) int64, of an `HkvHashTable` only.

        Raises:
          TypeError: the table keeps no scores: the creator is no `HkvHashTableCreator`.
        """
        if not hasattr(self.rows, "export_keys_and_scores"):
            raise TypeError(
                f"{self.name!r} keeps no scores. Make it with kv_creator=de.HkvHashTableCreator(). "
                f"Received: a {type(self.kv_creator).__name__}."
            )
        return self.rows.export_keys_and_scores(split_size)

    save_to_file_system = file_methods.save_to_file_system
    load_from_file_system = file_methods.load_from_file_system
    load_from_file_system_with_restore_function = (
        file_methods.load_from_file_system_with_restore_function
    )


def listed(devices: str | Sequence[str] | None) -> list[str]:
    """Returns one name for each shard, of the argument `devices`."""
    if devices is None:
        return ["/CPU:0" if get_backend().name == "cpu" else "/GPU:0"]
    if not isinstance(devices, Iterable):
        raise TypeError(
            "`devices` must be a name, or a list with one for each shard. "
            f"Received: devices={devices!r}."
        )
    listed = [devices] if isinstance(devices, str) else list(devices)
    if not listed:
        raise ValueError("`devices` must have one name for each shard. Received: [].")
    return listed
