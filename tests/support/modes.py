"""TensorFlow's three modes, to call the same function in each."""

import contextlib

import numpy as np
import tensorflow as tf


class Mode:
    """Calls functions of tensors. Variables are made, and functions called, while it is open."""

    is_graph = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self, function, *arrays):
        """Returns what a function of tensors gives, as NumPy; None where it gives nothing."""
        raise NotImplementedError

    def step(self, function, *arrays):
        """Returns a function that calls `function` with the arrays whenever it is called."""
        return lambda: self.run(function, *arrays)


class Eager(Mode):
    def run(self, function, *arrays):
        return _numpy(function(*map(_constant, arrays)))


class Function(Mode):
    def run(self, function, *arrays):
        return self.step(function, *arrays)()

    def step(self, function, *arrays):
        def without_operations(*tensors):
            result = function(*tensors)  # a tf.function gives no operation back
            return None if isinstance(result, tf.Operation) else result

        traced = tf.function(without_operations)
        return lambda: _numpy(traced(*map(_constant, arrays)))


class Graph(Mode):
    is_graph = True

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(tf.Graph().as_default())
        self.session = self._stack.enter_context(tf.compat.v1.Session())
        self._initialized = []
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def run(self, function, *arrays):
        return self.step(function, *arrays)()

    def step(self, function, *arrays):
        arrays = [_array(array) for array in arrays]
        # Of unknown length, as programs have them.
        feeds = [tf.compat.v1.placeholder(array.dtype, [None] * np.ndim(array)) for array in arrays]
        fetches = function(*feeds)
        values = dict(zip(feeds, arrays, strict=True))
        self._initialize()
        if fetches is None:
            return lambda: None
        return lambda: self.session.run(fetches, values)

    def _initialize(self):
        """Initializes the variables that are new: an initializer empties some tables."""
        done = {id(variable) for variable in self._initialized}
        new = [each for each in tf.compat.v1.global_variables() if id(each) not in done]
        self.session.run(tf.compat.v1.variables_initializer(new))
        self._initialized += new


def _array(given):
    """Returns an array; a list of integers as int64, one of other numbers as float32."""
    array = np.asarray(given)
    if isinstance(given, np.ndarray) or array.dtype.kind not in "if":
        return array
    return array.astype(np.int64 if array.dtype.kind == "i" else np.float32)


def _constant(given):
    return tf.constant(_array(given))


def _numpy(result):
    return tf.nest.map_structure(
        lambda each: each.numpy() if tf.is_tensor(each) and hasattr(each, "numpy") else each, result
    )


MODES = {"eager": Eager, "tf.function": Function, "graph": Graph}
