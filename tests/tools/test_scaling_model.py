"""The scaling model: its keys and bytes are those of real exchanges, its times are as by hand."""

import itertools
import json
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.engine.exchange import return_rows, send_grads, send_keys
from sok_lite.engine.owner import HASH, MOD
from tests.support.exchange_facts import python_owner
from tools import scaling_model
from tools.scaling_machine import H200, Given, Machine
from tools.scaling_model import (
    bytes_a_key,
    least_nodes,
    memory_of,
    placement,
    step_parts,
    step_seconds,
    trip_seconds,
)
from tools.scaling_work import Job, Work, Zipf, key_bytes, row_bytes

OF_KERNELS = ("find and pool", "gradient", "update")

# ---- bytes: a table for each of these, dimension and row dtype
FORMATS = ((16, np.float32), (3, np.float16), (5, np.float32), (1, np.float16))
ROW_SIZES = np.array([dim * np.dtype(dtype).itemsize for dim, dtype in FORMATS])
GRAD_SIZES = np.array([4 * dim for dim, _ in FORMATS])


def keys_of(rank, table):
    """Some distinct keys; the second table of the last rank has none."""
    rng = np.random.default_rng([rank, table])
    return rng.permutation(200)[: 0 if (rank, table) == (1, 1) else 40 + 17 * table + rank]


def counts_by_hand(size, owner):
    """(sender, receiver, table): how many keys travel, in plain Python."""
    counts = np.zeros((size, size, len(FORMATS)), np.int64)
    for sender in range(size):
        for table in range(len(FORMATS)):
            for key in keys_of(sender, table):
                counts[sender, python_owner(int(key), size, "int64", owner), table] += 1
    return counts


def bytes_of_an_exchange(comm, rule):
    """Bytes for each rank in each of the three trips, by what the communicator is given."""
    trips = []
    alltoallv = comm._alltoallv

    def counting(call, rows, splits):
        trips.append(splits.astype(np.int64) * rows.shape[1] * rows.itemsize)
        return alltoallv(call, rows, splits)

    comm._alltoallv = counting
    backend, num_tables = get_backend("cpu"), len(FORMATS)
    keys = [keys_of(comm.rank, table) for table in range(num_tables)]
    sizes = [len(each) for each in keys]
    rules, kinds = [rule] * num_tables, ["int64"] * num_tables
    _, route = send_keys(backend, comm, np.concatenate(keys), sizes, kinds, rules)
    served = [
        np.ones((n, d), dtype) for n, (d, dtype) in zip(route.num_received, FORMATS, strict=True)
    ]
    return_rows(route, served)
    grads = [np.ones((n, d), np.float32) for n, (d, _) in zip(sizes, FORMATS, strict=True)]
    send_grads(route, grads)
    return np.array(trips)


@pytest.mark.parametrize(("owner", "rule"), [("mod", MOD), ("hash", HASH)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_are_those_of_a_real_exchange(size, owner, rule):
    counts = counts_by_hand(size, owner)
    for rank, trips in enumerate(run_ranks(size, lambda comm: bytes_of_an_exchange(comm, rule))):
        expected = [
            key_bytes(counts[rank]),
            row_bytes(counts[:, rank], ROW_SIZES),
            row_bytes(counts[rank], GRAD_SIZES),
        ]
        np.testing.assert_array_equal(trips, expected)


def test_bytes_by_hand():
    counts = np.array([[3, 0], [1, 2]])
    # a tag, the number of tables, two counts, then keys
    assert key_bytes(counts).tolist() == [8 * (4 + 3), 8 * (4 + 3)]
    # 36 bytes fill three lines of 16; 12 bytes one, 128 bytes eight
    assert row_bytes(counts, np.array([12, 64])).tolist() == [48, 16 + 128]


# ---- keys: what is expected, beside draws


def drawn_work(job, ranks, owner, seed):
    """(distinct keys of a rank, owned of a rank, keys of the busiest) of draws, on average."""
    rng = np.random.default_rng(seed)
    num_keys = int(job.keys / job.tables)
    chances = np.arange(1, num_keys + 1) ** -job.exponent
    came, owned, sent = np.zeros(ranks), 0, 0
    for table in range(job.tables):
        # Hashed keys are others in each table; "mod" is of numbers by how frequent they are.
        offset = table * num_keys if owner is HASH else 0
        asked = [
            np.unique(rng.choice(num_keys, job.batch, p=chances / chances.sum()))
            for _ in range(ranks)
        ]
        together = np.concatenate(asked) + offset
        came += np.bincount(owner.owners(together, ranks), minlength=ranks)
        owned += len(np.unique(together)) / ranks
        sent += len(together) / ranks
    return sent, owned, came.max()


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize(("name", "owner"), [("hash", HASH), ("mod", MOD)])
def test_keys_of_a_rank_are_as_many_as_draws_give(name, owner, ranks):
    job = Job(tables=3, keys=3 * 20_000, batch=1000, exponent=1.2, owner=name)
    work = Work(job, ranks)
    drawn = np.mean([drawn_work(job, ranks, owner, seed) for seed in range(5)], axis=0)
    # 5 draws of some thousand keys: the mean is sure to a percent, the largest less so.
    assert work.distinct == pytest.approx(drawn[0], rel=0.01)
    assert work.owned == pytest.approx(drawn[1], rel=0.01)
    assert work.distinct * work.busiest == pytest.approx(drawn[2], rel=0.05)


def test_rare_keys_taken_together_are_as_likely_as_one_by_one(monkeypatch):
    exact = Zipf(100_000, 1.1)
    monkeypatch.setattr("tools.scaling_work._HEAD", 1000)
    grouped = Zipf(100_000, 1.1)
    assert len(grouped.chances) < 2000 < len(exact.chances)
    assert (grouped.chances * grouped.numbers).sum() == pytest.approx(1)
    for draws in (10, 1000, 1e6):
        expected = exact.numbers @ exact.asked(draws)
        assert grouped.numbers @ grouped.asked(draws) == pytest.approx(expected, rel=1e-3)


def test_far_rows_of_even_keys_are_asked_as_often_as_there_are_of_them():
    work = Work(Job(tables=2, keys=2e6, exponent=0.0), 4)
    assert work.far_share(0.5e6) == pytest.approx(0.75, rel=1e-6)
    assert work.far_share(2e6) == 0
    assert Work(Job(tables=2, keys=2e6, exponent=1.2), 4).far_share(0.5e6) < 0.4


# ---- what others have published

DYNAMICEMB = Job(tables=10, keys=10 * 2_648_581, dim=128, batch=104_857, exponent=1.05)
LIMITS_OF_AN_H200 = 3.35 / 4.8  # times that of an H100, by bandwidth


def test_a_published_workload_has_its_published_keys():
    # dynamicemb's corelib/dynamicemb/benchmark: 1,048,570 lookups, 350,280 distinct on average
    work = Work(DYNAMICEMB, 1)
    assert work.items == 1_048_570
    assert work.distinct == pytest.approx(350_280, rel=0.001)


def test_a_cautious_step_takes_what_was_published_and_a_hopeful_one_less():
    # The same: 2.185 ms for forward and backward with Adam on an H100, all rows in its memory.
    published = 2.185e-3 * LIMITS_OF_AN_H200
    cautious, hopeful = (
        sum(step_parts(Work(DYNAMICEMB, 1), H200, end)[part] for part in OF_KERNELS)
        for end in (False, True)
    )
    assert cautious == pytest.approx(published, rel=0.05)
    assert published / 3 < hopeful < published / 2


# ---- memory and time by hand


def plain(**numbers):
    """A machine of round numbers, the same in both cases."""
    names = [field.name for field in fields(Machine)][2:]
    ends = {name: 2 * [numbers.get(name, 1.0)] for name in names}
    given = {name: Given(*each, "", "assumed", "") for name, each in ends.items()}
    return Machine(name="plain", ranks_per_node=8, **given)


def test_memory_by_hand():
    # docs/sizing.md: with Adam and dimension 16, 192 bytes and 31 of index.
    job = Job(keys=1e9, dim=16)
    assert bytes_a_key(job) == 223
    machine = plain(near=80e9, far=250e9)
    assert least_nodes(job, machine, 1, True) == 1
    assert placement(job, machine, 1, True) == (2, (80e9 - 40e9) / 192)
    assert placement(job, machine, 3, True) == (1, 1e9)
    assert placement(replace(job, keys=3e9), machine, 1, True) is None
    assert least_nodes(replace(job, keys=1e11), machine, 1, True) == 35  # 22.3 TB of 640 GB each
    assert least_nodes(replace(job, keys=1e11), machine, 2, True) == 9  # 23.2 TB of 2.64 TB each


def test_trips_by_hand():
    machine = plain(local_link=100.0, network=10.0, local_latency=0.5, latency=2.0, peer=0.125)
    assert trip_seconds(700, 1, machine, True) == 0
    assert trip_seconds(700, 8, machine, True) == 7 + 0.5 + 7 * 0.125
    # 7 of 63 peers are in the node
    assert trip_seconds(630, 64, machine, True) == 56 + 2 + 63 * 0.125
    # 70 for the node, and of 560 for others 7/8 first go to another rank of it
    two_stages = trip_seconds(630, 64, machine, True, is_hierarchical=True)
    assert two_stages == (70 + 490) / 100 + 56 + 0.5 + 2 + 14 * 0.125


def test_a_step_by_hand():
    # Even keys so many that none repeats: 100 items, distinct, of one line a row.
    job = Job(tables=1, keys=1e12, dim=16, batch=100, exponent=0.0, dense=1000)
    machine = plain(accesses=100.0, stream=1e9, dense=1e5, host_alone=0.25, framework=0.5)
    parts = step_parts(Work(job, 1), machine, True)
    by_hand = {
        "find and pool": 2.0,  # a line of the index and a row
        "gradient": 2.0,
        "update": 3.0,  # a row and two states
        "dense model": 6.0,  # 6 for each parameter and sample
        "host": 0.25,
        "framework": 0.5,
    }
    assert parts == pytest.approx(by_hand, rel=1e-6)
    assert step_seconds(parts, is_hopeful=False) == pytest.approx(13.75, rel=1e-6)
    assert step_seconds(parts, is_hopeful=True) == pytest.approx(13.5, rel=1e-6)


# ---- what must be so


RANKS = (2, 8, 64, 512)


@pytest.mark.parametrize("owner", ["hash", "mod"])
def test_more_ranks_own_fewer_keys_each_and_send_more(owner):
    works = [Work(Job(owner=owner), ranks) for ranks in RANKS]
    for fewer, more in itertools.pairwise(works):
        assert fewer.distinct == more.distinct
        assert fewer.owned > more.owned
        assert 1 < fewer.busiest < more.busiest
        assert fewer.row_trip < more.row_trip
        assert fewer.key_trip < more.key_trip


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_what_makes_a_step_shorter(ranks):
    def seconds(is_hopeful=False, **job):
        parts = step_parts(Work(Job(**job), ranks), H200, is_hopeful)
        assert all(each >= 0 for each in parts.values())
        return step_seconds(parts, is_hopeful)

    assert seconds(is_hopeful=True) < seconds()
    assert seconds(batch=4096) < seconds() < seconds(dim=128)
    assert seconds(row_itemsize=2) < seconds()
    if ranks > 1:
        assert seconds(grad_itemsize=2) < seconds()
        work, half = (Work(Job(grad_itemsize=size), ranks) for size in (4, 2))
        assert half.grad_trip == work.grad_trip / 2
        assert half.row_trip == work.row_trip


def test_smaller_rows_take_fewer_nodes_and_two_tiers_fewer_still():
    jobs = [Job(dim=16), Job(dim=64, row_itemsize=2), Job(dim=64), Job(dim=128)]
    found = [memory_of(job, H200) for job in jobs]
    for end in ("cautious", "hopeful"):
        for tiers in (1, 2):
            nodes = [each[f"nodes_{tiers}_tiers_{end}"] for each in found]
            assert nodes == sorted(set(nodes))
        assert all(each[f"nodes_2_tiers_{end}"] < each[f"nodes_1_tiers_{end}"] for each in found)


def test_what_is_assumed_is_said_with_its_source(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "model --explain --parts --ranks 1 64".split())
    scaling_model.main()
    text = capsys.readouterr().out
    for machine in (H200, scaling_model.A):
        for field in fields(machine):
            given = getattr(machine, field.name)
            if isinstance(given, Given):
                assert given.kind in {"published", "measured", "counted", "derived", "assumed"}
                assert given.source
                assert machine is not H200 or given.source in text
    results = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]
    assert [each["case"] for each in results] == ["memory", "step", "step"]
    assert results[1]["tiers_hopeful"] is None  # 80 TB do not fit into one GPU
    assert 0 < results[2]["ms_hopeful"] < results[2]["ms_cautious"]
