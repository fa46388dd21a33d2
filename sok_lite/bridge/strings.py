"""`hash_strings`: strings as keys, with TensorFlow and without."""

import sys
from typing import Any

import numpy as np

from sok_lite.engine.fingerprint import fingerprints


def hash_strings(strings: Any) -> Any:
    """Returns a key for each string, the same wherever and whenever it is asked for.

    It is Fingerprint64 of FarmHash of the string's bytes, of a str those in UTF-8, as a signed
    number: what `tf.fingerprint`, FARM_FINGERPRINT of BigQuery and farmFingerprint64 of Redshift
    give. So a data pipeline may hash in any of these. Nothing is kept of the strings: two with the
    same key share a row. Among n strings that happens with a chance of about n * n / 2**65, 3 in
    100,000 for 33 million. Give the table key_type=tf.int64; an int32 has no room for such keys.

    Args:
      strings: in TensorFlow a Tensor, RaggedTensor or SparseTensor of strings, in eager mode,
        `tf.function`, tf.data and exported models alike. Else a str or bytes, a sequence of them, a
        NumPy array, a column of pandas. NumPy's dtypes "S" and "U" drop zero bytes at the end.

    Returns:
      int64 of the same shape: for what is TensorFlow's the same kind of tensor, else a NumPy array.

    Raises:
      TypeError: what is no string is among them, a missing value (None, NaN) too.

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
    # What it holds, not what NumPy would make of it: of ["a", nan] "nan", of "a\0" "a".
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
