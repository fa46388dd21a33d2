"""What the package changes of TensorFlow and Keras, and a program that looks at all of both."""

PROGRAM = """
import sys
import tensorflow as tf
keras = __import__("keras")
keras.Model, tf.keras.optimizers.Adam, tf.nn.embedding_lookup  # what is loaded when asked for

PACKAGES = ("tensorflow", "keras", "tf_keras")

def is_theirs(name):
    return str(name).split(".")[0] in PACKAGES

def is_code(value):
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))

def facts():
    found = {}
    for name, module in list(sys.modules.items()):
        if not is_theirs(name):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            found[name, attribute] = value
            if isinstance(value, type) and is_theirs(value.__module__):
                owner = f"{value.__module__}.{value.__qualname__}"
                found |= {(owner, each): method for each, method in vars(value).items()}
    return found

def changes(before, after):
    # What was not loaded before has not been changed, and what is loaded later is no change.
    return sorted(
        attribute for (name, attribute), value in before.items()
        if is_code(value) and after.get((name, attribute)) is not value
    )

first = facts()
import sok_lite as sok
sok.init("single")
for name in [*sok.__all__, "raw_ops", "optimizer", "lookup"]:
    getattr(sok, name)
second = facts()
print("LOOKED AT", len(second))
print("BEFORE", *changes(first, second))
table = sok.DynamicVariable(2)
sok.lookup_sparse(table, tf.ragged.constant([[1]], dtype=tf.int64))
sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
third = facts()
print("AFTER", *changes(second, third))
from sok_lite.bridge.optimizers import patched
patched.patch_optimizers()
print("STOCK", *sorted(set(changes(third, facts()))))
import sok_lite.keras, sok_lite.dynamic_embedding, sok_lite.kv_variable
from sok_lite.bridge.keras import hooks
last = facts()
changed = {
    place: last[place] for place, value in first.items()
    if is_code(value) and place in last and last[place] is not value
}
print("CHANGED", len(changed))
wrappers = hooks._wrappers
others = [
    place for place, value in changed.items()
    if getattr(value, "__func__", value) not in wrappers
]
print("OTHERWISE", *(".".join(place) for place in others))
"""
# Each keeps a table from being left out without a word: see bridge/keras/guard.py.
OF_CHECKPOINTS = ["_write", "read", "restore", "save", "write"]
OF_LAYERS = ["get_weights", "load_own_variables", "save_own_variables", "set_weights"]
OF_MODELS = [
    *("compile", "evaluate", "fit", "get_state_tree", "load_weights", "make_predict_function"),
    *("make_test_function", "make_train_function"),
    *("predict", "save", "save_weights", "set_state_tree", "train_step"),
]
# Takes no wrapper of ours: see sok/optimizer.py.
OF_LOSS_SCALES = ["__init__"]
# Tells a session in a cluster of TensorFlow's own: see bridge/cluster.py.
OF_SESSIONS = ["run"]
# Have optimizers train tables that ask for it: see bridge/optimizers/patched.py. What it does
# around `compile` and `make_train_function` changes neither once more.
OF_OPTIMIZERS = ["apply", "apply_gradients", "build", "compile_from_config", "get_compile_config"]
