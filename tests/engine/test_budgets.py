"""What a call asks of the device, whatever the number of its tables.

A budget is the most that is allowed: whoever needs less lowers it. Those for a GPU are counted on
the simulated one. Tables differ in dimension, and those of one call in kind where it says so.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.initializer import Initializer
from sok_lite.engine.optimizers import SGD, Adagrad, Adam
from sok_lite.engine.table import make_table
from sok_lite.engine.update_rows import Update
from tests.support.call_counts import Counts, counts_of, counts_of_ranks
from tests.support.exchange_facts import OWNERS, rule_of
from tests.support.meeting_transport import run_ranks_by_transport
from tests.support.parts import Part, by_part, forward_parts
from tests.support.simt.backend import is_simulated
from tests.support.steps import apply_updates

ADAM = (Adam(),)
ITEMS = 4  # of each table: more would count the same and take longer
WARM = np.arange(-20, 0)  # keys that a table has before; an evicting one is full of them
_ROOMY = {"var_type": "hybrid", "init_capacity": 1 << 10, "max_capacity": 1 << 10}
_FULL = {"init_capacity": 16, "max_capacity": 16, "on_refused": "ignore"}
KINDS = {
    "hbm": {"var_type": "hbm"},
    "float16": {"var_type": "hbm", "dtype": "float16"},
    "bfloat16": {"var_type": "hbm", "dtype": "bfloat16"},
    "hybrid": _ROOMY,
    "evicting": _ROOMY | _FULL,
    "admitting": _ROOMY | {"enter_threshold": 2},
    "growing": _ROOMY | {"max_capacity": 1 << 20},
    "growing, admitting": _ROOMY | {"max_capacity": 1 << 20, "enter_threshold": 2},
    "two tiers": _ROOMY | {"max_hbm_for_vectors": 1 / 2**22},
}
SENT_AS_BFLOAT16 = "hbm, sent as bfloat16"


@pytest.fixture(autouse=True)
def small_far_chunks(backend, monkeypatch):
    """Of hundreds of tables, each column would have 64 MB at least outside of the GPU."""
    monkeypatch.setattr(backend, "far_chunk_bytes", 1 << 12)


def _options(kind):
    if kind == SENT_AS_BFLOAT16:
        return {"var_type": "hbm", "rounds_gradients": True}
    return KINDS[kind]


class Job:
    """Calls over `num_tables` tables, of some kinds and owners in turn."""

    def __init__(self, backend, num_tables, kinds, comm=None, owners=("mod",)):
        self.backend, self.comm = backend, comm or SingleCommunicator()
        self.rules = [rule_of(name, self.comm.size) for name in owners]
        self.tables = [self._table(i, **_options(kinds[i % len(kinds)])) for i in range(num_tables)]
        self.weights = None
        self.number = self.next = 0
        self.splits = self.array([0, 1, 1, ITEMS])
        self.known = self.array([1, 2, 1, 3])
        self.grads = [backend.xp.ones((3, table.dim), np.float32) for table in self.tables]
        warm, splits = self.array(WARM), self.array([0, *[WARM.size] * 3])
        for _ in range(2):
            self.forward([Part(table, warm, splits, None, "sum") for table in self.tables])

    def _table(self, number, var_type, **options):
        initializer = Initializer("uniform", -1, 1)
        options |= {"name": f"t{number}", "initializer": initializer}
        options["owner"] = self.rules[number % len(self.rules)]
        return make_table(var_type, self.backend, (4, 3, 8)[number % 3], **options)

    def array(self, values):
        return self.backend.from_host(np.array(values))

    def new(self):
        """Two known keys, one that the last call saw first, and one that nobody has seen."""
        self.next += 1
        return self.array([1, 2, 9 + self.next, 10 + self.next])

    def parts(self, keys, **options):
        return [
            Part(table, keys, self.splits, self.weights, "mean", **options) for table in self.tables
        ]

    def forward(self, parts):
        return forward_parts(self.backend, self.comm, parts)[1]

    def backward(self, context):
        return by_part(lookup.backward(self.backend, self.grads, context))


# ---- calls: what each of them does before it is counted, and what is counted


def forward_of(job, keys, **options):
    parts = job.parts(keys, **options)
    return lambda: job.forward(parts)


def known(job, **options):
    return forward_of(job, job.known, **options)


def new(job, **options):
    return forward_of(job, job.new(), **options)


def backward(job):
    context = job.forward(job.parts(job.known))
    return lambda: job.backward(context)


def weighted(call):
    def with_weights(job):
        job.weights = job.backend.xp.ones(ITEMS, np.float32)
        return call(job)

    return with_weights


def update(job, rules=ADAM, of_gradient=True, **options):
    """The keys are those of the gradient before it, which promises that none repeats."""
    gradients = job.backward(job.forward(job.parts(job.known)))
    arrays = [(each.keys, each.row_grads, None, of_gradient) for each in gradients]
    return _updating(job, rules, arrays, options)


def update_others(job):
    """The keys are none of a gradient: some repeat."""
    grads = [job.backend.xp.ones((ITEMS, table.dim), np.float32) for table in job.tables]
    return _updating(job, ADAM, [(job.known, each) for each in grads], {})


def update_some(job):
    """Some of the keys of a gradient."""
    gradients = job.backward(job.forward(job.parts(job.known)))
    return _updating(job, ADAM, [(each.keys[1:], each.row_grads[1:]) for each in gradients], {})


def update_new(job):
    """Two of four keys have no row."""
    gradients = job.backward(job.forward(job.parts(job.new(), insert=False)))
    return _updating(job, ADAM, [(*each[:2], None, True) for each in gradients], {})


def _updating(job, rules, gradients, options):
    job.number += 1
    updates = [
        Update(table, rules[i % len(rules)], *gradient)
        for i, (table, gradient) in enumerate(zip(job.tables, gradients, strict=True))
    ]
    return lambda: apply_updates(updates, 0.1, job.number, **options)


# ---- budgets


class Budget(NamedTuple):
    """The most that a call may ask for.

    Attributes:
      kinds: of its tables.
      call: job -> the call that is counted.
      on_cpu: launches on a CPU.
      launches, operations, memsets, waits: on a GPU, see `Counts`.
      tables: with how many tables it is counted.
    """

    kinds: tuple[str, ...]
    call: Callable
    on_cpu: int
    launches: int
    operations: int
    memsets: int
    waits: int
    tables: tuple[int, ...] = (1, 26, 300)


ALL = ("hbm", "hybrid", "two tiers")
FORMATS = ("hbm", "float16", "bfloat16")
ONE, MIXED = ("hbm",), tuple(KINDS)
# 300 tables take half a minute on the simulated GPU: so many of all kinds together are enough.
_FEW = (26,)


def cases(budgets):
    """The names of budgets with each number of tables."""
    many = pytest.mark.full_only("300 tables take half a minute on the simulated GPU")
    return [
        pytest.param(name, number, marks=many if number == 300 else ())
        for name, budget in budgets.items()
        for number in budget.tables
    ]


BUDGETS = {
    # What a GPU does beside launches: keys and splits are joined, bytes are set.
    "forward, known": Budget(ALL, known, 1, 2, 2, 1, 1),
    "forward, known, three formats": Budget(FORMATS, known, 1, 4, 2, 1, 1, _FEW),
    "forward, known, weighted": Budget(ALL, weighted(known), 2, 3, 2, 1, 1, _FEW),
    "forward, new, hbm": Budget(ONE, new, 5, 6, 2, 1, 2, _FEW),
    "forward, new, hybrid": Budget(("hybrid",), new, 9, 9, 2, 2, 3, _FEW),
    "forward, new, two tiers": Budget(("two tiers",), new, 11, 11, 2, 2, 3, _FEW),
    "forward, new, evicting": Budget(("evicting",), new, 8, 8, 2, 2, 3, _FEW),
    "forward, new, admitting": Budget(("admitting",), new, 17, 17, 4, 2, 5, _FEW),
    "forward, new, growing": Budget(("growing",), new, 9, 9, 2, 2, 3, _FEW),
    "forward, new, growing, admitting": Budget(("growing, admitting",), new, 17, 17, 4, 2, 5, _FEW),
    "forward, new, all kinds": Budget(MIXED, new, 26, 28, 4, 2, 5),
    "forward, missing": Budget(ALL, lambda job: new(job, insert=False), 7, 7, 2, 2, 2, _FEW),
    "forward, missing, zeros": Budget(
        ALL, lambda job: new(job, insert=False, missing="zeros"), 1, 2, 2, 1, 1, _FEW
    ),
    # It waits for the number of distinct keys, the length of what TensorFlow is given. A GPU sorts
    # the items by one launch for each 9 bits of their number.
    "backward": Budget(ALL, backward, 7, 7, 0, 1, 1),
    "backward, three formats": Budget(FORMATS, backward, 7, 7, 0, 1, 1, _FEW),
    "backward, weighted": Budget(ALL, weighted(backward), 8, 8, 0, 1, 1, _FEW),
    "update": Budget(ALL, update, 2, 2, 0, 1, 0),
    "update, two rules": Budget(
        ALL, lambda job: update(job, (SGD(), Adagrad())), 3, 3, 0, 1, 0, _FEW
    ),
    "update, three formats": Budget(FORMATS, update, 4, 4, 0, 1, 0, _FEW),
    "update, stochastic rounding": Budget(
        FORMATS, lambda job: update(job, stochastic_rounding=True), 4, 4, 0, 1, 0, _FEW
    ),
    "update, refusing what is not finite": Budget(
        ALL, lambda job: update(job, on_nonfinite="error"), 3, 3, 0, 2, 1, _FEW
    ),
    "update, not known to be distinct": Budget(
        ALL, lambda job: update(job, of_gradient=False), 2, 2, 0, 2, 1, _FEW
    ),
    # It waits for the number of distinct keys, and then for whether some have no row; and it notes
    # that keys change which may not be those of the last lookup.
    "update, other keys": Budget(ALL, update_others, 9, 10, 1, 4, 2, _FEW),
    "update, some keys": Budget(ALL, update_some, 7, 6, 1, 3, 2, _FEW),
    "update, new keys": Budget(ALL, update_new, 15, 14, 1, 5, 5, _FEW),
}
# Of each table: bytes to the device, which is told all in launches, and to the host.
BYTES = 0, 400


def within(backend, counts, budget, num_tables, num_bytes):
    """Asserts that a call asked for no more than it may."""
    if not is_simulated(backend):
        assert counts.launches <= budget.on_cpu, counts
        return
    most = Counts(
        # One for all tables whose arguments it has room for; those of `find` for 185.
        budget.launches * (1 + num_tables // 185),
        budget.operations,
        budget.memsets,
        budget.waits,
        *(each * (num_tables + 1) for each in num_bytes),
    )
    over = {
        name: f"{asked} of {allowed}"
        for name, asked, allowed in zip(Counts._fields, counts, most, strict=True)
        if asked > allowed
    }
    assert not over


def check(backend, name, num_tables):
    """Asserts that a call of one rank asks for no more than its budget."""
    budget = BUDGETS[name]
    job = Job(backend, num_tables, budget.kinds)
    for _ in range(3):  # kernels are compiled, states and memory are there
        budget.call(job)()
    call = budget.call(job)
    capacities = [table.capacity for table in job.tables]
    before = [(table.size, table.num_evicted) for table in job.tables]
    within(backend, counts_of(backend, call), budget, num_tables, BYTES)
    assert [table.capacity for table in job.tables] == capacities, "an index grew"
    for table, (size, num_evicted) in zip(job.tables, before, strict=True):
        has_evicted = table.num_evicted > num_evicted
        has_inserted = table.size + table.num_evicted > size + num_evicted
        assert has_inserted == (budget.call in (new, update_new)), name
        assert has_evicted == (name == "forward, new, evicting") or name.endswith("all kinds")


# ---- several ranks


class BudgetOfRanks(NamedTuple):
    """The same of two ranks together; and of each its collectives."""

    call: Callable
    on_cpu: int
    launches: int
    operations: int
    memsets: int
    waits: int
    collectives: int
    tables: tuple[int, ...] = _FEW
    owners: tuple[str, ...] = ("mod",)
    by_transport: bool = False
    kinds: tuple[str, ...] = ALL


_MANY = (26, 300)
BUDGETS_OF_RANKS = {
    "forward, known": BudgetOfRanks(known, 20, 24, 16, 8, 8, 2, _MANY),
    # A GPU numbers the keys by their tables: a launch more than a CPU has. Where rules differ, the
    # keys of each but tables on one rank are taken and their owners put back: two array operations
    # a rank, and on a GPU a launch. A function gets a copy of its keys: one array operation a rank;
    # whether it gave ranks is one wait.
    "forward, known, some on one rank": BudgetOfRanks(
        known, 20, 28, 20, 8, 8, 2, owners=("mod", "rank 0", "last rank")
    ),
    "forward, known, each on one rank": BudgetOfRanks(
        known, 20, 26, 12, 8, 8, 2, owners=("rank 0", "last rank")
    ),
    "forward, known, all owners": BudgetOfRanks(
        known, 20, 32, 72, 8, 10, 2, _MANY, owners=tuple(OWNERS)
    ),
    "forward, new": BudgetOfRanks(new, 31, 34, 16, 9, 10, 2),
    "backward": BudgetOfRanks(backward, 22, 26, 0, 4, 4, 1),
    # One launch of each rank rounds, and one widens.
    "backward, sent as bfloat16": BudgetOfRanks(
        backward, 26, 30, 0, 4, 4, 1, kinds=(SENT_AS_BFLOAT16,)
    ),
    # By a transport of GPUs keys are packed and unpacked on the device; nothing is copied by the
    # host but counts. It waits as often as by the host, and once before each message is carried.
    "forward, known, by a transport": BudgetOfRanks(known, 24, 28, 24, 8, 12, 1, by_transport=True),
    "backward, by a transport": BudgetOfRanks(backward, 22, 26, 2, 4, 6, 0, by_transport=True),
}
BYTES_OF_RANKS, BYTES_BY_TRANSPORT = (440, 600), (440, 850)


def check_ranks(backend, name, num_tables):
    """Asserts that a call of two ranks asks for no more than its budget."""
    budget = BUDGETS_OF_RANKS[name]

    def prepare(comm):
        job = Job(backend, num_tables, budget.kinds, comm, budget.owners)
        for _ in range(3):
            budget.call(job)()
        return budget.call(job)

    ways, num_bytes = (), BYTES_OF_RANKS
    if budget.by_transport:
        ways = (partial(run_ranks_by_transport, backend=backend),)
        num_bytes = BYTES_BY_TRANSPORT
    counts, collectives = counts_of_ranks(backend, 2, prepare, *ways)
    within(backend, counts, budget, num_tables, num_bytes)
    assert collectives.total() <= budget.collectives


# Of a real GPU nobody counts what is asked.
@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_no_call_launches_more_on_a_cpu_than_its_budget(backend):
    for name in BUDGETS:
        check(backend, name, 26)
    for name in BUDGETS_OF_RANKS:
        check_ranks(backend, name, 26)


@pytest.mark.parametrize("backend", ["simt"], indirect=True)
@pytest.mark.parametrize(("name", "num_tables"), cases(BUDGETS))
def test_a_call_of_one_rank_asks_a_gpu_for_no_more_than_its_budget(backend, name, num_tables):
    check(backend, name, num_tables)


@pytest.mark.parametrize("backend", ["simt"], indirect=True)
@pytest.mark.parametrize(("name", "num_tables"), cases(BUDGETS_OF_RANKS))
def test_a_call_of_two_ranks_asks_a_gpu_for_no_more_than_its_budget(backend, name, num_tables):
    check_ranks(backend, name, num_tables)


@pytest.mark.parametrize("backend", ["simt"], indirect=True)
@pytest.mark.parametrize("owners", [("mod",), tuple(OWNERS)], ids=["mod", "all owners"])
def test_a_step_by_a_transport_copies_as_much_for_few_keys_as_for_many(backend, owners):
    """Counts, addresses and words of control: nothing that has an entry for each key."""

    def step_of(num_keys, comm):
        job = Job(backend, len(OWNERS), ("hbm", "hybrid"), comm, owners)
        job.known, job.splits = job.array(np.arange(num_keys)), job.array([0, 1, 1, num_keys])

        def step():
            gradients = job.backward(job.forward(job.parts(job.known)))
            arrays = [(each.keys, each.row_grads, None, True) for each in gradients]
            _updating(job, ADAM, arrays, {})()

        for _ in range(2):
            step()
        return step

    run = partial(run_ranks_by_transport, backend=backend)
    few, many = (counts_of_ranks(backend, 2, partial(step_of, n), run)[0] for n in (8, 40))
    assert (few.to_device, few.to_host) == (many.to_device, many.to_host)
    assert few.to_device > 0
