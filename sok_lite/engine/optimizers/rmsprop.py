"""RMSprop.

* Keras 3, tf_keras `RMSprop`: `RMSprop(rho, momentum, epsilon, centered)`
* tf_keras legacy `RMSprop`: the same, and `epsilon_inside_root=False` where momentum is 0
* tf.compat.v1 `RMSPropOptimizer`: `RMSprop(rho=decay, ..., initial_rms=1.0)`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import NotNegative, Positive, UpdateRule, UpToOne


@dataclass(frozen=True, kw_only=True)
class RMSprop(UpdateRule):
    """`rms = rho * rms + (1 - rho) * g^2; w -= lr * g / sqrt(rms + epsilon)`.

    Attributes:
      momentum: if not 0, `step = momentum * step + lr * g / sqrt(...); w -= step`, with the step in
        the state "momentum".
      centered: divides by the root of the variance, `rms - mean_grad^2`.
      epsilon_inside_root: False: `/ (sqrt(rms) + epsilon)`.
      initial_rms: the `rms` of a new row: 0 in Keras, 1 in TF1.
    """

    rho: UpToOne = 0.9
    momentum: UpToOne = 0.0
    epsilon: Positive = 1e-7
    centered: bool = False
    epsilon_inside_root: bool = True
    initial_rms: NotNegative = 0.0

    kernel = "update_rmsprop"
    columns = ("rms", "mean_grad", "momentum")
    lazy = "fading; momentum steps"

    @property
    def states(self) -> dict[str, float]:
        states = {"rms": self.initial_rms}
        if self.centered:
            states["mean_grad"] = 0.0
        if self.momentum:
            states["momentum"] = 0.0
        return states
