"""A table under a tf.distribute strategy: one replica may use it, several may not."""

import json

from tests.support.own_process import run_with_tensorflow

# In a process of its own: devices are divided before TensorFlow starts.
PROGRAM = """
import json
import keras
import numpy as np
import tensorflow as tf
import sok_lite as sok

cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
sok.init()
table = sok.DynamicVariable(2, name="made_outside")
sok.assign(table, [1], [[1.0, 1.0]])
ids = tf.ragged.constant([[1]], dtype=tf.int64)
slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1], tf.int64))
adam = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
sgd = sok.SGD(0.1)
with tf.GradientTape(persistent=True) as tape:
    pooled = tf.reduce_sum(sok.lookup_sparse(table, ids))
    looked_up = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
traced_before = tf.function(lambda: sok.lookup_sparse(table, ids))
traced_before()


def assign():
    sok.assign(table, [1], [[2.0, 2.0]])


def apply(optimizer):
    optimizer.apply_gradients([(slices, table)])


USES = {
    "embedding_lookup": lambda: tf.nn.embedding_lookup(table, [1]),
    "lookup_sparse": lambda: sok.lookup_sparse(table, ids),
    "traced before": lambda: traced_before(),
    "gradient of lookup_sparse": lambda: tape.gradient(pooled, table).values,
    "gradient of embedding_lookup": lambda: tape.gradient(looked_up, table).values,
    "OptimizerWrapper": lambda: apply(adam),
    "SGD": lambda: apply(sgd),
    "assign": assign,
}


def outcome(use):
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "went"


several = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
one = tf.distribute.OneDeviceStrategy("CPU:0")
report = {}
for name, use in USES.items():
    report[name] = [
        outcome(lambda: several.run(use)),
        outcome(tf.function(lambda: several.run(use), autograph=False)),
    ]
keys, rows = sok.export(table)
report["rows"] = rows.numpy().tolist()
report["steps"] = [int(adam.iterations), int(sgd.iterations)]
with several.scope():
    report["in the scope, once"] = [outcome(USES["lookup_sparse"])]
for name in list(USES):
    report["one replica: " + name] = [outcome(lambda: one.run(USES[name]))]
print("REPORT" + json.dumps(report))
"""


def test_several_replicas_are_refused_at_use_and_a_single_use_goes_on(tmp_path):
    report = json.loads(run_with_tensorflow(PROGRAM, tmp_path).rpartition("REPORT")[2])
    uses = {name: texts for name, texts in report.items() if len(texts) == 2 and name != "steps"}
    assert len(uses) == 8
    for name, texts in uses.items():
        for text in texts:
            assert text.startswith("NotImplementedError"), name
            assert "made_outside" in text and "several replicas" in text and "horovodrun" in text
    # Which has changed nothing.
    assert report["rows"] == [[1.0, 1.0]]
    assert report["steps"] == [0, 0]
    single = {name: said for name, said in report.items() if name.startswith(("one ", "in the"))}
    assert len(single) == 9
    assert all(said == ["went"] for said in single.values()), single
