"""The script of TFPlus' document, and the names it finds: in processes of their own."""

import pytest

from tests.support.own_process import run_with_tensorflow

# As it stands in the document, but for a print statement and its indentation.
SCRIPT = """
import tensorflow as tf
import os
ckp_dir = './checkpoint'
ckp_path = os.path.join(ckp_dir, 'model.ckpt')
num_shards = 5
with tf.variable_scope('test', reuse=tf.AUTO_REUSE):
    var = tf.get_kv_variable("kv_embedding",
                             embedding_dim=64,
                             key_dtype=tf.int64,
                             initializer=tf.compat.v1.ones_initializer(),
                             partitioner=tf.compat.v1.fixed_size_partitioner(num_shards=num_shards))
emb = tf.nn.embedding_lookup(var, tf.convert_to_tensor([1, 2, 3,6,8,9], dtype=tf.int64))
emb1 = tf.nn.embedding_lookup(var, tf.convert_to_tensor([1000000000000000], dtype=tf.int64))
fun = tf.add(emb, 1.0, name='add')
loss = tf.reduce_sum(fun)
opt = tf.train.FtrlOptimizer(0.005,
                             l1_regularization_strength=0.025,
                             l2_regularization_strength=0.00001)
g_v = opt.compute_gradients(loss)
train_op = opt.apply_gradients(g_v)
init = tf.global_variables_initializer()
saver = tf.train.Saver()
with tf.Session() as sess:
    sess.run(init)
    print(sess.run({'emb':emb, 'fun':fun, 'train': train_op}))
    print(sess.run(emb1))
    save_path = saver.save(sess, ckp_path)
    print('model saved in file %s' % save_path)
with tf.Session() as sess:
    saver.restore(sess, ckp_path)
    print(sess.run(emb1))
    print(sess.run({'emb':emb, 'fun':fun}))
    print(sess.run(emb1))
"""
TWO_LINES = """
import sok_lite.kv_variable
sok_lite.kv_variable.patch_tf()
"""


@pytest.mark.parametrize(
    "head",
    [
        TWO_LINES,
        # A program of TensorFlow 1, whose `tf` has everything but one name.
        TWO_LINES + "import tensorflow.compat.v1\nimport sys\n"
        "sys.modules['tensorflow'] = tensorflow.compat.v1\n",
    ],
    ids=["tf", "tensorflow.compat.v1"],
)
def test_the_script_of_the_document(head, tmp_path):
    output = run_with_tensorflow(head + SCRIPT, tmp_path)
    assert "model saved in file ./checkpoint/model.ckpt" in output
    assert output.count("1., 1., 1.") >= 3


@pytest.mark.full_only("starts a process; the script of the document is the smoke")
def test_a_patch_is_taken_back(tmp_path):
    program = """
import tensorflow.compat.v1  # which replaces tf.compat by itself
import tensorflow as tf
tf1 = tf.compat.v1

def facts():
    return {(m.__name__, n): v for m in (tf, tf1, tf.train, tf1.train) for n, v in vars(m).items()}

tf.train.Checkpoint, tf1.train.Saver, tf1.Session, tf1.scatter_add  # loaded when asked for
import sok_lite.kv_variable as kv
before = facts()
kv.patch_tf(disable_eager=False)
kv.patch_tf(disable_eager=False)
assert tf.executing_eagerly()
assert tf.get_kv_variable is tf1.get_kv_variable is kv.get_kv_variable
assert tf.Session is tf1.Session and tf.train.Saver is tf1.train.Saver
with tf.variable_scope("a", reuse=tf.AUTO_REUSE):
    variable = tf.get_kv_variable("kv", 2)
assert tf1.scatter_update(variable, [1], [[2.0, 3.0]]) is variable
assert variable.value().numpy().tolist() == [[2.0, 3.0]]
kv.unpatch_tf()
kv.unpatch_tf()
after = facts()
assert {k for k in before if after.get(k) is not before[k]} == set()
assert not hasattr(tf, "get_kv_variable") and not hasattr(tf, "Session")
kv.patch_tf()
assert not tf.executing_eagerly()
print("RIGHT")
"""
    assert "RIGHT" in run_with_tensorflow(program, tmp_path)
