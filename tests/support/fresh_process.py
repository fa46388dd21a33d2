"""A process without sok_lite that loads SavedModels and runs their signatures, as servers do."""

import pickle
import subprocess
import sys
import tempfile

PROGRAM = """
import os, pickle, sys
sys.modules["sok_lite"] = None  # its import raises
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what TensorFlow prints is no answer
import tensorflow as tf

def plain(array):
    return array.astype("float32") if array.dtype == tf.bfloat16.as_numpy_dtype else array

def by_tf2(path, signature, inputs):
    serve = tf.saved_model.load(path).signatures[signature]
    specs = serve.structured_input_signature[1]
    given = {name: tf.constant(value, specs[name].dtype) for name, value in inputs.items()}
    return {name: tensor.numpy() for name, tensor in serve(**given).items()}

def by_tf1(path, signature, inputs):
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        meta = tf.compat.v1.saved_model.loader.load(session, ["serve"], path)
        names = meta.signature_def[signature]
        feed = {names.inputs[name].name: value for name, value in inputs.items()}
        return session.run({name: info.name for name, info in names.outputs.items()}, feed)

while True:
    try:
        loader, *job = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        outputs = {"tf2": by_tf2, "tf1": by_tf1}[loader](*job)
        answer = {name: plain(array) for name, array in outputs.items()}
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    assert not [name for name in sys.modules if name.startswith("sok_lite.")]
    pickle.dump(answer, answers)
    answers.flush()
"""


class FreshProcess:
    """The process. It is left at the end of a `with` block."""

    def __enter__(self):
        command = [sys.executable, "-I", "-c", PROGRAM]
        self._errors = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors)
        return self

    def __exit__(self, *_):
        self._process.communicate(timeout=300)
        self._errors.close()

    def run(self, path, inputs, loader="tf2", signature="serving_default"):
        """Returns what a signature gives, arrays by name; bfloat16 as float32.

        It loads by tf.saved_model.load, or with "tf1" by tf.compat.v1.saved_model.loader.
        """
        pickle.dump((loader, str(path), signature, inputs), self._process.stdin)
        self._process.stdin.flush()
        try:
            answer = pickle.load(self._process.stdout)
        except EOFError:
            self._errors.seek(0)
            raise RuntimeError(self._errors.read().decode()[-3000:]) from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer
