"""Reports the tables of a lookup to TensorFlow: gradient tapes, graphs and Keras' guard."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import guard
from sok_lite.bridge.serving.mode import is_exporting, stand_in
from sok_lite.bridge.tf_private import tape_accessed, watcher_accessed


def accessed(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Records a lookup on gradient tapes; returns the tables' resources, its inputs."""
    guard.refuse_custom_step(variables)
    resources = [resource for variable in variables for resource in variable.resources]
    # As TensorFlow's `variable_accessed`, which asks each variable for its graph and its strategy:
    # no replica has a table.
    graph: Any = tf.compat.v1.get_default_graph()
    if hasattr(graph, "watch_variable"):
        for resource in resources:
            graph.watch_variable(resource)
    for resource in resources:
        if resource.trainable:
            tape_accessed(resource)
            watcher_accessed(resource)
    handles = [resource._true_handle for resource in resources]
    return [stand_in(each) for each in handles] if is_exporting() else handles
