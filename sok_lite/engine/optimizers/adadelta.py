"""`Adadelta` of every framework; epsilon is 1e-7 in Keras and 1e-8 in TF1."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import Positive, UpdateRule, UpToOne


@dataclass(frozen=True, kw_only=True)
class Adadelta(UpdateRule):
    """Adadelta (Zeiler, 2012) with a learning rate, as Keras and TF1 have it.

    `accumulator` is the fading mean of g^2, `delta_accumulator` that of the steps' squares, and
    `w -= lr * g * sqrt(delta_accumulator + epsilon) / sqrt(accumulator + epsilon)`.
    """

    rho: UpToOne = 0.95
    epsilon: Positive = 1e-7

    kernel = "update_adadelta"
    columns = ("accumulator", "delta_accumulator")
    lazy = "fading of both"
