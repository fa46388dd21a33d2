"""Dense weights and optimizers of a Keras model, in a file beside its tables."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from sok_lite.bridge import stored
from sok_lite.bridge.keras import held
from sok_lite.bridge.optimizers.fallback_step import CarriedState, carried_by
from sok_lite.bridge.optimizers.loss_scale import inner_of
from sok_lite.bridge.optimizers.wrapped import WrappedOptimizer
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.files.disk import explain_full_disk, read_arrays, sync_path

_OF_ALL = "of_all_ranks.npz"
_CARRIED = "carried_"  # and the optimizer's number; older files have none

# Values read: tensors of the variables, and the `carried` states of each optimizer.
Values: TypeAlias = tuple[list[tf.Tensor], list[dict[str, np.ndarray]]]


class DenseStates(NamedTuple):
    """The variables of a model that are not table rows."""

    of_all: list[Any]  # trained weights and optimizer variables, the same on all ranks
    of_rank: list[Any]  # such as moving averages and random states, per rank
    carried: list[CarriedState]  # per rank, of optimizers without an update rule

    @property
    def kinds(self) -> list[list[str]]:
        """Dtypes and shapes of the variables, in order."""
        return [
            [f"{_dtype(v).name}{list(v.shape)}" for v in variables]
            for variables in (self.of_all, self.of_rank)
        ]

    @staticmethod
    def of(model: Any, what: str) -> "DenseStates":
        """Returns the states of a model, and builds its optimizers. ValueError: it is not built."""
        if not model.built:  # a layer that is never called has no weights
            raise ValueError(
                f"{what} needs a model that is built. Received: {model.name!r}, which is not. Call "
                "it on a batch first, or give it a keras.Input."
            )
        optimizers = {id(each): each for each in (model.optimizer, *held.optimizers_in(model))}
        trained = list(model.trainable_weights)
        alone = {id(table.own_optimizer) for table in held.kept_tables(model)}
        variables = [*trained]
        for number, optimizer in optimizers.items():
            variables += _variables_of(optimizer, [] if number in alone else trained)
        of_all = _dense(variables, [])
        metrics = [variable for metric in model.metrics for variable in metric.variables]
        carried = [carried_by(_inner(each)) for each in optimizers.values() if each is not None]
        return DenseStates(of_all, _dense(model.variables, [*of_all, *metrics]), carried)

    def write(self, folder: str, rank: int, size: int) -> None:
        """Writes this rank's file, and on rank 0 the shared one, synced to disk; raises OSError."""
        os.makedirs(folder, exist_ok=True)
        _write(os.path.join(folder, _rank_file(rank, size)), self.of_rank, self.carried)
        if rank == 0:
            _write(os.path.join(folder, _OF_ALL), self.of_all)
        sync_path(folder)

    def read(self, folder: str, rank: int, size: int) -> Values:
        """Returns the written values, rank 0's if the number of ranks changed. ValueError: another
        model.
        """
        own = os.path.join(folder, _rank_file(rank, size))
        if not os.path.exists(own):
            (own,) = (
                os.path.join(folder, name)
                for name in os.listdir(folder)
                if name.startswith("of_rank_0_of_")
            )
        of_all = _read_file(os.path.join(folder, _OF_ALL), self.of_all)
        of_rank = _read_file(own, self.of_rank)
        return [*of_all, *of_rank], _read_carried(own, len(self.carried))

    def assign(self, values: Values) -> None:
        """Assigns read values to the variables."""
        tensors, carried = values
        for variable, tensor in zip([*self.of_all, *self.of_rank], tensors, strict=True):
            variable.assign(tensor)
        for state, numbers in zip(self.carried, carried, strict=True):
            state.values = numbers


def learning_rates(model: Any) -> list[float | None]:
    """Returns the learning rate of each optimizer; None: without one, or with a schedule."""
    optimizers = [_inner(each) for each in held.optimizers_in(model)]
    rates = [each.get_config().get("learning_rate") for each in optimizers]
    return [float(rate) if isinstance(rate, (float, np.floating)) else None for rate in rates]


def _rank_file(rank: int, size: int) -> str:
    return f"of_rank_{rank}_of_{size}.npz"


def _inner(optimizer: Any) -> Any:
    return inner_of(optimizer.optimizer if isinstance(optimizer, WrappedOptimizer) else optimizer)


def _variables_of(optimizer: Any, trained: list[Any]) -> list[Any]:
    """Returns the variables of an optimizer, built for the variables that it trains."""
    if optimizer is None:
        return []
    if isinstance(optimizer, WrappedOptimizer):
        return [optimizer.iterations, *_variables_of(optimizer.optimizer, trained)]
    if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
        optimizer.build(trained)
    return held.variables_of(optimizer)


def _dense(variables: Sequence[Any], without: Sequence[Any]) -> list[Any]:
    """Returns the variables that are not tables, each once."""
    left_out, found = {id(each) for each in without}, {}
    for variable in variables:
        if not isinstance(variable, TableVariable) and id(variable) not in left_out:
            found[id(variable)] = variable
    return list(found.values())


def _dtype(variable: Any) -> tf.DType:
    return tf.as_dtype(variable.dtype)


def _write(path: str, variables: Sequence[Any], carried: Sequence[CarriedState] = ()) -> None:
    arrays: dict[str, np.ndarray] = {}
    tensors = {str(i): tf.convert_to_tensor(variable) for i, variable in enumerate(variables)}
    stored.write_tensors(arrays, tensors)
    for i, state in enumerate(carried):
        if state.values:
            arrays[f"{_CARRIED}{i}"] = np.frombuffer(state.serialize(), np.uint8)
    num_bytes = sum(array.nbytes for array in arrays.values())
    with explain_full_disk(path, "the dense weights", num_bytes), open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def _read_file(path: str, variables: Sequence[Any]) -> list[tf.Tensor]:
    arrays = read_arrays(path)
    dtypes = {str(i): _dtype(variable) for i, variable in enumerate(variables)}
    if {name for name in arrays if not name.startswith(_CARRIED)} == set(dtypes):
        found = list(stored.read_tensors(arrays, dtypes, path).values())
        if all(each.shape == v.shape for each, v in zip(found, variables, strict=True)):
            return found
    shapes = [list(array.shape) for array in arrays.values()]
    raise ValueError(
        f"The model must be as it was when {path} was written: {len(shapes)} variables of shapes "
        f"{shapes}. Received: {len(variables)}, of {[list(each.shape) for each in variables]}. "
        "Nothing was restored. Make the same model and optimizer, or give another path."
    )


def _read_carried(path: str, count: int) -> list[dict[str, np.ndarray]]:
    """Returns the carried states of `count` optimizers; empty if it never took such a step."""
    arrays = read_arrays(path)
    names = [f"{_CARRIED}{i}" for i in range(count)]
    return [CarriedState.read(arrays[name].tobytes()) if name in arrays else {} for name in names]
