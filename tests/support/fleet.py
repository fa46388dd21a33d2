"""Tables of mixed kinds that are called together, beside what must be the same.

A `Fleet` makes every call three times: for all tables at once; for a twin of each table alone, by
one thread of a CPU; and for a dict of each in plain Python. Outputs, gradients and the whole state
of a table and its twin must be equal to the last bit, whatever the backend of the fleet and its
threads. Only of a full table it depends on the threads which of several keys evicts which: unless
one thread does all, such a table is compared with its dict alone, which is told what went.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from sok_lite.backend.cpu import CpuBackend
from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.update_rows import Update
from tests.support import reference_updates, step_oracle
from tests.support.fleet_dict import FleetDict
from tests.support.fleet_kinds import KINDS, Part, drawn_from, made, some_keys, treatment
from tests.support.parts import Part as LookupPart
from tests.support.parts import by_part, carried, forward_parts
from tests.support.steps import apply_updates
from tests.support.table_audit import audit, found_in
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
    """Gradients of which nothing was updated yet.

    Attributes:
      by_table: number of a table -> numbers of its parts.
      parts: of each part its keys (k,) int64 and their gradients (k, dim).
    """

    by_table: dict
    parts: list


class Fleet:
    """Tables, their twins and their dicts.

    Attributes:
      tables, twins, dicts: one behind another.
      pending: forwards whose backward is still to come.
      gradients: those that wait for their update.
      is_exact: whether one thread does all, so that full tables equal their twins as well.
      happened: names of what came to pass, for tests that ask whether anything did.
    """

    def __init__(self, backend, kinds):
        self.backend, self.twin_backend = backend, threads(1)
        self.is_exact = backend.name == "cpu" and backend.num_threads == 1
        self.comm = SingleCommunicator()
        self.kinds = [KINDS[number] for number in kinds]
        self.tables = [made(kind, backend, i) for i, kind in enumerate(self.kinds)]
        self.twins = [made(kind, self.twin_backend, i) for i, kind in enumerate(self.kinds)]
        self.dicts = [FleetDict(kind, f"t{i}") for i, kind in enumerate(self.kinds)]
        self.pending, self.gradients = [], []
        self.step = 0
        self.happened = set()

    def is_twin(self, number):
        """Whether a table must equal its twin."""
        return self.is_exact or not self.dicts[number].is_full_once

    # ---------------------------------------------------------------- calls

    def forward(self, parts, seed, repack=False):
        """Looks up in all tables at once, and in each twin alone."""
        rng = np.random.default_rng(seed)
        asked = [drawn_from(part, self.kinds[part.number], rng) for part in parts]
        treatments = {part.number: treatment(rng) for part in parts}
        outputs, context = self._forward(self.backend, self.tables, asked, treatments, repack)
        by_table = {}
        for i, each in enumerate(asked):
            by_table.setdefault(each.part.number, []).append(i)
        twins = {}
        for number, places in by_table.items():
            table, oracle = self.tables[number], self.dicts[number]
            its = [asked[i] for i in places]
            items = [key for each in its for row in each.ragged for key in row]
            before = dict(oracle.counts)
            insert, missing, ratio = treatments[number]
            held, rows = content(table)
            oracle.look_up(items, insert, ratio, set(held))
            self._note(number, before)
            self._same_rows(number, held, rows)
            for i, each in zip(places, its, strict=True):
                given = self._expected(oracle, each, missing)
                np.testing.assert_allclose(outputs[i], given[0], rtol=1e-5, atol=given[1])
            if self.is_twin(number):
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

    def backward(self, seed, which=0):
        """Takes one of the pending forwards back; its gradients then wait for their update."""
        asked, context, twins = self.pending.pop(which)
        rng = np.random.default_rng(seed)
        grads = [
            rng.integers(-3, 4, (len(each.ragged), self.kinds[each.part.number].dim))
            for each in asked
        ]
        grads = [each.astype(np.float32) for each in grads]
        gradients = _backward(self.backend, grads, context)
        by_table = {}
        for i, (each, gradient) in enumerate(zip(asked, gradients, strict=True)):
            by_table.setdefault(each.part.number, []).append(i)
            total = step_oracle.key_gradients(each.ragged, grads[i], *_way(each))
            size = step_oracle.key_gradients(each.ragged, abs(grads[i]), *_way(each))
            assert gradient[0].tolist() == list(total), "keys in order of first occurrence"
            for key, row in zip(total, gradient[1], strict=True):
                np.testing.assert_allclose(row, total[key], rtol=1e-5, atol=1e-5 * size[key].max())
        for number in twins:
            places = by_table[number]
            given = [grads[i] for i in places]
            of_twin = _backward(self.twin_backend, given, twins[number])
            for i, gradient in zip(places, of_twin, strict=True):
                for one, other in zip(gradients[i], gradient, strict=True):
                    np.testing.assert_array_equal(one, other)
        self.gradients.append(_Gradients(by_table, [gradient[:2] for gradient in gradients]))

    def update(self, which=0, of_gradient=False, **options):
        """Updates rows by gradients that wait: of all tables at once, and of each twin alone."""
        by_table, gradients = self.gradients.pop(which)
        self.step += 1
        rate = 0.05
        before = {number: self._rows_of(number, by_table, gradients) for number in by_table}
        order = [i for places in by_table.values() for i in places]
        number_of = {i: number for number, places in by_table.items() for i in places}

        def updates(backend, tables, places):
            made = []
            for i in places:
                table, rule = tables[number_of[i]], self.kinds[number_of[i]].rule
                keys, grads = map(backend.from_host, gradients[i])
                keys = keys if of_gradient else table.key_dtype.from_int64(backend.xp, keys)
                made.append(Update(table, rule, keys, grads, of_gradient=of_gradient))
            return made

        apply_updates(updates(self.backend, self.tables, order), rate, self.step, **options)
        for number, places in by_table.items():
            if self.is_twin(number):
                given = updates(self.twin_backend, self.twins, places)
                apply_updates(given, rate, self.step, **options)
            held, rows = content(self.tables[number])
            counts = dict(self.dicts[number].counts)
            self.dicts[number].begin_update(list(before[number]), set(held))
            self._note(number, counts)
            self._check_update(number, before[number], rate, dict(zip(held, rows, strict=True)))
            self._same_rows(number, held, rows)
        self.happened.add("update")

    def _rows_of(self, number, by_table, gradients):
        """{key: (row, states, gradient)} of the keys of an update, before it."""
        total = {}
        for i in by_table[number]:
            for key, row in zip(gradients[i][0].tolist(), gradients[i][1], strict=True):
                total[key] = total.get(key, 0) + row.astype(np.float64)
        oracle, table = self.dicts[number], self.tables[number]
        keys = list(total)
        rows = table.backend.from_host(found_in(table.index, np.array(keys, np.int64)))
        states = {}
        for name, initial in self.kinds[number].rule.states.items():
            states[name] = np.full((len(keys), oracle.dim), initial, np.float64)
            if name in table.store.state_names:
                held = np.array([key in oracle.rows for key in keys], bool)
                kept = table.backend.to_host(table.store.read(rows, name)).astype(float)
                states[name][held] = kept[held]
        return {
            key: (
                oracle.rows.get(key, oracle.first_row(key)),
                {name: state[i] for name, state in states.items()},
                total[key],
            )
            for i, key in enumerate(keys)
        }

    def _check_update(self, number, before, rate, now):
        """Compares with the rule in float64; then the dict takes the bits of the table."""
        oracle, rule = self.dicts[number], self.kinds[number].rule
        update = getattr(reference_updates, type(rule).__name__.lower())
        # To the next row that the format can keep, on either side.
        tolerance = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[self.kinds[number].dtype]
        for key, (row, states, grad) in before.items():
            if key not in oracle.rows:
                continue  # it was refused, or not admitted
            w = row.astype(np.float64)[None]
            states = {name: state[None] for name, state in states.items()}
            update(w, states, grad[None], rate, self.step, **dataclasses.asdict(rule))
            np.testing.assert_allclose(now[key], w[0], rtol=tolerance, atol=2e-5)
            oracle.rows[key] = now[key]

    # ---------------------------------------------------------------- between calls

    def change(self, number, what, seed):
        """Does something to one table, its twin and its dict."""
        rng = np.random.default_rng(seed)
        oracle = self.dicts[number]
        known = rng.permutation(list(oracle.rows) or [0])[:20].astype(np.int64)
        keys = np.concatenate([known, some_keys(self.kinds[number], rng, 10, 50)])
        tables = [self.tables[number], *([self.twins[number]] if self.is_twin(number) else [])]
        results = [getattr(self, f"_{what}")(table, keys) for table in tables]
        held, rows = content(self.tables[number])
        if what == "erase":
            expected = oracle.erase(keys.tolist())
        elif what == "expire":
            expected = oracle.expire(2)
        elif what == "clear":
            expected = oracle.clear()
        elif what == "insert_or_assign":
            expected = None
            oracle.now += 1
            values = oracle.rounded(_values(keys, oracle.dim))
            last = dict(zip(keys.tolist(), values, strict=True))
            before = dict(oracle.counts)
            new = {key: row for key, row in last.items() if key not in oracle.rows}
            oracle.take(list(last), new, set(held))
            oracle.assign(list(last), list(last.values()))
            self._note(number, before)
        else:
            expected = None
            if what == "assign":
                oracle.assign(keys.tolist(), oracle.rounded(_values(keys, oracle.dim)))
        assert results == [expected] * len(results)
        self.happened.add(what)
        self._same_rows(number, held, rows)

    def _erase(self, table, keys):
        return table.erase(_given(table, keys))

    def _expire(self, table, keys):
        return table.expire(num_lookups=2)

    def _clear(self, table, keys):
        return table.clear()

    def _insert_or_assign(self, table, keys):
        values = table.store.to_storage(table.backend.from_host(_values(keys, table.dim)))
        return table.insert_or_assign(_given(table, keys), values)

    def _assign(self, table, keys):
        values = table.store.to_storage(table.backend.from_host(_values(keys, table.dim)))
        return table.assign(_given(table, keys), values)

    def _reserve(self, table, keys):
        return table.reserve(300)

    def _next_epoch(self, table, keys):
        if getattr(table, "options", None) and "Epoch" in table.options.evict_strategy:
            table.epoch += 1

    # ---------------------------------------------------------------- what is compared

    def _same_rows(self, number, held, rows):
        """The table holds what its dict does, to the bit."""
        oracle = self.dicts[number]
        strange, lost = set(held) - oracle.rows.keys(), oracle.rows.keys() - set(held)
        assert not strange and not lost, f"table {number}: {strange} too many, {lost} missing"
        expected = np.array([oracle.rows[key] for key in held], np.float32)
        np.testing.assert_array_equal(rows, expected.reshape(rows.shape), f"table {number}")

    def check(self):
        """All that there is of each table: its insides, its counters, and its twin's state."""
        for number, (table, oracle) in enumerate(zip(self.tables, self.dicts, strict=True)):
            audit(table)
            counts = table.statistics()._asdict()
            assert {name: counts[f"{name}_total"] for name in oracle.counts} == oracle.counts
            state = State.of(table)
            assert state.now == oracle.now
            seen = {_signed(key): stamp for key, (stamp, _) in state.seen.items()}
            assert seen == oracle.seen
            pending = {_signed(key): list(place) for key, place in state.pending.items()}
            assert pending == oracle.pending
            if self.is_twin(number):
                twin = State.of(self.twins[number])
                if not self.is_exact:  # where free rows and slots lie is up to the threads
                    twin = twin._replace(**{name: getattr(state, name) for name in _PLACES})
                assert state == twin
            self._note_places(table)

    def _note(self, number, before):
        for name, count in self.dicts[number].counts.items():
            if count > before[name]:
                self.happened.add(name)

    def _note_places(self, table):
        if table.index.num_rehashes:
            self.happened.add("growth")
        near = table.store.near_rows
        if near is not None and table.store.num_rows > near:
            self.happened.add("far rows")
            if table.row_version:
                self.happened.add("new places")

    # ---------------------------------------------------------------- arguments

    def _expected(self, oracle, asked, missing):
        """The output of a part in float64, and how far a sum of float32 may be from it."""
        zeros = np.zeros(oracle.dim, np.float32)

        def row_of(key):
            if key in oracle.rows:
                return oracle.rows[key]
            return oracle.first_row(key) if missing == "initial" else zeros

        given = (asked.part.combiner, oracle.dim, asked.weights)
        expected = step_oracle.outputs(asked.ragged, row_of, *given)
        sizes = step_oracle.outputs(asked.ragged, lambda key: abs(row_of(key)), *given)
        return expected, 1e-5 * max(1e-6, sizes.max(initial=0))


def _backward(backend, grads, context):
    given = [backend.from_host(each) for each in grads]
    gradients = lookup.backward(backend, given, context)
    return [
        tuple(None if part is None else backend.to_host(part) for part in gradient)
        for gradient in by_part(gradients)
    ]


def _way(asked):
    return asked.part.combiner, asked.weights


def _signed(key):
    """A key of any type as that of int64 with its bits."""
    return key - 2**64 if key >= 2**63 else key


def _values(keys, dim):
    """Rows that depend on their place: the last of a repeated key is another than the first."""
    return (np.arange(keys.size)[:, None] * 0.37 + np.arange(dim)).astype(np.float32)


def _given(table, keys):
    return table.key_dtype.from_int64(table.backend.xp, table.backend.from_host(keys))


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
