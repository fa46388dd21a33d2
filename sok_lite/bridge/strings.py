"""`hash_strings`: strings as keys, with or without TensorFlow."""

import sys
from typing import Any

import numpy as np

from sok_lite.engine.fingerprint import fingerprints


def hash_strings(strings: Any) -> Any:
    """Returns a key for each string, always and everywhere the same.

    The key is FarmHash's Fingerprint64 of the string's bytes (UTF-8 for str) as a signed integer,
    equal to `tf.fingerprint`, FARM_FINGERPRINT of BigQuery and farmFingerprint64 of Redshift, so a
    data pipeline may hash in any of these. The strings are not kept: two with the same key share a
    row. Among n strings the probability of that is about n * n / 2**65, 3 in 100,000 for 33
    million. Give the table key_type=tf.int64; int32 cannot hold these keys.

    Args:
      strings: a Tensor, RaggedTensor or SparseTensor of strings, in eager mode, `tf.function`,
        tf.data and exported models alike; or a str or bytes, a sequence of them, a NumPy array, or
        a pandas column. NumPy's dtypes "S" and "U" drop zero bytes at the end.

    Returns:
      int64 of the same shape: the same kind of tensor for TensorFlow's tensors, else a NumPy array.

    Raises:
      TypeError: a value is not a string; None and NaN are not.

    Examples:
      >>> keys = sok_lite.hash_strings(["apple", "pear", "apple"])
      >>> keys.dtype.name, bool(keys[0] == keys[2]), bool(keys[0] == keys[1])
      ('int64', True, False)
    """
    tf = sys.modules.get("tensorflow")
    if tf is not None:
        from sok_lite.bridge.string_keys import hash_tensor, is_tensor

        if is_tensor(strings):
            return hash_tensor(strings)
    # As objects: NumPy would turn ["a", nan] into "nan", and "a\0" into "a".
    array = np.asarray(strings, object)
    encoded = [_encode(string) for string in array.reshape(-1).tolist()]
    return fingerprints(encoded).reshape(array.shape)


def _encode(string: Any) -> bytes:
    if isinstance(string, str):
        return string.encode()
    if isinstance(string, bytes):
        return string
    raise TypeError(
        f"hash_strings takes strings. Received: {string!r} among them. Give missing values a "
        'string of their own, such as "".'
    )
