"""The update rule of a TensorFlow or Keras optimizer, and its hyperparameters.

Four families of optimizers share names but not names of settings; each has its own file.
"""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.family import FallbackStep, Family, Settings
from sok_lite.bridge.optimizers.keras3 import KERAS3, TF_KERAS, counts_batches, num_batches
from sok_lite.bridge.optimizers.legacy import LEGACY
from sok_lite.bridge.optimizers.v1 import V1


class NotForRowsError(NotImplementedError):
    """The step of an optimizer has no meaning for rows of tables; `why` includes the advice."""

    def __init__(self, optimizer: str, why: str, rows: str = "rows of tables") -> None:
        super().__init__(f"{optimizer} cannot update {rows}: {why}.")
        self._optimizer, self._why = optimizer, why

    def of(self, tables: str) -> "NotForRowsError":
        """Returns the error with the names of the tables, such as "table 'item'"."""
        return NotForRowsError(self._optimizer, self._why, f"rows of {tables}")


def family_of(optimizer: Any) -> Family:
    """Returns the family of an optimizer, or raises TypeError."""
    modules = {(base.__module__.split(".")[0], base.__name__) for base in type(optimizer).__mro__}
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return V1
    if ("keras", "BaseOptimizer") in modules:
        return KERAS3
    if ("tf_keras", "OptimizerV2") in modules:
        return LEGACY
    if ("tf_keras", "_BaseOptimizer") in modules:
        return TF_KERAS
    raise TypeError(
        "`optimizer` must be a Keras 3, tf_keras or tf.compat.v1.train optimizer. "
        f"Received: {type(optimizer).__module__}.{type(optimizer).__name__}."
    )


def settings_of(optimizer: Any, family: Family) -> Settings | FallbackStep:
    """Returns the rule of an optimizer and its settings, except the learning rate.

    A FallbackStep if no rule is known for it. Raises NotImplementedError for a setting that cannot
    be applied row by row, NotForRowsError for such a class.
    """
    name = _class_name(optimizer, family)
    refuse_unsupported(optimizer)
    decay = getattr(optimizer, "weight_decay", None) if family.has_decay else None
    has_decay = decay is not None and decay is not False
    if name is None:
        _refuse_own_clipping(optimizer)
        own = FallbackStep(optimizer, family, family.numbers(optimizer))
        return own._replace(decays=optimizer._use_weight_decay) if has_decay else own
    settings = family.settings[name](optimizer)
    if not has_decay:
        return settings
    numbers = settings.numbers | {"weight_decay": decay}
    return settings._replace(numbers=numbers, decays=optimizer._use_weight_decay)


_LIMITS = ("clipvalue", "clipnorm", "global_clipnorm")


def _refuse_own_clipping(optimizer: Any) -> None:
    """Raises if an optimizer clips by code of its own, which tables could not follow."""
    clip = getattr(type(optimizer), "_clip_gradients", None)
    is_own = clip is not None and clip.__module__.split(".")[0] not in _FRAMEWORKS
    if is_own and any(getattr(optimizer, name, None) is not None for name in _LIMITS):
        raise NotImplementedError(
            f"{type(optimizer).__name__} clips in a way of its own, and tables would be clipped as "
            f"Keras does. Leave {', '.join(_LIMITS)} out, or clip the gradients yourself."
        )


# The packages whose class names the families know.
_FRAMEWORKS = {"keras", "sok_lite", "tf_keras", "tensorflow"}
_ROW_BY_ROW = "and a table changes row by row. Use Adam, or another that docs/optimizers.md lists"
_SKIPS = "whether it skips a step is decided inside it. Wrap a LossScaleOptimizer of Keras itself"
# Classes without a meaning for rows of tables.
_NOT_FOR_ROWS = {
    "LossScaleOptimizer": _SKIPS,
    "MixedPrecisionLossScaleOptimizer": _SKIPS,
    "Lamb": f"its step needs the norms of a whole variable and its gradient, {_ROW_BY_ROW}",
    "Adafactor": f"its states are means over the rows of a whole variable, {_ROW_BY_ROW}",
    "Muon": f"its step makes the gradient of a whole matrix orthogonal, {_ROW_BY_ROW}",
    "MultiOptimizer": "which optimizer a variable has is known inside it alone. Wrap each of its "
    "optimizers, and give each wrapper its variables",
    "SyncReplicasOptimizer": "its gradients wait at parameter servers for those of all workers",
}


def _class_name(optimizer: Any, family: Family) -> str | None:
    """Returns the class name of the rule; None: the optimizer takes its step itself.

    A subclass that changes nothing has the rule of its base class.
    """
    is_own = False
    for base in type(optimizer).__mro__:
        module = base.__module__.split(".")[0]
        if module in _FRAMEWORKS:
            if base.__name__ in family.settings and not is_own:
                return base.__name__
            if module == "sok_lite":
                raise NotImplementedError(
                    f"{type(optimizer).__name__} changes {base.__name__}, whose penalties only the "
                    "update rule of rows has. Use the class itself."
                )
            break
        changed = [
            name for name in vars(base) if name not in _OF_ANY_CLASS and not name.startswith("__")
        ]
        is_own |= bool(changed) and module != "horovod"
    for base in type(optimizer).__mro__:
        if base.__module__.split(".")[0] in _FRAMEWORKS and base.__name__ in _NOT_FOR_ROWS:
            who = f"{type(optimizer).__name__} of {family.name}"
            raise NotForRowsError(who, _NOT_FOR_ROWS[base.__name__])
    return None


# Attributes that do not change the step of a subclass.
_OF_ANY_CLASS = {"__init__", "get_config", "_abc_impl"}

_UNSUPPORTED = {
    "use_ema": "average the rows that you export",
    "gradient_transformers": "transform the gradients before apply_gradients",
}


def refuse_unsupported(optimizer: Any) -> None:
    """Raises NotImplementedError for a setting that would silently not apply to rows."""
    for name, instead in _UNSUPPORTED.items():
        value = getattr(optimizer, name, None)
        if value:
            raise NotImplementedError(
                f"Rows of tables do not support {name}={value!r} of {type(optimizer).__name__}: it "
                "would not act on them. "
                f"Leave it out and {instead}."
            )
    if num_batches(optimizer) > 1 and counts_batches(optimizer):
        raise NotImplementedError(
            "Rows of tables support gradient_accumulation_steps from Keras 3.5 on, whose "
            "`iterations` counts steps; before it counts batches. Received: "
            "gradient_accumulation_steps="
            f"{num_batches(optimizer)} of {type(optimizer).__name__} of an older Keras. Install a "
            "newer one, or leave it out and train with larger batches."
        )
