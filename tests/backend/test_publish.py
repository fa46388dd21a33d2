"""Actions that are published run through, whatever happens meanwhile."""

import importlib
from functools import partial

import numpy as np
import pytest

from sok_lite.backend.publish import NOTHING, Launch, plan_set, publish
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.update_rows import Update
from tests.support.helpers import new_table
from tests.support.steps import apply_updates
from tests.support.table_audit import audit

MODULES = [
    "sok_lite.engine.update",
    "sok_lite.engine.optimizer_states",
    "sok_lite.engine.rows.memory",
    "sok_lite.engine.rows.store",
    "sok_lite.engine.rows.tiers",
    "sok_lite.engine.table.clock",
    "sok_lite.engine.table.filling",
    "sok_lite.engine.table.finding",
    "sok_lite.engine.table.new_keys",
    "sok_lite.engine.table.det_index",
    "sok_lite.engine.table.hkv_index",
    "sok_lite.engine.table.hkv_insertion",
    "sok_lite.engine.table.index",
    "sok_lite.engine.table.lookups",
    "sok_lite.engine.table.removal",
    "sok_lite.engine.table.single_lookup",
    "sok_lite.engine.table.stages",
    "sok_lite.engine.table.writes",
]


class Thing:
    count = 0


def test_actions_are_taken_in_order():
    thing, seen = Thing(), []
    publish(
        [*plan_set(thing, count=1, name="a"), NOTHING, *(partial(seen.append, i) for i in "xyz")]
    )
    assert (thing.count, thing.name, seen) == (1, "a", ["x", "y", "z"])
    publish([])


class Recorder:
    """A backend that notes what is launched and when."""

    def __init__(self):
        self.done = []

    def joined(self, kernel, parts):
        return [partial(self.done.append, (kernel, list(parts)))]

    def list(self, text):
        """Launches "a1 b2": kernel a with part 1, ...; "+" is an action that is none."""
        return [
            partial(self.done.append, word) if word[0] == "+" else Launch(self, word[0], word[1:])
            for word in text.split()
        ]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (["a1 b1", "a2 b2"], ["a 1 2", "b 1 2"]),
        # b waits for the list that comes to it later.
        (["a1 b1", "c2 b2"], ["a 1", "c 2", "b 1 2"]),
        (["b1", "c2 b2", "c3 d3 b3"], ["c 2 3", "d 3", "b 1 2 3"]),
        # Each other's later kernel: none can wait.
        (["a1 b1", "b2 a2"], ["a 1", "b 1 2", "a 2"]),
        (["a1 a2", "a3"], ["a 1 3", "a 2"]),
        (["+x a1 +y b1 +z", "a2 +v", "+w"], ["+x", "+w", "a 1 2", "+y", "+v", "b 1", "+z"]),
        ([], []),
        ([""], []),
    ],
)
def test_launches_of_one_kernel_are_one_and_each_list_keeps_its_order(lists, expected):
    recorder = Recorder()
    publish(*(recorder.list(text) for text in lists))
    done = [x if isinstance(x, str) else " ".join([x[0], *x[1]]) for x in recorder.done]
    assert done == expected


def test_a_launch_that_cannot_be_packed_leaves_everything_undone():
    class Refuses(Recorder):
        def joined(self, kernel, parts):
            if kernel == "b":
                raise TypeError("arguments")
            return super().joined(kernel, parts)

    recorder = Refuses()
    with pytest.raises(TypeError, match="arguments"):
        publish(recorder.list("+x a1 b1"))
    assert recorder.done == []


def test_a_function_of_pythons_is_no_action():
    with pytest.raises(TypeError):
        publish([lambda: None])


@pytest.fixture
def no_memory(monkeypatch):
    """While actions are published, CPython finds no memory at all. Returns how often they were."""
    testcapi = pytest.importorskip("_testcapi")
    counts = []
    begin, end = partial(testcapi.set_nomemory, 0), partial(testcapi.remove_mem_hooks)

    def published(*lists):
        actions = [action for each in lists for action in each]
        counts.append(len(actions))
        # CPython's lists of free objects would else hide some of what is asked for.
        held = [[{"key": n}, 1.5 * n] for n in range(200)]
        held += [tuple([n] * length) for length in range(1, 9) for n in range(2000)]
        try:
            publish([begin, *actions, end])
        finally:
            testcapi.remove_mem_hooks()
            del held

    for module in MODULES:
        monkeypatch.setattr(importlib.import_module(module), "publish", published)
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {"var_type": "hbm"},
        {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 4096},
        {
            "var_type": "hybrid",
            "max_capacity": 64,
            "max_hbm_for_vectors": 16 * 16 / 2**30,
            "evict_strategy": "kLfu",
            "enter_threshold": 2,
            "on_refused": "ignore",
        },
    ],
    ids=["hbm", "growing", "full"],
)
def test_no_action_needs_memory_of_the_host(backend, no_memory, options):
    if backend.name != "cpu":
        pytest.skip("a launch on a GPU takes a few bytes")
    table = new_table(backend, **options)
    rng = np.random.default_rng(0)
    grads = np.ones((200, 4), np.float32)
    for _ in range(12):
        keys = rng.integers(0, 400, 200)
        table.lookup(keys)
        table.insert_or_assign(keys[:50], grads[:50])
        table.accumulate(keys, grads)
        apply_updates([Update(table, Adam(), keys, grads)], 0.1, 1)
        table.erase(keys[::3])
        table.expire(num_lookups=20)
        audit(table)
    table.clear()
    table.lookup(np.arange(10))
    assert len(no_memory) > 100 and max(no_memory) >= 5
