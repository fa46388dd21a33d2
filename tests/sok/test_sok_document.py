"""The two examples of SOK's own documentation, word for word but for the import line."""

import json

import numpy as np
import pytest

from tests.support.own_process import run_with_tensorflow

# The only change: `import sok_lite as sok`. The document also imports Horovod, which a machine of
# one process need not have; a stand-in lets the line stay.
VARIABLE = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd
import sok_lite as sok

v = sok.DynamicVariable(dimension=3, initializer="13")
print("v.shape:", v.shape)
print("v.size:", v.size)

indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)

embedding = tf.nn.embedding_lookup(v, indices)
print("embedding:", embedding)
print("v.shape:", v.shape)
print("v.size:", v.size)
"""

OPTIMIZER = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd
import sok_lite as sok

v = sok.DynamicVariable(dimension=3, var_type="hbm", initializer="13")

indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)

with tf.GradientTape() as tape:
    embedding = tf.nn.embedding_lookup(v, indices)
    print("embedding:", embedding)
    loss = tf.reduce_sum(embedding)

grads = tape.gradient(loss, [v])

optimizer = tf.keras.optimizers.SGD(learning_rate=1.0)
optimizer = sok.OptimizerWrapper(optimizer)
optimizer.apply_gradients(zip(grads, [v]))

embedding = tf.nn.embedding_lookup(v, indices)
print("embedding:", embedding)
"""

STAND_IN = """
import importlib.util, sys, types
try:
    import horovod.tensorflow
except Exception:
    package = types.ModuleType("horovod")
    package.tensorflow = types.ModuleType("horovod.tensorflow")
    sys.modules |= {"horovod": package, "horovod.tensorflow": package.tensorflow}
"""

REPORT = """
import json
facts = [v.shape.as_list(), v.size.numpy().tolist(), embedding.numpy().tolist()]
print("REPORT", json.dumps(facts))
"""


@pytest.mark.parametrize(
    ("example", "row"),
    [(VARIABLE, [13.0] * 3), (OPTIMIZER, [12.0] * 3)],
    ids=["variable", "optimizer"],
)
def test_the_examples_of_the_document_run(example, row, tmp_path):
    text = run_with_tensorflow(STAND_IN + example + REPORT, tmp_path)
    line = next(line for line in text.splitlines() if line.startswith("REPORT "))
    shape, size, embedding = json.loads(line.removeprefix("REPORT "))
    assert shape == [None, 3]
    assert size == [3, 3]
    np.testing.assert_array_equal(embedding, [row] * 3)
