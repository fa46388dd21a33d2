"""`sok_lite.optimizers.RowWiseAdagrad`: Adagrad with one accumulator for a row."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.adagrad import Adagrad


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(Adagrad):
    """`accumulator += mean(g^2); w -= lr * g / sqrt(accumulator + epsilon)`.

    The mean is over the elements of the row (Mudigere et al., "Software-Hardware Co-design for Fast
    and Scalable Training of Deep Learning Recommendation Models", ISCA 2022). With rows of one
    element it is Adagrad.
    """

    kernel = "update_rowwise_adagrad"
    one_a_row = frozenset({"accumulator"})
