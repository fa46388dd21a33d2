"""Optimizers as programs write them, of each family, which no update rule follows.

All take the same step: with n(t) the squared norms of a row's gradients so far, p(t) = 0.9^t,
m(t) = rho * m + g; w -= lr * m / (1 + sqrt(n)) * (1 - p). Their state n is one number for a row,
and p one for all rows.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

tf_keras = pytest.importorskip("tf_keras")
v1 = tf.compat.v1.train
KEYS = [5, -7, 2**40]


def slices(grads, keys=KEYS):
    return tf.IndexedSlices(tf.convert_to_tensor(grads, tf.float32), tf.constant(keys, tf.int64))


class OfKeras3(keras.optimizers.Optimizer):
    def __init__(self, learning_rate=0.1, rho=0.9, **options):
        super().__init__(learning_rate=learning_rate, **options)
        self.rho = rho

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.ms = [self.add_variable_from_reference(v, "mom") for v in variables]
        self.ns = [self.add_variable((v.shape[0],)) for v in variables]
        self.power = self.add_variable((), initializer="ones", name="power")

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(list(trainable_variables))
        self.assign(self.power, self.power * 0.9)
        super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        i = self._get_variable_index(variable)
        self.assign(self.ms[i], self.rho * self.ms[i] + gradient)
        self.assign_add(self.ns[i], ops.sum(ops.square(gradient), -1))
        root = ops.expand_dims(ops.sqrt(self.ns[i]), -1)
        self.assign_sub(variable, learning_rate * self.ms[i] / (1 + root) * (1 - self.power))

    def get_config(self):
        return {**super().get_config(), "rho": self.rho}


class OfTfKeras(tf_keras.optimizers.Optimizer):
    def __init__(self, learning_rate=0.1, rho=0.9, name="OfTfKeras", **options):
        super().__init__(name=name, **options)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.rho = rho

    def build(self, var_list):
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._built = True
        self.ms = [self.add_variable_from_reference(v, "mom") for v in var_list]
        self.ns = [self.add_variable_from_reference(v, "n", v.shape[:1]) for v in var_list]
        self.power = tf.Variable(1.0, trainable=False)  # nobody but this attribute knows it

    def apply_gradients(self, grads_and_vars, **options):
        grads_and_vars = list(grads_and_vars)
        with tf.init_scope():
            self.build([variable for _, variable in grads_and_vars])
        self.power.assign(self.power * 0.9)
        return super().apply_gradients(grads_and_vars, **options)

    def update_step(self, gradient, variable):
        i = self._index_dict[self._var_key(variable)]
        self.ms[i].assign(self.rho * self.ms[i] + gradient)
        self.ns[i].assign_add(tf.reduce_sum(gradient**2, -1))
        root = tf.sqrt(self.ns[i])[:, None]
        variable.assign_sub(self.learning_rate * self.ms[i] / (1 + root) * (1 - self.power))

    def get_config(self):
        rate = self._serialize_hyperparameter(self._learning_rate)
        return {**super().get_config(), "learning_rate": rate, "rho": self.rho}


class OfLegacy(tf_keras.optimizers.legacy.Optimizer):
    def __init__(self, learning_rate=0.1, rho=0.9, name="OfLegacy", **options):
        super().__init__(name, **options)
        self._set_hyper("learning_rate", learning_rate)
        self._set_hyper("rho", rho)
        self._set_hyper("decay", self._initial_decay)

    def _create_slots(self, var_list):
        for variable in var_list:
            self.add_slot(variable, "mom")
            self.add_slot(variable, "n", shape=variable.shape[:1])

    def _resource_apply_dense(self, grad, var, apply_state=None):
        mom, n = self.get_slot(var, "mom"), self.get_slot(var, "n")
        mom.assign(self._get_hyper("rho") * mom + grad)
        n.assign_add(tf.reduce_sum(grad**2, -1))
        power = 0.9 ** (tf.cast(self.iterations, tf.float32) + 1)
        rate = self._decayed_lr(tf.float32)
        return var.assign_sub(rate * mom / (1 + tf.sqrt(n)[:, None]) * (1 - power))

    def get_config(self):
        names = ("learning_rate", "rho", "decay")
        values = {name: self._serialize_hyperparameter(name) for name in names}
        return {**super().get_config(), **values}


class OfV1(v1.Optimizer):
    def __init__(self, learning_rate=0.1, rho=0.9, use_locking=False, name="OfV1"):
        super().__init__(use_locking, name)
        self._lr, self._rho = learning_rate, rho

    def _create_slots(self, var_list):
        first = min(var_list, key=lambda variable: variable.name)
        self._create_non_slot_variable(1.0, "power", first)
        for variable in var_list:
            self._zeros_slot(variable, "mom", self._name)
            n = tf.zeros_initializer()
            shape = variable.shape[:1]
            self._get_or_make_slot_with_initializer(variable, n, shape, tf.float32, "n", "n")

    def _prepare(self):
        self._lr_t = tf.convert_to_tensor(self._call_if_callable(self._lr))

    def _resource_apply_dense(self, grad, var):
        mom, n = self.get_slot(var, "mom"), self.get_slot(var, "n")
        power = self._power() * 0.9
        with tf.control_dependencies(
            [mom.assign(self._rho * mom + grad), n.assign_add(tf.reduce_sum(grad**2, -1))]
        ):
            root = tf.sqrt(tf.identity(n))[:, None]
            moved = self._lr_t * tf.identity(mom) / (1 + root) * (1 - power)
            return var.assign_sub(moved)

    def _power(self):
        with tf.init_scope():
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return self._get_non_slot_variable("power", graph)

    def _finish(self, update_ops, name_scope):
        power = self._power()
        with tf.control_dependencies(update_ops):
            return tf.group(*update_ops, power.assign(power * 0.9), name=name_scope)


ALL = [OfKeras3, OfTfKeras, OfLegacy, OfV1]


class Twin:
    """The same step in NumPy float64, for rows by key."""

    def __init__(self, rho=0.9):
        self.rho, self.power, self.m, self.n = rho, 1.0, {}, {}

    def step(self, rows, keys, grads, lr=0.1):
        """Changes the rows of a dict."""
        self.power *= 0.9
        for key, grad in zip(keys, grads.astype(np.float64), strict=True):
            self.m[key] = self.rho * self.m.get(key, 0.0) + grad
            self.n[key] = self.n.get(key, 0.0) + (grad**2).sum()
            rows[key] = rows[key] - lr * self.m[key] / (1 + self.n[key] ** 0.5) * (1 - self.power)
