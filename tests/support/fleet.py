"""Tables of mixed kinds that are called together, beside what must be the same.

A `Fleet` makes every call twice: for all tables at once, and for a twin of each table alone, by one
thread of a CPU. Outputs, gradients and the whole state of a table and its twin must be equal to the
last bit, whatever the backend of the fleet and its threads. That a table alone is right is for the
tests of each operation. Of a full table it depends on the threads which of several keys evicts
which: unless one thread does all, only its outputs and gradients are compared, with its own rows.
"""

from typing import NamedTuple

import numpy as np

from sok_lite.backend.cpu import CpuBackend
from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.update_rows import Update
from tests.support import step_oracle
from tests.support.fleet_kinds import KINDS, Part, drawn_from, made, some_keys, treatment
from tests.support.parts import Part as LookupPart
from tests.support.parts import by_part, carried, forward_parts
from tests.support.steps import apply_updates
from tests.support.table_audit import audit
from tests.support.table_state import State

CHUNK_BYTES = 1 << 10  # rows grow every few keys
CHANGES = ("assign", "erase", "insert_or_assign", "expire", "clear", "reserve", "next_epoch")
_PLACES = ("numbers", "capacity", "row_version")


def threads(count):
    """A backend of `count` threads, for which a few items are worth all of them."""
    backend = CpuBackend(num_threads=count)
    backend.grain = 7
    backend.chunk_bytes = backend.far_chunk_bytes = CHUNK_BYTES
    return backend


class _Pending(NamedTuple):
    """A forward whose backward is still to come."""

    asked: list
    context: object
    twins: dict  # number of a table -> context of its twin


class _Gradients(NamedTuple):
    """Keys and gradients of each part, of which nothing was updated yet; tables know their
    parts."""

    by_table: dict
    parts: list


class Fleet:
    """Tables and their twins.

    `is_exact` says that one thread does all, so that full tables equal their twins as well;
    `happened` has names of what came to pass, for tests that ask whether anything did.
    """

    def __init__(self, backend, kinds):
        self.backend, self.twin_backend = backend, threads(1)
        self.is_exact = backend.name == "cpu" and backend.num_threads == 1
        self.comm = SingleCommunicator()
        self.kinds = [KINDS[number] for number in kinds]
        self.tables = [made(kind, backend, i) for i, kind in enumerate(self.kinds)]
        self.twins = [made(kind, self.twin_backend, i) for i, kind in enumerate(self.kinds)]
        self.pending, self.gradients = [], []
        self.step = 0
        self.happened = set()

    def is_twin(self, number):
        """Whether a table must equal its twin."""
        return self.is_exact or "on_refused" not in self.kinds[number].options

    # ---------------------------------------------------------------- calls

    def forward(self, parts, seed, repack=False):
        """Looks up in all tables at once, and in each twin alone."""
        rng = np.random.default_rng(seed)
        asked = [drawn_from(part, self.kinds[part.number], rng) for part in parts]
        treatments = {part.number: treatment(rng) for part in parts}
        outputs, context = self._forward(self.backend, self.tables, asked, treatments, repack)
        twins = {}
        for number, places in _by_table(asked).items():
            its = [asked[i] for i in places]
            if not self.is_twin(number):
                self._check_outputs(number, its, [outputs[i] for i in places])
                continue
            of_twin, twins[number] = self._forward(
                self.twin_backend, self.twins, its, treatments, repack
            )
            for i, output in zip(places, of_twin, strict=True):
                np.testing.assert_array_equal(outputs[i], output)
        self.pending.append(_Pending(asked, context, twins))

    def _forward(self, backend, tables, asked, treatments, repack):
        parts = []
        for each in asked:
            number = each.part.number
            keys, splits = step_oracle.flat(each.ragged, np.int64)
            keys = tables[number].key_dtype.from_int64(np, keys)
            weights = None
            if each.weights is not None:
                weights = backend.from_host(step_oracle.flat(each.weights, np.float32)[0])
            arrays = (backend.from_host(keys), backend.from_host(splits), weights)
            how = (each.part.combiner, *treatments[number])
            parts.append(LookupPart(tables[number], *arrays, *how))
        outputs, context = forward_parts(backend, self.comm, parts)
        if repack:
            context = carried(backend, self.comm, parts, context)
        return [backend.to_host(output) for output in outputs], context

    def _check_outputs(self, number, asked, outputs):
        """Compares what was looked up with the table's rows, where all keys have one."""
        dim = self.kinds[number].dim
        rows = dict(zip(*content(self.tables[number]), strict=True))

        def row_of(key):
            return rows.get(key, np.zeros(dim))

        for each, output in zip(asked, outputs, strict=True):
            has_rows = np.array([set(keys) <= rows.keys() for keys in each.ragged], bool)
            how = (each.part.combiner, dim, each.weights)
            expected = step_oracle.outputs(each.ragged, row_of, *how)
            sizes = step_oracle.outputs(each.ragged, lambda key: abs(row_of(key)), *how)
            atol = 1e-5 * max(1e-6, sizes.max(initial=0))
            np.testing.assert_allclose(output[has_rows], expected[has_rows], rtol=1e-5, atol=atol)

    def backward(self, seed, which=0):
        """Takes one of the pending forwards back; its gradients then wait for their update."""
        asked, context, twins = self.pending.pop(which)
        rng = np.random.default_rng(seed)
        dims = [self.kinds[each.part.number].dim for each in asked]
        grads = [
            rng.integers(-3, 4, (len(each.ragged), dim)).astype(np.float32)
            for each, dim in zip(asked, dims, strict=True)
        ]
        gradients = _backward(self.backend, grads, context)
        by_table = _by_table(asked)
        for number, places in by_table.items():
            if number not in twins:
                for i in places:
                    _check_gradient(asked[i], grads[i], gradients[i])
                continue
            of_twin = _backward(self.twin_backend, [grads[i] for i in places], twins[number])
            for i, gradient in zip(places, of_twin, strict=True):
                for one, other in zip(gradients[i], gradient, strict=True):
                    np.testing.assert_array_equal(one, other)
        self.gradients.append(_Gradients(by_table, [gradient[:2] for gradient in gradients]))

    def update(self, which=0, of_gradient=False, **options):
        """Updates rows by gradients that wait: of all tables at once, and of each twin alone."""
        by_table, gradients = self.gradients.pop(which)
        self.step += 1

        def update(backend, tables, numbers):
            updates = []
            for number, i in ((each, i) for each in numbers for i in by_table[each]):
                table, rule = tables[number], self.kinds[number].rule
                keys, grads = map(backend.from_host, gradients[i])
                keys = keys if of_gradient else table.key_dtype.from_int64(backend.xp, keys)
                updates.append(Update(table, rule, keys, grads, of_gradient=of_gradient))
            apply_updates(updates, 0.05, self.step, **options)

        update(self.backend, self.tables, by_table)
        for number in filter(self.is_twin, by_table):
            update(self.twin_backend, self.twins, [number])
        self.happened.add("update")

    # ---------------------------------------------------------------- between calls

    def change(self, number, what, seed):
        """Does something to one table and its twin."""
        rng, table = np.random.default_rng(seed), self.tables[number]
        known = rng.permutation(content(table)[0] or [0])[:20].astype(np.int64)
        keys = np.concatenate([known, some_keys(self.kinds[number], rng, 10, 50)])
        self._note(table)
        results = [_changed(table, what, keys)]
        if self.is_twin(number):
            results.append(_changed(self.twins[number], what, keys))
        assert results == results[:1] * len(results)
        self.happened.add(what)

    # ---------------------------------------------------------------- what is compared

    def check(self):
        """All that there is of each table: its insides, and its twin's state."""
        for number, table in enumerate(self.tables):
            audit(table)
            self._note(table)
            if self.is_twin(number):
                state, twin = State.of(table), State.of(self.twins[number])
                if not self.is_exact:  # where free rows and slots lie is up to the threads
                    twin = twin._replace(**{name: getattr(state, name) for name in _PLACES})
                assert state == twin, f"table {number}"

    def _note(self, table):
        counts = table.statistics()
        names = ("inserted", "evicted", "refused", "not_admitted")
        self.happened |= {name for name in names if getattr(counts, f"{name}_total")}
        if table.index.num_rehashes:
            self.happened.add("growth")
        near = table.store.near_rows
        if near is not None and table.store.num_rows > near:
            self.happened.add("far rows")
            if table.row_version:
                self.happened.add("new places")


def _by_table(asked):
    """Returns number of a table -> numbers of its parts."""
    found = {}
    for i, each in enumerate(asked):
        found.setdefault(each.part.number, []).append(i)
    return found


def _backward(backend, grads, context):
    given = [backend.from_host(each) for each in grads]
    gradients = lookup.backward(backend, given, context)
    return [
        tuple(None if part is None else backend.to_host(part) for part in gradient)
        for gradient in by_part(gradients)
    ]


def _check_gradient(asked, grads, gradient):
    """Compares the gradient of a part with plain Python, keys in order of first occurrence."""
    way = (asked.part.combiner, asked.weights)
    total = step_oracle.key_gradients(asked.ragged, grads, *way)
    size = step_oracle.key_gradients(asked.ragged, abs(grads), *way)
    assert gradient[0].tolist() == list(total)
    for key, row in zip(total, gradient[1], strict=True):
        np.testing.assert_allclose(row, total[key], rtol=1e-5, atol=1e-5 * size[key].max())


def _changed(table, what, keys):
    """Changes a table; returns what that gives."""
    given = table.key_dtype.from_int64(table.backend.xp, table.backend.from_host(keys))
    if what in ("assign", "insert_or_assign"):
        # The last of a repeated key is another than the first.
        values = np.arange(keys.size)[:, None] * 0.37 + np.arange(table.dim)
        values = table.backend.from_host(values.astype(np.float32))
        return getattr(table, what)(given, table.store.to_storage(values))
    if what == "next_epoch":
        if getattr(table, "options", None) and "Epoch" in table.options.evict_strategy:
            table.epoch += 1
        return None
    arguments = {"erase": [given], "expire": [], "clear": [], "reserve": [300]}[what]
    return getattr(table, what)(*arguments, **{"num_lookups": 2} if what == "expire" else {})


def content(table):
    """Keys as Python ints of int64, and their rows (n, dim) float32, on the host."""
    host = table.backend.to_host
    keys, rows = table.export()
    rows = host(rows)
    if table.row_dtype.name == "bfloat16":
        rows = bfloat16_to_float32(np, rows)
    return host(table.key_dtype.to_int64(table.backend.xp, keys)).tolist(), rows.astype(np.float32)


def play(fleet, seed, steps):
    """Makes calls by a seed alone: each of all tables, and more of some; changes between them."""
    rng = np.random.default_rng(seed)
    count = len(fleet.tables)
    for _ in range(steps):
        numbers = [*rng.permutation(count), *rng.integers(0, count, count // 8)]
        parts = [
            Part(
                *(int(number), int(rng.choice([0, 1, 3, 12, 40])), int(rng.choice([5, 40, 400]))),
                *(str(rng.choice(["sum", "mean", "sqrtn"])), bool(rng.random() < 0.4)),
            )
            for number in numbers
        ]
        fleet.forward(parts, rng.integers(1 << 30), bool(rng.random() < 0.3))
        if rng.random() < 0.7:
            fleet.backward(rng.integers(1 << 30), rng.integers(len(fleet.pending)))
        late = rng.integers(3)
        if late == 0:
            _update(fleet, rng)
        for what in rng.permutation(CHANGES)[: rng.integers(0, len(CHANGES))]:
            fleet.change(int(rng.integers(count)), str(what), rng.integers(1 << 30))
        if late == 1:
            _update(fleet, rng)


def _update(fleet, rng):
    while fleet.gradients:
        is_rounded, of_gradient = rng.random(2) < [0.3, 0.5]
        fleet.update(of_gradient=bool(of_gradient), stochastic_rounding=bool(is_rounded))
