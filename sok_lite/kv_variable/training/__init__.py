"""TFPlus' optimizers, of tf.compat.v1.train; any other one trains tables too."""

import tensorflow as tf

from sok_lite.kv_variable.training.group_adam import AdamOptimizer, GroupAdamOptimizer
from sok_lite.kv_variable.training.rectified_adam import RectifiedAdamOptimizer
from sok_lite.kv_variable.training.sparse_group_ftrl import SparseGroupFtrlOptimizer

# TensorFlow's own, whose arguments TFPlus has.
AdagradOptimizer = tf.compat.v1.train.AdagradOptimizer
GradientDescentOptimizer = tf.compat.v1.train.GradientDescentOptimizer

__all__ = [
    "AdagradOptimizer",
    "AdamOptimizer",
    "GradientDescentOptimizer",
    "GroupAdamOptimizer",
    "RectifiedAdamOptimizer",
    "SparseGroupFtrlOptimizer",
]
