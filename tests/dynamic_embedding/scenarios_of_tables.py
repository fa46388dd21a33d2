"""Scenarios of a Variable as a table: rows in, rows out, shards and policies that never train."""

from tests.dynamic_embedding.scenario_values import contents, numbers

KEYS = [3, -7, 2**62, 0, 11]
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [-9.0, 0.5]]


def table_verbs(de, tf):
    """Upsert, lookup, export, remove and clear, and the size after each."""
    table = de.Variable(dim=2, initializer=0.25, name="table_verbs")
    keys = tf.constant(KEYS, tf.int64)
    sizes = [int(table.size())]
    table.upsert(keys, tf.constant(ROWS))
    sizes.append(int(table.size()))
    some = tf.constant([11, 4, 3, 3], tf.int64)
    rows, exists = table.lookup(some, return_exists=True)
    answers = {
        "rows": numbers(tf, rows),
        "exists": numbers(tf, exists),
        "rows alone": numbers(tf, table.lookup(some)),
        "full": contents(tf, table),
    }
    table.upsert(tf.constant([3, 4], tf.int64), tf.constant([[0.5, 0.5], [6.0, 7.0]]))
    answers["overwritten"] = contents(tf, table)
    sizes.append(int(table.size()))
    # One that is not there, and one twice.
    table.remove(tf.constant([11, 999, 0, 0], tf.int64))
    answers["removed"] = contents(tf, table)
    sizes.append(int(table.size()))
    answers["removed rows"] = numbers(tf, table.lookup(keys))
    table.clear()
    sizes.append(int(table.size()))
    answers["cleared"] = contents(tf, table)
    table.upsert(keys[:1], tf.constant(ROWS[:1]))
    answers["used again"] = contents(tf, table)
    return {**answers, "sizes": sizes}


def table_without_keys(de, tf):
    """Calls with no key at all, of one axis and of two."""
    table = de.Variable(dim=2, name="table_without_keys")
    none = tf.zeros([0], tf.int64)
    table.upsert(none, tf.zeros([0, 2]))
    table.remove(none)
    rows, exists = table.lookup(none, return_exists=True)
    wide = table.lookup(tf.zeros([0, 3], tf.int64))
    return {
        "size": int(table.size()),
        "shapes": [rows.shape.as_list(), exists.shape.as_list(), wide.shape.as_list()],
        "export": contents(tf, table),
    }


def accum_cases(de, tf):
    """The four cases of accum: whether a key is in the table, and whether it is said to be."""
    table = de.Variable(dim=2, name="accum_cases")
    table.upsert(tf.constant([1, 2], tf.int64), tf.constant([[10.0, 20.0], [30.0, 40.0]]))
    table.accum(
        tf.constant([1, 2, 3, 4], tf.int64),
        tf.constant([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]),
        tf.constant([[4.0, 0.5], [5.0, 5.0], [7.0, 8.0], [9.0, 9.0]]),
        tf.constant([True, False, False, True]),
    )
    once = contents(tf, table)
    # Deltas of one key add up.
    table.accum(
        tf.constant([1, 1], tf.int64),
        tf.zeros([2, 2]),
        tf.constant([[1.0, 2.0], [0.25, 0.5]]),
        tf.constant([True, True]),
    )
    return {"once": once, "repeated": contents(tf, table)}


def accum_of_integers(de, tf):
    """Deltas of whole numbers."""
    table = de.Variable(value_dtype=tf.int64, dim=1, name="accum_of_integers")
    keys = tf.constant([5, 6], tf.int64)
    table.upsert(keys, tf.constant([[2**40], [3]], tf.int64))
    table.accum(
        keys,
        tf.constant([[1], [10]], tf.int64),
        tf.constant([[4], [2]], tf.int64),
        tf.constant([True, True]),
    )
    return contents(tf, table)


def value_dtypes(de, tf):
    """Rows of each type, with a default for keys that are missing, and what export gives."""
    answers = {}
    for name in ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int8"):
        dtype = getattr(tf, name)
        table = de.Variable(value_dtype=dtype, dim=3, initializer=2, name=f"value_dtypes_{name}")
        rows = tf.cast(tf.constant([[1, -2, 3], [100, 0, -128]]), dtype)
        table.upsert(tf.constant([1, 2], tf.int64), rows)
        found = table.lookup(tf.constant([2, 9], tf.int64))
        answers[name] = {
            "same type": found.dtype == dtype and table.export()[1].dtype == dtype,
            "rows": numbers(tf, found),
            "export": contents(tf, table),
        }
    return answers


def key_dtypes(de, tf):
    """Keys of 32 bits and keys of text."""
    answers = {}
    for dtype, keys in ((tf.int32, [7, -1, 2**31 - 1]), (tf.string, ["", "a", "long " * 9])):
        table = de.Variable(
            key_dtype=dtype, dim=2, initializer=-1.0, name=f"key_dtypes_{dtype.name}"
        )
        table.upsert(tf.constant(keys, dtype), tf.constant(ROWS[:3]))
        table.remove(tf.constant(keys[1:2], dtype))
        rows, exists = table.lookup(tf.constant(keys, dtype), return_exists=True)
        answers[dtype.name] = {
            "rows": numbers(tf, rows),
            "exists": numbers(tf, exists),
            "size": int(table.size()),
            "export": contents(tf, table),
        }
    return answers


def default_rows(de, tf):
    """What a missing key gets: each kind of initializer that gives all keys the same."""
    some = tf.constant([1, 2], tf.int64)
    kinds = {
        "none": None,
        "int": 3,
        "float": -0.5,
        "row": tf.constant([1.0, 2.0, 3.0]),
        "ones object": tf.compat.v1.ones_initializer(),
        "constant object": tf.compat.v1.constant_initializer(0.75),
    }
    answers = {}
    for number, (kind, initializer) in enumerate(kinds.items()):
        table = de.Variable(dim=3, initializer=initializer, name=f"default_rows_{number}")
        answers[kind] = numbers(tf, table.lookup(some))
        answers[f"{kind}, size"] = int(table.size())
    return answers


def keys_of_any_rank(de, tf):
    """A scalar key and keys of three axes, with one shard."""
    table = de.Variable(dim=2, initializer=9.0, name="keys_of_any_rank")
    table.upsert(tf.constant(5, tf.int64), tf.constant([0.5, 1.5]))
    keys = tf.reshape(tf.range(8, dtype=tf.int64), [2, 1, 4])
    before = table.lookup(keys)
    table.upsert(keys, tf.reshape(tf.range(16, dtype=tf.float32), [2, 1, 4, 2]))
    rows, exists = table.lookup(keys + 1, return_exists=True)
    return {
        "scalar": numbers(tf, table.lookup(tf.constant(5, tf.int64))),
        "before": numbers(tf, before),
        "rows": numbers(tf, rows),
        "exists": numbers(tf, exists),
        "export": contents(tf, table),
    }


def shards(de, tf):
    """Three tables on one device: with the default rule and with one of the caller's."""

    def by_tens(keys, num_shards):
        return tf.cast(tf.math.floormod(keys // 10, num_shards), tf.int32)

    answers = {}
    for name, options in (("default", {}), ("custom", {"partitioner": by_tens})):
        table = de.Variable(
            dim=2, devices=["/CPU:0"] * 3, initializer=-1.0, name=f"shards_{name}", **options
        )
        keys = tf.constant([3, 6, 9, 10, 20, 40, 41], tf.int64)
        table.upsert(keys, tf.reshape(tf.range(14, dtype=tf.float32), [7, 2]))
        table.remove(tf.constant([40, 1], tf.int64))
        rows, exists = table.lookup(tf.constant([41, 40, 3, 20], tf.int64), return_exists=True)
        answers[name] = {
            "sizes": [int(table.size(index)) for index in range(3)],
            "size": int(table.size()),
            "shards": [table.shard_num, len(table.tables)],
            "rows": numbers(tf, rows),
            "exists": numbers(tf, exists),
            "export": contents(tf, table),
        }
        table.clear()
        answers[name]["cleared"] = int(table.size())
    return answers


def shards_of_text(de, tf):
    """Keys of text in two tables: which holds which is the rule's."""
    table = de.Variable(key_dtype=tf.string, dim=1, devices=["/CPU:0"] * 2, name="shards_of_text")
    keys = tf.constant([f"key {number}" for number in range(9)])
    table.upsert(keys, tf.reshape(tf.range(9, dtype=tf.float32), [9, 1]))
    return {
        "sizes": [int(table.size(index)) for index in range(2)],
        "export": contents(tf, table),
    }


def same_variable_by_name(de, tf):
    """get_variable twice: one table, with the scope's name before its own."""
    first = de.get_variable("same_variable_by_name", dim=2, initializer=1.0)
    first.upsert(tf.constant([4], tf.int64), tf.constant([[2.0, 3.0]]))
    with tf.compat.v1.variable_scope("some_scope"):
        scoped = de.get_variable("same_variable_by_name", dim=2, initializer=1.0)
    second = de.get_variable("same_variable_by_name", dim=2, initializer=1.0)
    return {
        "is the same": second is first,
        "is another": scoped is not first,
        "names": [first.name, scoped.name],
        "sizes": [int(second.size()), int(scoped.size())],
    }


def attributes(de, tf):
    """What a Variable says of itself."""
    table = de.Variable(tf.int32, tf.float64, 3, devices="/CPU:0", name="attributes", init_size=64)
    return {
        "names": [table.name, table.shared_name, table.key_dtype.name, table.value_dtype.name],
        "numbers": [table.dim, table.shard_num, table.init_size, len(table.devices)],
        "flags": [table.trainable, table.checkpoint, table.bp_v2, table.restrict_policy is None],
    }


def within_a_function(de, tf):
    """Every verb that changes or reads rows, in a tf.function."""
    table = de.Variable(dim=2, initializer=0.5, name="within_a_function")
    specs = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2], tf.float32)]

    @tf.function(input_signature=specs)
    def turn(keys, rows):
        table.upsert(keys, rows)
        table.remove(keys[:1])
        found, exists = table.lookup(keys, return_exists=True)
        table.accum(keys, tf.zeros_like(rows), rows, exists)
        return found, exists, table.lookup(keys)

    answers = {}
    for number, keys in enumerate(([1, 2, 3], [3, 4], [5], [])):
        rows = tf.reshape(tf.range(2 * len(keys), dtype=tf.float32), [-1, 2])
        found = turn(tf.constant(keys, tf.int64), rows)
        answers[f"turn {number}"] = [numbers(tf, each) for each in found]
    return {**answers, "export": contents(tf, table)}


def restrict_without_policy(de, tf):
    """Nothing happens to a table that has no policy."""
    table = de.Variable(dim=1, name="restrict_without_policy")
    table.upsert(tf.constant([1, 2, 3], tf.int64), tf.ones([3, 1]))
    return {"is none": table.restrict(1) is None, "size": int(table.size())}


def creators(de, tf):
    """A Variable of each kind of table that needs no server."""
    config = de.HkvHashTableConfig(init_capacity=1024, max_capacity=1024)
    answers = {}
    for name, creator in (
        ("cuckoo", de.CuckooHashTableCreator(de.CuckooHashTableConfig())),
        ("hkv", de.HkvHashTableCreator(config)),
    ):
        table = de.Variable(dim=2, initializer=0.25, kv_creator=creator, name=f"creators_{name}")
        keys = tf.constant(KEYS, tf.int64)
        table.upsert(keys, tf.constant(ROWS))
        table.remove(keys[:1])
        rows, exists = table.lookup(keys, return_exists=True)
        answers[name] = {
            "rows": numbers(tf, rows),
            "exists": numbers(tf, exists),
            "size": int(table.size()),
            "export": contents(tf, table),
        }
    return answers


def table_alone(de, tf):
    """A CuckooHashTable without a Variable, with default rows that a lookup brings."""
    table = de.CuckooHashTable(tf.int64, tf.float32, [0.5, 1.5], name="table_alone")
    keys = tf.constant(KEYS, tf.int64)
    table.insert(keys, tf.constant(ROWS))
    table.remove(keys[1:2])
    some = tf.constant([11, -7, 5], tf.int64)
    given = tf.reshape(tf.range(6, dtype=tf.float32), [3, 2])
    rows, exists = table.lookup(some, dynamic_default_values=given, return_exists=True)
    table.accum(some[:2], tf.ones([2, 2]), tf.constant([True, False]))
    answers = {
        "rows": numbers(tf, table.lookup(some)),
        "with defaults": numbers(tf, rows),
        "exists": numbers(tf, exists),
        "size": int(table.size()),
        "export": contents(tf, table),
    }
    table.clear()
    return {**answers, "cleared": int(table.size())}
