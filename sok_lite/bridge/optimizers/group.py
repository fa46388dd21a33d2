"""Keras 3 optimizers with a sparse group lasso on rows of tables; the engine has the rules.

The penalties act on rows of dynamic tables. Dense variables, including static tables, are updated
by the parent, an optimizer of Keras, without penalties, except that SparseGroupFtrl's l1 and l2,
which Ftrl has too, act on both.

There is no GroupAdaHessian: its step needs the diagonal of the Hessian, which gradients lack.
"""

from typing import Any

import keras

from sok_lite.bridge.checks import checked_strength

# Missing in the first versions of Keras 3.
_Lamb: Any = getattr(keras.optimizers, "Lamb", None)
_register = keras.saving.register_keras_serializable(package="sok_lite")


def _strength(optimizer: Any, name: str, value: Any) -> float:
    return checked_strength(optimizer, f"{name}_regularization_strength", value)


class _Penalties:
    """Base of the classes below: penalty strengths as arguments of a Keras optimizer."""

    def __init__(
        self,
        *args: Any,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l21_regularization_strength: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.l1_regularization_strength = _strength(self, "l1", l1_regularization_strength)
        self.l2_regularization_strength = _strength(self, "l2", l2_regularization_strength)
        self.l21_regularization_strength = _strength(self, "l21", l21_regularization_strength)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        for name in ("l1", "l2", "l21"):
            config[f"{name}_regularization_strength"] = getattr(
                self, f"{name}_regularization_strength"
            )
        return config


@_register
class GroupAdam(_Penalties, keras.optimizers.Adam):
    """Adam that sets whole rows of tables to exactly 0 if their gradients do not justify more.

    TFPlus' GroupAdam (version 4). Without penalties it is Adam for the rows that have a gradient.
    The penalties are multiplied by the learning rate of a step, also a schedule's: as it falls,
    rows at 0 come back with their next gradient.

    Args:
      *args: of `keras.optimizers.Adam`, from `learning_rate` on.
      l1_regularization_strength: on every element of a row: sets single ones to 0.
      l2_regularization_strength: on the squares of a row's elements.
      l21_regularization_strength: on the norm of a row, times the root of its dimension: sets whole
        rows to 0.
      **kwargs: of `keras.optimizers.Adam`; with `amsgrad=True` it is GroupAMSGrad.

    Raises:
      TypeError, ValueError: a strength is not a number, negative or infinite.
    """


@_register
class GroupAMSGrad(_Penalties, keras.optimizers.Adam):
    """AMSGrad that sets whole rows of tables to exactly 0.

    Args:
      *args: of `keras.optimizers.Adam`, from `learning_rate` on; `amsgrad` is True.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: as in
        GroupAdam.
      **kwargs: of `keras.optimizers.Adam`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not kwargs.setdefault("amsgrad", True):
            raise ValueError(
                "`amsgrad` of GroupAMSGrad must be True. Received: False. Use GroupAdam."
            )
        super().__init__(*args, **kwargs)


@_register
class GroupMomentum(_Penalties, keras.optimizers.SGD):
    """SGD with momentum that sets whole rows of tables to exactly 0.

    Args:
      learning_rate: a number or a schedule; 0.01 by default.
      momentum: in [0, 1].
      *args: of `keras.optimizers.SGD`, from `nesterov` on.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: as in
        GroupAdam.
      **kwargs: of `keras.optimizers.SGD`.
    """

    def __init__(
        self, learning_rate: Any = 0.01, momentum: float = 0.9, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(learning_rate, momentum, *args, **kwargs)


@_register
class SparseGroupFtrl(_Penalties, keras.optimizers.Ftrl):
    """Ftrl that sets whole rows of tables to exactly 0: TFPlus' "Group Adagrad".

    Without the penalty on norms it is Ftrl.

    Args:
      *args: of `keras.optimizers.Ftrl`, from `learning_rate` to `initial_accumulator_value`.
      l1_regularization_strength, l2_regularization_strength: as in Ftrl, also on dense variables.
      l21_regularization_strength: on the norm of a row, times the root of its dimension.
      **kwargs: of `keras.optimizers.Ftrl`.
    """

    def __init__(
        self,
        *args: Any,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l21_regularization_strength: float = 0.0,
        **kwargs: Any,
    ) -> None:
        # Skips _Penalties: the parent has l1 and l2 itself.
        super(_Penalties, self).__init__(
            *args,
            l1_regularization_strength=_strength(self, "l1", l1_regularization_strength),
            l2_regularization_strength=_strength(self, "l2", l2_regularization_strength),
            **kwargs,
        )
        self.l21_regularization_strength = _strength(self, "l21", l21_regularization_strength)


@_register
class GroupLamb(_Penalties, _Lamb or keras.optimizers.Optimizer):  # type: ignore[misc]
    """LAMB of each row by itself, which sets whole rows of tables to exactly 0.

    The length of a row's step depends on the row's norm, not on that of the whole table.

    Args:
      *args: of `keras.optimizers.Lamb`, from `learning_rate` on.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: as in
        GroupAdam.
      **kwargs: of `keras.optimizers.Lamb`.

    Raises:
      NotImplementedError: Keras is too old to have a Lamb for dense variables.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _Lamb is None:
            raise NotImplementedError(
                f"GroupLamb updates dense variables by keras.optimizers.Lamb, which Keras "
                f"{keras.__version__} does not have. Install a newer Keras, or use GroupAdam."
            )
        super().__init__(*args, **kwargs)
