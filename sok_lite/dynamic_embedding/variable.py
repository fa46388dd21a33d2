"""`Variable`: TFRA's table of embeddings by key, with its shards and collections."""

import inspect
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.meta_graph import leave_out
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.bridge.refusals import is_called_from
from sok_lite.bridge.saveable import TableSaveable
from sok_lite.bridge.tf_private import SAVER, WHOLE
from sok_lite.dynamic_embedding import file_system, lookups
from sok_lite.dynamic_embedding.arguments import DtypeError, checked_dtypes, checked_keys
from sok_lite.dynamic_embedding.creators import CuckooHashTableCreator, KVCreator
from sok_lite.dynamic_embedding.partition import (
    Partitioner,
    default_partition_fn,
    owner_rule,
    partition_keys,
)
from sok_lite.dynamic_embedding.ranks import refuse_parameter_servers
from sok_lite.dynamic_embedding.restrict_policies import RestrictPolicy
from sok_lite.dynamic_embedding.saved_by_tfra import LISTED, ShardsOfTfra, check_name
from sok_lite.dynamic_embedding.savers import FileSystemSaver, VariableFiles
from sok_lite.dynamic_embedding.slots import SlotVariable, slots_of
from sok_lite.dynamic_embedding.tables import RowOptions
from sok_lite.dynamic_embedding.trainable import ShadowVariable
from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.dtypes import key_dtype as engine_key_dtype
from sok_lite.engine.files.key_value_files import BUFFER_SIZE

__all__ = ["Variable"]

_TRAINABLE = (tf.float32, tf.float16, tf.bfloat16, tf.float64)


@unconverted
class Variable(tf.__internal__.tracking.Trackable):
    """Embeddings by key: rows of `dim` values, in a table that grows with its keys.

    Lookups never insert; `upsert`, `accum` and training do. A missing key returns its initial
    value, a function of the variable's name and the key; training then inserts exactly that row.

    All shards lie in one table on the device of the process, the GPU if there is one. `devices`
    sets the number of shards, and the partitioner assigns keys to them. On several ranks each rank
    has its own table, except where a layer or function looks up on all ranks
    (`HvdAllToAllEmbedding`): there the partitioner assigns the owner rank. Methods that write
    return None in eager mode, the operation in a graph. Keys of another dtype raise a TypeError
    that is also a ValueError. The argument `name` of methods has no effect.

    Args:
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: tf.float32, float16, bfloat16 or float64, which are trainable (a step computes in
        float32 and rounds float64 rows to it); int32, int64 or int8, which are not.
      dim: elements of a row.
      devices: one name per shard; None: one shard. No parameter servers that several workers share:
        each would have its own table.
      partitioner: maps keys (n,) and the number of shards to the shard of each key, (n,) int32;
        always the same for a key.
      shared_name: not used.
      name: of the variable; also seeds random initial values.
      initializer: initial value of a row: a number, an array of `dim`, an initializer of Keras or
        TensorFlow, or a function that returns one of these; None: 0.
      trainable: whether gradients are computed.
      checkpoint: whether checkpoints include the variable.
      init_size: keys to reserve memory for, in all shards together; 0: the environment variable
        TF_HASHTABLE_INIT_SIZE, else 8,192 per shard.
      kv_creator: creates the table; None: `CuckooHashTableCreator()`.
      restrict_policy: a class that chooses the keys for `restrict` to remove.
      bp_v2: no effect: an update always changes the current row, atomically, so two workers that
        train one key both count.
      short_file_name: whether `get_variable` leaves variable scopes out of the name.
      row_shape: (fan_in, fan_out) for Glorot, He, Lecun and VarianceScaling. TFRA uses the keys of
        a lookup as fan_in; None: (dim, dim), with a warning on what TFRA would draw.

    Attributes: all arguments, or their defaults; `shard_num`, the number of shards.

    Raises:
      TypeError: an unsupported dtype (also a ValueError), or an argument of a wrong type.
      ValueError: `dim` or `init_size` out of range, an initializer that needs a matrix, an invalid
        `row_shape`, or string keys with a `FileSystemSaver`.
      NotImplementedError: `devices` of a job with several workers.
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
        self.devices = device_names(devices)
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
        """Returns what a TF1 saver saves if its list has the variable itself.

        NotImplementedError: its rows are elsewhere, and it has nothing to save.
        """
        if not (self.checkpoint and is_called_from(SAVER)):
            return {}
        if not self.rows.checkpoint:
            raise NotImplementedError(
                f"A Saver cannot save {self.name!r}. {self.rows.instead_of_save} Leave it out of "
                "the variables of the Saver, or make it with checkpoint=False."
            )
        # The name it has if a saver gets no list.
        name = self.name if tf.executing_eagerly() else self.rows.op.name
        return {WHOLE: lambda named=name: TableSaveable(self.rows, named)}

    def _checkpoint_adapter(self, path: str) -> None:
        """Remembers the path of the checkpoint being restored."""
        self._restored_from = path

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        """Returns a child in a checkpoint: a TFRA variable's tables, whose name must match."""
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
        """The tables of the shards: the only one, or a view of each shard."""
        if self.shard_num == 1:
            return [self.rows]
        return [Shard(self, index) for index in range(self.shard_num)]

    @property
    def restrict_policy(self) -> RestrictPolicy | None:
        """The policy of this variable, or None."""
        return self._restrict_policy

    @property
    def trainable_store(self) -> dict[str, ShadowVariable]:
        """The eager trainables by name."""
        return self._trainables

    _trainable_store = trainable_store

    @property
    def tables_held(self) -> list[Any]:
        """Tables that Keras would miss in a model that holds the variable."""
        policy = self._restrict_policy
        return [self.rows] + ([] if policy is None else policy.status.tables_held)

    @property
    def is_differentiable(self) -> bool:
        """Whether its values can be trained."""
        return self.value_dtype in _TRAINABLE

    @property
    def is_pooled(self) -> bool:
        """Whether the table combines rows itself."""
        return self.is_differentiable and self.rows.table.all_ranks_refusal is None

    def keys_of(self, keys: Any, remember: bool = False) -> tf.Tensor:
        """Returns keys of any shape as the table's integers, after checking the partitioner's
        shards.
        """
        return self.rows.keys_of(self._checked_keys(keys), remember)

    def shards_of(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the shard of each key of any shape, (number of keys,) int32."""
        return partition_keys(self.partition_fn, tf.reshape(keys, [-1]), self.shard_num)

    def _checked_keys(self, keys: Any) -> tf.Tensor:
        """Returns keys as a tensor, after asking the partitioner."""
        keys = checked_keys(keys, self.key_dtype, self.name)
        if self.shard_num > 1 or self.partition_fn is not default_partition_fn:
            self.shards_of(keys)
        return keys

    def _with_status(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the rows and of the policy's status."""
        policy = self.restrict_policy
        return None if policy is None else getattr(policy.status, method)(*arguments)

    # ---------------------------------------------------------------- public methods

    def upsert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Sets the rows of keys, inserting new ones. The last row of a repeated key wins.

        Args:
          keys: of any shape and the variable's key dtype.
          values: keys.shape + [dim]; another shape raises tf.errors.InvalidArgumentError that is
            also a ValueError.
        """
        return self.rows.insert(self._checked_keys(keys), values)

    def accum(
        self, keys: Any, old_values: Any, new_values: Any, exists: Any, name: str | None = None
    ) -> Any:
        """Adds `new_values - old_values` to the rows of keys, or inserts `new_values`.

        If `exists` and the table agree at the start of the call, an existing key gets the
        difference added, and a missing one is inserted. Other keys are skipped: someone else
        inserted or removed them. Differences of a repeated key are summed; on insertion the first
        row wins. Errors as for `upsert`.

        Args:
          keys: of any shape and the variable's key dtype.
          old_values, new_values: keys.shape + [dim].
          exists: bool per key.
        """
        return self.rows.accum_difference(self._checked_keys(keys), old_values, new_values, exists)

    def lookup(self, keys: Any, return_exists: bool = False, name: str | None = None) -> Any:
        """Returns the rows of keys, keys.shape + [dim], without a gradient. It changes nothing.

        Args:
          keys: of any shape and the variable's key dtype.
          return_exists: whether to also return which keys are in the table, bool of the keys'
            shape.
        """
        return self.rows.lookup(self._checked_keys(keys), return_exists=return_exists)

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys with their rows and optimizer states; missing keys are ignored."""
        keys = self._checked_keys(keys)
        return _both(self.rows.remove(keys), self._with_status("remove", keys))

    def clear(self, name: str | None = None) -> Any:
        """Removes all keys."""
        return _both(self.rows.clear(), self._with_status("clear"))

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys (n,) and their rows (n, dim), ordered by shard."""
        keys, values = self.rows.export()
        if self.shard_num == 1:
            return keys, values
        order = tf.argsort(self.shards_of(keys), stable=True)
        return tf.gather(keys, order), tf.gather(values, order)

    def size(self, index: int | None = None, name: str | None = None) -> tf.Tensor:
        """Returns the number of keys, scalar int64.

        Args:
          index: of a shard to count, which scans all keys; None: all.

        Raises:
          IndexError: there is no such shard.
        """
        return self.rows.size() if index is None else self.tables[index].size()

    def embedding_lookup(
        self,
        ids: Any,
        name: str | None = None,
        max_norm: float | None = None,
        return_trainable: bool = False,
    ) -> Any:
        """Returns the rows of keys, ids.shape + [dim]; with `return_trainable` (rows, trainable).

        The trainable is `<name>/embedding_lookup`. Arguments as for `de.embedding_lookup`.
        """
        name = f"{name or self.name}/embedding_lookup"
        return lookups.embedding_lookup(
            self, ids, name=name, max_norm=max_norm, return_trainable=return_trainable
        )

    def verify_embedding_weights(self, sparse_ids: Any, sparse_weights: Any = None) -> None:
        """Raises ValueError or TypeError unless keys and weights can be looked up."""
        if sparse_ids is None:
            raise ValueError("`sparse_ids` must be given. Received: None.")
        if sparse_ids.dtype != self.key_dtype:
            raise DtypeError(
                f"Keys of {self.name!r} must be {self.key_dtype.name}. "
                f"Received: {sparse_ids.dtype.name}."
            )
        if sparse_weights is not None and not sparse_weights.dtype.is_floating:
            raise DtypeError(
                f"Weights must be floating-point numbers. Received: {sparse_weights.dtype.name}."
            )

    def get_trainable_by_name(self, name: str) -> ShadowVariable:
        """Returns the trainable of lookups of that name, making it if needed.

        Raises:
          TypeError: the name is not a string.
          RuntimeError: in a TF1 graph.
        """
        if not isinstance(name, str):
            raise TypeError(f"name should be a string. Received: {name!r}.")
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    "get_trainable_by_name() is for eager mode. In a graph of TF1 use "
                    "de.embedding_lookup(..., return_trainable=True)."
                )
        return self.find_trainable([name])

    get_eager_trainable_by_name = get_trainable_by_name

    def restrict(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes all keys but those the policy keeps, with their states and status.

        Args:
          num_reserved: keys to keep.
          **kwargs: of the policy's `apply_restriction`, such as `trigger`.

        Returns:
          The operation in a graph; None in eager mode, or without a policy, which logs a warning.
        """
        if self._restrict_policy is None:
            tf.get_logger().warning(
                f"restrict() of {self.name!r} does nothing: the variable has no restrict_policy."
            )
            return None
        return self._restrict_policy.apply_restriction(num_reserved, **kwargs)

    def get_slot_variables(self, optimizer: Any) -> list[SlotVariable]:
        """Returns an optimizer's states of the rows, as views by name; [] before it trained any.

        Args:
          optimizer: of Keras, tf_keras or tf.compat.v1.train; else a TypeError is raised.
        """
        family_of(optimizer)
        return slots_of(self, optimizer)

    def find_trainable(self, names: Sequence[str]) -> ShadowVariable:
        """Returns the trainable that has one of the names; it then has all of them."""
        with self._naming:
            found = next((self._trainables[n] for n in names if n in self._trainables), None)
            found = ShadowVariable(self, names[0]) if found is None else found
            for name in names:
                self._trainables.setdefault(name, found)
        return found

    def export_keys_and_scores(
        self, split_size: int, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns keys (n,) and scores (n,) int64 of an `HkvHashTable`; TypeError for others."""
        if not hasattr(self.rows, "export_keys_and_scores"):
            raise TypeError(
                f"{self.name!r} keeps no scores. Make it with kv_creator=de.HkvHashTableCreator(). "
                f"Received: a {type(self.kv_creator).__name__}."
            )
        return self.rows.export_keys_and_scores(split_size)

    def save_to_file_system(
        self,
        dirpath: Any,
        proc_size: int = 1,
        proc_rank: int = 0,
        file_name_list: Sequence[str] | None = None,
        dirpath_env: str | None = "TFRA_SAVED_KV",
        append_to_file: bool = False,
        buffer_size: int = BUFFER_SIZE,
        name: str | None = None,
    ) -> Any:
        """Writes keys and rows to files: two per shard, and a third that describes them.

        Optimizer states and scores are not included.

        Args:
          dirpath: the folder, or a string tensor; created if missing.
          proc_size, proc_rank: number of saving processes, and of this one.
          file_name_list: names without endings, one per shard; None: those that loading looks for.
          dirpath_env: environment variable that overrides `dirpath`.
          append_to_file: append to existing files.
          buffer_size: keys per write.

        Raises:
          ValueError: (in a graph TensorFlow's InvalidArgumentError) string keys, which such files
            cannot hold, a rank out of range, or several processes save a table in Redis.
        """
        return file_system.save(
            self,
            dirpath,
            proc_size,
            proc_rank,
            file_name_list,
            dirpath_env,
            append_to_file,
            buffer_size,
        )

    def load_from_file_system(
        self,
        dirpath: Any,
        proc_size: int = 1,
        proc_rank: int = 0,
        file_name_list: Sequence[str] | None = None,
        dirpath_env: str | None = "TFRA_SAVED_KV",
        load_entire_dir: bool = False,
        buffer_size: int = BUFFER_SIZE,
        name: str | None = None,
    ) -> Any:
        """Loads files into the variable, replacing its content; optimizer states start fresh.

        `dirpath`, `dirpath_env` and `buffer_size` are as for `save_to_file_system`. All files are
        checked before anything changes. The number of shards that wrote them does not matter.

        Args:
          proc_size, proc_rank: load the files of process `proc_rank` of `proc_size`.
          file_name_list: any number of names without endings instead; another variable may have
            written them.
          load_entire_dir: load the files of all processes of one save instead: of the variable, or
            of those whose shards are listed.

        Raises:
          FileNotFoundError: files are missing.
          ValueError: files of another variable, of another type or dim, or corrupt.
        """
        return file_system.load(
            self,
            dirpath,
            proc_size,
            proc_rank,
            file_name_list,
            dirpath_env,
            load_entire_dir,
            buffer_size,
        )

    def load_from_file_system_with_restore_function(
        self,
        dirpath: Any,
        proc_size: int = 1,
        proc_rank: int = 0,
        buffer_size: int = BUFFER_SIZE,
    ) -> Any:
        """Replaces the variable's content by its part of the files of any number of processes.

        Arguments and errors as for `load_from_file_system`. If `proc_size` processes wrote them, it
        loads the files of this one. Otherwise it reads all files and takes the keys that the
        partitioner assigns to this process.

        Args:
          proc_size, proc_rank: number of loading processes, and of this one.
        """
        return file_system.load_spread(self, dirpath, proc_size, proc_rank, buffer_size)


def device_names(devices: str | Sequence[str] | None) -> list[str]:
    """Returns one name per shard from the argument `devices`."""
    if devices is None:
        return ["/CPU:0" if get_backend().name == "cpu" else "/GPU:0"]
    if not isinstance(devices, Iterable):
        raise TypeError(
            "`devices` must be a name, or a list with one for each shard. "
            f"Received: devices={devices!r}."
        )
    device_names = [devices] if isinstance(devices, str) else list(devices)
    if not device_names:
        raise ValueError("`devices` must have one name for each shard. Received: [].")
    return device_names


def _both(*operations: Any) -> Any:
    """Groups several operations of a graph into one; None in eager mode."""
    present = [operation for operation in operations if operation is not None]
    return tf.group(*present) if len(present) > 1 else next(iter(present), None)


def _refuse_as_tensor(variable: Variable, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        f"{variable.name!r} is a de.Variable, whose rows are found by key: it is no tensor. Look "
        "rows up with de.embedding_lookup(variable, ids, name=name). Give what looks rows up in "
        "its weights, such as tf.nn.sampled_softmax_loss, variable.get_trainable_by_name(name)."
    )


tf.register_tensor_conversion_function(Variable, _refuse_as_tensor, priority=10)


# ---- shards --------------------------------------------------------------------------------------


@unconverted
class Shard(tf.__internal__.tracking.Trackable):
    """A view of one shard; all lie in one table, which savers and checkpoints save once."""

    def __init__(self, variable: Any, index: int) -> None:
        self._variable = variable
        self.index = index
        self.name = f"{variable.name}_{index + 1}of{variable.shard_num}"
        self.key_dtype, self.value_dtype = variable.key_dtype, variable.value_dtype
        self.device = variable.devices[index]
        if variable.checkpoint:
            self._track_trackable(variable.rows, "rows")

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return self._variable._gather_saveables_for_checkpoint()

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the shard's keys (n,) and their rows (n, dim)."""
        keys, values = self._variable.rows.export()
        is_here = tf.equal(self._variable.shards_of(keys), self.index)
        return tf.boolean_mask(keys, is_here), tf.boolean_mask(values, is_here)

    def size(self, name: str | None = None) -> tf.Tensor:
        """Returns the shard's number of keys, scalar int64, scanning all keys."""
        return tf.size(self.export()[0], tf.int64)

    def lookup(
        self,
        keys: Any,
        dynamic_default_values: Any = None,
        return_exists: bool = False,
        name: str | None = None,
    ) -> Any:
        """Returns the rows of keys of any shape, keys.shape + [dim]; it changes nothing."""
        return self._variable.rows.lookup(keys, dynamic_default_values, return_exists)

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Sets the rows of keys, inserting new ones, in the shards of the partitioner."""
        return self._variable.upsert(keys, values)

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """Adds to the rows of keys that the caller found, and inserts the others."""
        return self._variable.rows.accum(keys, values_or_deltas, exists)

    def clear(self, name: str | None = None) -> Any:
        """Removes the keys of the shard."""
        return self._variable.remove(self.export()[0])

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys with rows and optimizer states; missing keys are ignored."""
        return self._variable.remove(keys)

    save_to_file_system = file_system.save_table
    load_from_file_system = file_system.load_table

    @property
    def saved_as(self) -> tuple[Any, int | None]:
        """The owner of the files for its methods, and the number of the shard."""
        return self._variable, self.index


# ---- collections of a TF1 graph ------------------------------------------------------------------


class GraphKeys:
    """Names of the TF1 graph collections of variables."""

    DYNAMIC_EMBEDDING_VARIABLES = "dynamic_embedding_variables"
    TRAINABLE_DYNAMIC_EMBEDDING_VARIABLES = "trainable_dynamic_embedding_variables"


leave_out(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES)
leave_out(GraphKeys.TRAINABLE_DYNAMIC_EMBEDDING_VARIABLES)


def add_to_graph(variable: Any) -> None:
    """Adds a variable to the collections of the graph."""
    tf.compat.v1.add_to_collection(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES, variable)
    if variable.trainable:
        tf.compat.v1.add_to_collection(GraphKeys.TRAINABLE_DYNAMIC_EMBEDDING_VARIABLES, variable)


def find_in_graph(name: str) -> Any:
    """Returns the graph's variable of a name, or None."""
    variables = tf.compat.v1.get_collection(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES)
    return next((variable for variable in variables if variable.name == name), None)
