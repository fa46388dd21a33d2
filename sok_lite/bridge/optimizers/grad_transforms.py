"""The gradient transforms in an optimizer's settings, and their order."""

from typing import Any, NamedTuple

import numpy as np

from sok_lite.bridge.optimizers.family import Family


class GradTransforms(NamedTuple):
    """An optimizer's gradient transforms before its step, in order; None: not used.

    Attributes:
      unscale: divisor, a number or a tensor.
      value: limit of elements, which are clipped to [-value, value].
      norm, global_norm: limit of each variable's norm, and of that of all together.
    """

    unscale: Any
    value: float | None
    norm: float | None
    global_norm: float | None

    @property
    def limit(self) -> float | None:
        """The limit of norms, of each or of all."""
        return self.norm if self.norm is not None else self.global_norm


def grad_transforms_of(optimizer: Any, family: Family) -> GradTransforms:
    """Returns an optimizer's gradient transforms.

    Raises TypeError for a setting that is not a number, NotImplementedError for clipping of each
    norm and the global one, a global norm of 0, and Horovod's sums of several steps' gradients.
    """
    if getattr(optimizer, "_agg_helper", None) is not None:
        raise NotImplementedError(
            "backward_passes_per_step of hvd.DistributedOptimizer does not work with tables: these "
            "would be updated in every pass, dense variables in one of several. Leave it out and "
            "use larger batches."
        )
    unscale = _number(optimizer, "loss_scale_factor")
    value, norm, global_norm = (
        _number(optimizer, name) for name in ("clipvalue", "clipnorm", "global_clipnorm")
    )
    if not family.clips_in_turn:
        # Only the first of these above 0 applies.
        norm = norm if norm is not None and norm > 0 else None
        global_norm = global_norm if global_norm and global_norm > 0 and norm is None else None
        is_free = norm is None and global_norm is None
        value = value if value is not None and value > 0 and is_free else None
    if norm is not None and global_norm is not None:
        raise NotImplementedError(
            f"{type(optimizer).__name__} has both clipnorm={norm} and global_clipnorm="
            f"{global_norm}, which tables do not support. Set one of them to None."
        )
    if global_norm == 0:
        raise NotImplementedError(
            f"global_clipnorm={global_norm} of {type(optimizer).__name__} would make every "
            "gradient 0. Set it to None."
        )
    return GradTransforms(unscale, value, norm, global_norm)


def _number(optimizer: Any, name: str) -> float | None:
    value = getattr(optimizer, name, None)
    if value is None:
        return None
    if not isinstance(value, (int, float, np.number)):
        raise TypeError(
            f"`{name}` of {type(optimizer).__name__} must be a number where tables are trained. "
            f"Received: {value!r}."
        )
    return float(value)
