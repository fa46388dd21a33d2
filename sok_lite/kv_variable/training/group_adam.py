"""Adam and group Adam with TFPlus' signatures."""

import numbers
from typing import Any

import tensorflow as tf

from sok_lite.bridge.checks import checked_strength


class GroupAdamOptimizer(tf.compat.v1.train.AdamOptimizer):
    """Adam with a sparse group lasso on table rows. Dense variables get plain Adam.

    Without penalties it is Adam for the rows that have a gradient, whatever step a row first
    appears in. Penalties are multiplied by the step's learning rate.

    Args:
      learning_rate: a number, a tensor or a callable.
      initial_accumulator_value: >= 0; only version 1 used it.
      beta1, beta2, epsilon, use_locking, name: of `tf.compat.v1.train.AdamOptimizer`.
      l1_regularization_strength: per element; sets single elements to 0.
      l2_regularization_strength: of squared elements.
      l21_regularization_strength: of the row norm times the root of the dimension; sets whole rows
        to 0.
      accum_name, linear_name: not used: states are stored with the rows, named by `get_slot_names`.
      version: 4, or 3 with a constant learning rate, which is equivalent.

    Raises:
      TypeError, ValueError: a strength is not a finite number >= 0, or TFPlus has no such version.
      NotImplementedError: version 1 or 2, or 3 with a variable learning rate.
    """

    def __init__(
        self,
        learning_rate: Any,
        initial_accumulator_value: float = 0.0,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l21_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "GroupAdam",
        accum_name: str | None = None,
        linear_name: str | None = None,
        version: int = 4,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        checked_strength(self, "initial_accumulator_value", initial_accumulator_value)
        strengths = {
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
        }
        for argument, strength in strengths.items():
            setattr(self, f"_{argument}", checked_strength(self, argument, strength))
        self.l21_regularization_strength = checked_strength(
            self, "l21_regularization_strength", l21_regularization_strength
        )
        check_version(self, version, (1, 2, 3, 4))
        if version < 3:
            raise NotImplementedError(
                f"GroupAdamOptimizer has versions 3 and 4. Received: version={version}. Its "
                "formulas are others: train with version=4."
            )
        if version == 3 and not isinstance(learning_rate, numbers.Real):
            # Its z lacks the learning rate, so each change of the rate moves whole rows.
            raise NotImplementedError(
                "GroupAdamOptimizer with version=3 must have a learning rate that is a number: it "
                "is version 4 only where the rate never changes. Received: "
                f"{type(learning_rate).__name__}. Use version=4."
            )


class AdamOptimizer(tf.compat.v1.train.AdamOptimizer):
    """Adam. Only table rows that have a gradient change.

    Args:
      learning_rate, beta1, beta2, epsilon, use_locking, name: of
        `tf.compat.v1.train.AdamOptimizer`.
      version: 1 or 2: where TFPlus stores states; no effect here.

    Raises:
      ValueError: another version.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        version: int = 1,
    ) -> None:
        check_version(self, version, (1, 2))
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)


def check_version(optimizer: Any, version: Any, known: tuple[int, ...]) -> None:
    """Raises ValueError for a version that TFPlus does not have."""
    if isinstance(version, bool) or version not in known:
        raise ValueError(
            f"`version` of {type(optimizer).__name__} must be one of {known}. "
            f"Received: version={version!r}."
        )
