"""What a scenario answers with: lists of plain numbers, in an order that no hash table decides."""


def numbers(tf, tensor):
    """Returns a tensor's elements as nested lists of numbers, bools or text.

    Args:
      tf: TensorFlow.
      tensor: or NumPy array; numbers of 16 bits are widened, which is exact.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = tf.cast(tensor, tf.float32)
    return text(tensor.numpy().tolist())


def text(value):
    """Returns nested lists with bytes decoded."""
    if isinstance(value, list):
        return [text(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


def contents(tf, variable):
    """Returns all a variable holds, sorted: {"keys": [n], "values": [n][dim]}."""
    return in_order(*(numbers(tf, part) for part in variable.export()))


def in_order(keys, values):
    """Returns keys and their values by ascending key."""
    pairs = sorted(zip(keys, values, strict=True))
    return {"keys": [key for key, _ in pairs], "values": [row for _, row in pairs]}
