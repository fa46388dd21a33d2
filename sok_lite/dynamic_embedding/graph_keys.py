"""The collections of a TF1 graph that its variables are in."""

from typing import Any

import tensorflow as tf


class GraphKeys:
    """Names of the collections of a TF1 graph that variables are in."""

    DYNAMIC_EMBEDDING_VARIABLES = "dynamic_embedding_variables"
    TRAINABLE_DYNAMIC_EMBEDDING_VARIABLES = "trainable_dynamic_embedding_variables"


def add_to_graph(variable: Any) -> None:
    """Puts a variable into the collections of the graph."""
    tf.compat.v1.add_to_collection(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES, variable)
    if variable.trainable:
        tf.compat.v1.add_to_collection(GraphKeys.TRAINABLE_DYNAMIC_EMBEDDING_VARIABLES, variable)


def of_graph(name: str) -> Any:
    """Returns the variable of the graph that has a name, or None."""
    variables = tf.compat.v1.get_collection(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES)
    return next((variable for variable in variables if variable.name == name), None)
