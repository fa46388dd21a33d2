"""Which update rule a TensorFlow or Keras optimizer stands for, and its hyper-parameters.

Four families of optimizers bear the same names and keep their settings under different ones: each
has a file of its own.
"""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.family import Family, Settings
from sok_lite.bridge.optimizers.keras3 import KERAS3
from sok_lite.bridge.optimizers.legacy import LEGACY
from sok_lite.bridge.optimizers.tf_keras import TF_KERAS
from sok_lite.bridge.optimizers.v1 import V1


def family_of(optimizer: Any) -> Family:
    """Returns the family of an optimizer.

    Raises:
      TypeError: it is no optimizer of a known family.
    """
    modules = {(base.__module__.split(".")[0], base.__name__) for base in type(optimizer).__mro__}
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return V1
    if ("keras", "BaseOptimizer") in modules:
        return KERAS3
    if modules & {("tf_keras", "OptimizerV2"), ("keras", "OptimizerV2")}:
        return LEGACY
    if modules & {("tf_keras", "_BaseOptimizer"), ("keras", "_BaseOptimizer")}:
        return TF_KERAS
    raise TypeError(
        "`optimizer` must be a Keras 3, tf_keras or tf.compat.v1.train optimizer. "
        f"Received: {type(optimizer).__module__}.{type(optimizer).__name__}."
    )


def settings_of(optimizer: Any, family: Family) -> Settings:
    """Returns the rule of an optimizer and its settings, the learning rate not included.

    Raises:
      NotImplementedError: there is no rule for its class, or it does something to gradients or
        variables that a rule cannot do row by row.
    """
    name = _class_name(optimizer, family)
    refuse_unsupported(optimizer)
    settings = family.settings[name](optimizer)
    decay = getattr(optimizer, "weight_decay", None) if family.has_decay else None
    if decay is None or decay is False:
        return settings
    numbers = settings.numbers | {"weight_decay": decay}
    return settings._replace(numbers=numbers, decays=optimizer._use_weight_decay)


# Where the classes are whose names the families know.
_FRAMEWORKS = {"keras", "sok_lite", "tf_keras", "tensorflow"}
# What has no meaning for single rows.
_NOT_BY_ROW = {
    "Lamb": "its step needs the norms of the whole variable and of its whole gradient",
    "Adafactor": "its states are means over the rows and over the columns of the whole variable",
    "Muon": "its step makes the gradient of a whole matrix orthogonal",
}


def _class_name(optimizer: Any, family: Family) -> str:
    """Returns the class name that names the rule; a subclass counts if it changes nothing."""
    for base in type(optimizer).__mro__:
        module = base.__module__.split(".")[0]
        if module in _FRAMEWORKS:
            if base.__name__ in family.settings:
                return base.__name__
            break
        changed = [
            name
            for name in vars(base)
            if name not in ("__init__", "get_config") and not name.startswith("__")
        ]
        if changed and module != "horovod":
            raise NotImplementedError(
                f"No update rule for rows can be told of {type(optimizer).__name__}, "
                f"which has its own {changed[0]}. Give it the optimizer class itself."
            )
    if type(optimizer).__name__.startswith("LossScaleOptimizer"):
        raise NotImplementedError(
            "A LossScaleOptimizer cannot update rows of a table: whether it skips a step is "
            "decided inside it. Wrap the inner optimizer, and scale loss and gradients yourself."
        )
    what = f"{type(optimizer).__name__} of {family.name}"
    for base in type(optimizer).__mro__:
        if base.__name__ in _NOT_BY_ROW:
            raise NotImplementedError(
                f"Rows have no update rule for {what}: {_NOT_BY_ROW[base.__name__]}, and a table "
                f"changes row by row. There is one for {', '.join(sorted(family.settings))}."
            )
    raise NotImplementedError(
        f"Rows have no update rule for {what}. There is one for "
        f"{', '.join(sorted(family.settings))}."
    )


_UNSUPPORTED = {
    "clipnorm": "clip the gradients of the rows yourself (tf.clip_by_norm on gradient.values)",
    "clipvalue": "clip the gradients of the rows yourself (tf.clip_by_value on gradient.values)",
    "global_clipnorm": "use tf.clip_by_global_norm on all gradients",
    "use_ema": "average the rows that you export",
    "gradient_accumulation_steps": "use larger batches, or apply the gradients of each batch",
    "loss_scale_factor": "scale the loss and the gradients yourself",
    "gradient_transformers": "transform the gradients before apply_gradients",
}


def refuse_unsupported(optimizer: Any) -> None:
    """Raises NotImplementedError for a setting that would silently not reach the rows."""
    for name, instead in _UNSUPPORTED.items():
        value = getattr(optimizer, name, None)
        if value:
            raise NotImplementedError(
                f"Rows of tables do not support {name}={value!r} of {type(optimizer).__name__}: it "
                "would not act on them. "
                f"Leave it out and {instead}."
            )
