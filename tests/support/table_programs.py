"""Drawn programs of lookups, updates and methods of tables, and what a dict says of them.

A program is a block, a list of statements: (name of an operation, table, keys, number), or
("function", block), ("branch", number of a flag, block, block), ("loop", times, block). What it
sees is a vector: rows, sizes and sums of exports, in the order of the program. All are exact.
"""

import numpy as np
import tensorflow as tf

import sok_lite as sok

DIM = 2
NUM_TABLES = 2
NUM_FLAGS = 4
OPERATIONS = ("assign", "add", "lookup", "update", "remove", "contains", "size", "export")
PARTS = ("function", "branch", "loop")


def drawn(choose, length=4, depth=2):
    """Returns a program of blocks of so many statements, functions, branches and loops within each
    other. `choose(n)` gives a number from 0 to n - 1."""
    return [_statement(choose, length, depth) for _ in range(1 + choose(length))]


def _statement(choose, length, depth):
    at = choose(len(OPERATIONS) + (len(PARTS) if depth else 0))
    if at < len(OPERATIONS):
        keys = tuple(choose(5) for _ in range(1 + choose(3)))
        return (OPERATIONS[at], choose(NUM_TABLES), keys, choose(4))
    part = PARTS[at - len(OPERATIONS)]
    if part == "branch":
        blocks = (drawn(choose, length, depth - 1) for _ in range(2))
        return (part, choose(NUM_FLAGS), *blocks)
    if part == "loop":
        return (part, 1 + choose(3), drawn(choose, length, depth - 1))
    return (part, drawn(choose, length, depth - 1))


# ---- by TensorFlow -------------------------------------------------------------------------------


class Program:
    """A drawn program on tables, as TensorFlow builds it. Each rank assigns and removes the keys
    that are its own."""

    def __init__(self, block, rank=0, size=1):
        self._block, self._rank, self._size = block, rank, size
        self.tables = [sok.DynamicVariable(DIM, initializer="ones") for _ in range(NUM_TABLES)]
        self._optimizer = sok.SGD(0.5)
        for table in self.tables:
            self._update(table, tf.constant([], tf.int64))  # states are not made in a graph

    def __call__(self, flags):
        """Runs or builds it; returns what it sees."""
        return self._run(self._block, flags)

    def _run(self, block, flags):
        return tf.concat([self._seen(each, flags) for each in block], 0)

    def _seen(self, statement, flags):
        name, *what = statement
        if name == "function":
            return tf.function(lambda: self._run(what[0], flags), autograph=False)()
        if name == "branch":
            number, *blocks = what
            yes, no = (lambda block=block: self._run(block, flags) for block in blocks)
            return tf.cond(flags[number], yes, no)
        if name == "loop":
            return self._loop(*what, flags)
        return self._operation(name, *what)

    def _loop(self, times, block, flags):
        def body(i, seen):
            return i + 1, tf.concat([seen, self._run(block, flags)], 0)

        start, shapes = (
            [tf.constant(0), tf.zeros([0])],
            [tf.TensorShape([]), tf.TensorShape([None])],
        )
        return tf.while_loop(lambda i, _: i < times, body, start, shapes)[1]

    def _operation(self, name, at, keys, number):
        table, nothing = self.tables[at], tf.zeros([0])
        own = np.array([key for key in keys if key % self._size == self._rank], np.int64)
        rows = tf.fill([own.size, DIM], float(number))
        if name == "assign":
            sok.assign(table, own, rows)
        elif name == "add":
            table.scatter_add(tf.IndexedSlices(rows, tf.constant(own)))
        elif name == "remove":
            return _vector(table.erase(own))
        elif name == "contains":
            return _vector(table.contains(own))
        elif name == "size":
            return _vector(table.size[0])
        elif name == "export":
            keys, rows = sok.export(table)
            weights = tf.cast(keys + 1, tf.float32)[:, None]
            return tf.concat([_vector(tf.size(keys)), _vector(tf.reduce_sum(rows * weights))], 0)
        else:
            keys = tf.constant(keys, tf.int64)
            return _vector((self._look_up if name == "lookup" else self._update)(table, keys))
        return nothing

    def _look_up(self, table, keys):
        if self._size == 1:
            return tf.nn.embedding_lookup(table, keys)
        return sok.lookup_sparse(table, tf.RaggedTensor.from_tensor(keys[:, None]), combiners="sum")

    def _update(self, table, keys):
        with tf.GradientTape() as tape:
            rows = self._look_up(table, keys)
            loss = tf.reduce_sum(rows)
        self._optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return rows


def _vector(tensor):
    return tf.reshape(tf.cast(tensor, tf.float32), [-1])


# ---- by a dict -----------------------------------------------------------------------------------


class Oracle:
    """What a program does to dicts of rows, and what a rank sees: all make the same lookups and
    updates."""

    def __init__(self, rank=0, size=1):
        self._rank, self._size = rank, size
        self.tables = [{} for _ in range(NUM_TABLES)]

    def run(self, block, flags):
        """Returns what a program sees, a list of numbers."""
        return [number for statement in block for number in self._seen(statement, flags)]

    def _seen(self, statement, flags):
        name, *what = statement
        if name == "function":
            return self.run(what[0], flags)
        if name == "branch":
            return self.run(what[1] if flags[what[0]] else what[2], flags)
        if name == "loop":
            return [seen for _ in range(what[0]) for seen in self.run(what[1], flags)]
        return self._operation(name, *what)

    def _operation(self, name, at, keys, number):
        rows = self.tables[at]
        mine = {key: row for key, row in rows.items() if key % self._size == self._rank}
        if name in ("lookup", "update"):
            for key in keys:
                rows.setdefault(key, 1.0)
            seen = [rows[key] for key in keys for _ in range(DIM)]
            for key in keys if name == "update" else ():
                rows[key] -= 0.5 * self._size
            return seen
        if name == "contains":
            return [key in mine for key in keys if key % self._size == self._rank]
        if name == "size":
            return [len(mine)]
        if name == "export":
            return [len(mine), sum(DIM * row * (key + 1) for key, row in mine.items())]
        for key in keys if name == "add" else ():
            if key in rows:
                rows[key] += number
        for key in set(keys):
            if name == "assign":
                rows[key] = float(number)
            elif name == "remove":
                rows.pop(key, None)
        return [len(set(keys) & set(mine))] if name == "remove" else []


def flags_of(number):
    """Returns the flags of a program's branches, of a number of so many bits."""
    return np.array([number >> at & 1 for at in range(NUM_FLAGS)], bool)
