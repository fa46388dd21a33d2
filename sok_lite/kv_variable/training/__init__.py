"""The optimizers of TFPlus: of tf.compat.v1.train, for dense variables and for tables.

Any other optimizer of TensorFlow or Keras trains tables as well.
"""

import tensorflow as tf

from sok_lite.kv_variable.training.group_adam import AdamOptimizer, GroupAdamOptimizer
from sok_lite.kv_variable.training.rectified_adam import RectifiedAdamOptimizer
from sok_lite.kv_variable.training.sparse_group_ftrl import SparseGroupFtrlOptimizer

# TensorFlow's own: TFPlus has the same arguments.
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
