"""The optimizers of tf_keras that are not its legacy ones."""

from dataclasses import replace
from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.keras3 import KERAS3


def variable(rows: Any, name: str) -> tf.Variable:
    """Returns a variable that a copy can update."""
    return tf.Variable(rows, name=name)


TF_KERAS = replace(KERAS3, name="tf_keras", cloning=replace(KERAS3.cloning, variable=variable))
