"""Rows in a real Redis: one server, the master of a sentinel, and a cluster of two nodes."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sok_lite.dynamic_embedding.redis_settings import make_settings
from sok_lite.dynamic_embedding.redis_store import Column, RedisStore
from tests.support import redis_server

if redis_server.unavailable() is not None:
    pytest.skip(f"no Redis: {redis_server.unavailable()}", allow_module_level=True)

import redis

I64 = np.iinfo(np.int64)
KEYS = np.int64([5, -7, 0, 2**40, I64.max, I64.min])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with redis_server.server(tmp_path_factory.mktemp("server")) as port:
        yield {"redis_host_port": port}


@pytest.fixture(scope="module")
def watched(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentinel") / "folder"
    with redis_server.sentinel(folder, alone["redis_host_port"], "mine") as port:
        yield {"redis_connection_mode": 1, "redis_host_port": port, "redis_master_name": "mine"}


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    with redis_server.cluster(tmp_path_factory.mktemp("cluster")) as ports:
        given = {"redis_host_ip": ["127.0.0.1"] * len(ports), "redis_host_port": ports}
        yield {"redis_connection_mode": 0, **given}


@pytest.fixture(params=["alone", "watched", "clustered"])
def given(request):
    """Settings of a Redis of each kind."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def make_store(given, request):
    """Makes stores of a name of this test's own."""
    stores = []

    def make(name="t", row_bytes=12, num_buckets=256, **settings):
        settings = make_settings({"model_tag_runtime": request.node.name, **given, **settings})
        stores.append(RedisStore(settings, name, row_bytes, num_buckets))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def rows_of(keys, row_bytes=12):
    """Rows that tell their key; zeros at their ends, which strings of NumPy would lose."""
    rows = np.zeros((len(keys), row_bytes), np.uint8)
    rows[:, : row_bytes - 2] = np.random.default_rng(1).integers(0, 256, row_bytes - 2)
    rows[:, 0] = np.asarray(keys) % 251
    return rows


def contents(store):
    pieces = list(store.export())
    keys = [key for piece, _ in pieces for key in piece.tolist()]
    assert len(keys) == len(set(keys))
    rows = [row.tobytes() for _, piece in pieces for row in piece]
    return dict(zip(keys, rows, strict=True))


def test_many_calls_give_what_a_dict_gives(make_store):
    store, oracle = make_store(num_buckets=3, keys_sending_size=5), {}
    random = np.random.default_rng(7)
    assert [len(part) for part in store.get(np.int64([]))] == [0, 0]
    for _ in range(50):
        keys = random.choice([*KEYS, *range(-9, 9)], random.integers(0, 15))
        rows = random.integers(0, 256, (2 * len(keys), 24), np.uint8)[::2, ::-2]  # of larger arrays
        kind = random.integers(0, 9)
        if kind < 4:
            store.put(keys, rows)
            oracle.update(zip(keys.tolist(), (row.tobytes() for row in rows), strict=True))
        elif kind < 6:
            present = {int(key) for key in keys if int(key) in oracle}
            assert store.delete(keys) == len(present)
            for key in present:
                del oracle[key]
        elif kind < 8:  # as often as a key is there
            store.update(keys, add(7))
            for key in keys.tolist():
                row = np.frombuffer(oracle.get(key, bytes(12)), np.uint8).copy()
                row[:8].view(np.int64)[:] += 7
                oracle[key] = row.tobytes()
        elif random.random() < 0.2:
            store.clear()
            oracle.clear()
        found, got = store.get(KEYS)
        assert found.tolist() == [key in oracle for key in KEYS.tolist()]
        assert [row.tobytes() for row in got] == [
            oracle.get(key, bytes(12)) for key in KEYS.tolist()
        ]
        assert store.size() == len(oracle) and contents(store) == oracle


def test_tables_of_other_names_and_versions_are_others(make_store):
    stores = [
        make_store("a"),
        make_store("b"),
        make_store("a", row_bytes=3, model_tag_runtime="another version"),
    ]
    for number, store in enumerate(stores):
        store.put(np.int64([1]), np.full((1, store.row_bytes), number, np.uint8))
    stores[1].clear()
    assert [store.size() for store in stores] == [1, 0, 1]
    assert stores[2].get(np.int64([1]))[1].tolist() == [[2, 2, 2]]
    stores[2].clear()


def test_a_store_that_is_opened_again_has_the_rows(make_store):
    first = make_store(num_buckets=5)
    first.put(KEYS, rows_of(KEYS))
    second = make_store(num_buckets=9)
    assert second.num_buckets == 5
    np.testing.assert_array_equal(second.get(KEYS)[1], rows_of(KEYS))
    with pytest.raises(ValueError, match="with rows of 12 bytes .bytes.. Expected 16 bytes"):
        make_store(row_bytes=16)


# ------------------------------------------------------------------------------------ columns

M, V = Column("m", 8, b"\x01\x02"), Column("v", 4, b"\0\0\x80\x3f")


def test_columns_of_several_workers(make_store):
    store, other = make_store(), make_store()
    old, rows = np.int64([1]), rows_of(KEYS)
    store.put(old, rows_of(old))
    assert store.place_of(M) == slice(12, 20) and other.place_of(V) == slice(20, 24)
    assert (other.place_of(M), store.place_of(V)) == (slice(12, 20), slice(20, 24))
    assert store.place_of(V._replace(num_bytes=8)) == slice(24, 32)  # another one
    begins = [*[1, 2] * 4, *V.initial, *V.initial * 2]
    for each in (store, make_store()):
        if each is not store:
            each.place_of(M), each.place_of(V._replace(num_bytes=8))
        found, got = each.get(np.int64([1, 2]))
        assert found.tolist() == [True, False] and got[:, 12:].tolist() == [begins] * 2
        np.testing.assert_array_equal(got[0, :12], rows_of(old)[0])

    def fills(which, found, values):
        new = values.copy()
        new[:, store.place_of(V)] = 9
        new[:, :12] = rows[which]
        return np.ones(len(which), bool), new

    store.update(KEYS, fills)
    # One who knows of fewer columns finds the others, and leaves them when it writes.
    ignorant = make_store()
    ignorant.put(KEYS, rows_of(KEYS) + 1)
    found, got = ignorant.get(KEYS)
    np.testing.assert_array_equal(got[:, :12], rows_of(KEYS) + 1)
    np.testing.assert_array_equal(got[:, 12:], [[*begins[:8], 9, 9, 9, 9, *begins[12:]]] * 6)
    pieces = [values for _, values in make_store().export()]
    assert len(pieces) > 0 and {values.shape[1] for values in pieces} == {32}


def test_a_column_that_comes_during_an_update(make_store):
    store, other = make_store(), make_store()
    store.place_of(M)
    store.put(KEYS, rows_of(KEYS))
    widths = []

    def function(which, found, values):
        widths.append(values.shape[1])
        if len(widths) == 1:
            other.place_of(M), other.place_of(V)
            other.update(KEYS[:2], lambda which, found, values: (found, values + 1))
        return np.ones(len(which), bool), values + 1

    store.update(KEYS, function)
    assert widths == [20, 24]
    got = store.get(KEYS)[1]
    np.testing.assert_array_equal(got[:, :12], rows_of(KEYS) + np.uint8([[2]] * 2 + [[1]] * 4))
    np.testing.assert_array_equal(got[:2, 20:], [np.uint8(list(V.initial)) + 2] * 2)
    np.testing.assert_array_equal(got[2:, 20:], [list(V.initial)] * 4)


def test_a_copy_has_the_columns(make_store):
    old, new = make_store("old"), make_store("new")
    old.place_of(M), old.place_of(V), new.place_of(V)
    old.put(KEYS[:1], rows_of(KEYS[:1]))

    def fills(which, found, values):
        return ~found, values + (which[:, None] + 1).astype(np.uint8)

    old.update(KEYS[1:], fills)
    new.copy_from(old)
    places = [(store.place_of(M), store.place_of(V), slice(12)) for store in (old, new)]
    assert places[0] != places[1]
    for theirs, ours in zip(*places, strict=True):
        np.testing.assert_array_equal(new.get(KEYS)[1][:, ours], old.get(KEYS)[1][:, theirs])


# ------------------------------------------------------------------------------------- update


def add(amount):
    """Adds to the first 8 bytes, from 0 where there is no row."""

    def function(which, found, rows):
        new = rows.copy()
        new[:, :8].view(np.int64)[:, 0] += amount[which] if np.ndim(amount) else amount
        return np.ones(len(which), bool), new

    return function


def totals(store, keys):
    return store.get(keys)[1][:, :8].copy().view(np.int64)[:, 0]


def test_an_update_of_nothing_and_one_that_fails(make_store):
    store = make_store()
    store.update(KEYS[:0], add(1))
    store.update(KEYS, lambda which, found, rows: (np.zeros(len(which), bool), rows))

    def fails(which, found, rows):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.update(KEYS, fails)
    assert store.size() == 0


def test_a_row_that_another_worker_changes_is_read_again(make_store):
    """And no other: neither those that are written, nor those that are not to be."""
    store, other = make_store(), make_store()
    keys, calls = np.int64([1, 2, 3, 4, 5]), []

    def function(which, found, rows):
        calls.append(which.tolist())
        if len(calls) == 1:
            other.update(keys[[1, 4]], add(50))
            other.delete(keys[2:3])
        return ~np.isin(which, [0, 4]), add(1)(which, found, rows)[1]

    store.put(keys, np.zeros((5, 12), np.uint8))
    store.update(keys, function)
    assert calls == [[0, 1, 2, 3, 4], [1, 2]]
    np.testing.assert_array_equal(totals(store, keys), [0, 51, 1, 1, 50])


def test_no_update_of_several_workers_is_lost(make_store):
    keys = np.arange(20)
    stores = [make_store(num_buckets=4, keys_sending_size=8) for _ in range(4)]

    def work(store):
        for _ in range(15):
            store.update(keys, add(keys + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, stores))
    np.testing.assert_array_equal(totals(stores[0], keys), 4 * 15 * (keys + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_update_whose_answer_is_lost_is_not_made_twice(make_store, given, alone):
    store = make_store(redis_socket_timeout=1000)
    is_cluster = given.get("redis_connection_mode") == 0
    ports = given["redis_host_port"] if is_cluster else [alone["redis_host_port"]]
    calls = []
    store.put(np.int64([1]), np.zeros((1, 12), np.uint8))
    # The server that has the key. The other one of a cluster still answers.
    servers = []
    for port in ports:
        with redis.Redis(port=port) as client:
            names = client.keys()  # this one's alone
            if store._bucket(murmur(1) % 256).encode() in names:
                servers.append(client.info("server")["process_id"])
    (server,) = servers

    def function(which, found, rows):
        calls.append(which)
        os.kill(server, signal.SIGSTOP)
        while Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        return add(1)(which, found, rows)

    try:
        with pytest.raises(redis.TimeoutError):
            store.update(np.int64([1]), function)
    finally:
        os.kill(server, signal.SIGCONT)  # it reads now what was sent meanwhile
    assert len(calls) == 1
    assert totals(make_store(), np.int64([1])).tolist() == [1]


# ----------------------------------------------------------------------------------- in Redis


def murmur(key):
    """The finaliser of MurmurHash3, of Python's integers."""
    h = key % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ (h >> 33)) * factor % 2**64
    return h ^ (h >> 33)


@pytest.fixture
def client(alone):
    with redis.Redis(port=alone["redis_host_port"]) as client:
        yield client


def test_what_is_in_redis(alone, client):
    settings = make_settings({**alone, "model_tag_runtime": "v3"})
    store = RedisStore(settings, "user/emb", 2, 16)
    store.put(np.int64([1, -2]), np.uint8([[7, 0], [8, 9]]))
    one, other = murmur(1) % 16, murmur(-2) % 16
    assert one != other
    assert set(client.keys("sok_lite:v3:*")) == {
        b"sok_lite:v3:user/emb:form",
        b"sok_lite:v3:user/emb:%d" % one,
        b"sok_lite:v3:user/emb:%d" % other,
    }
    form = {b"row_bytes": b"2", b"row_type": b"bytes", b"num_buckets": b"16"}
    assert client.hgetall("sok_lite:v3:user/emb:form") == form
    first = {b"\x01\0\0\0\0\0\0\0": b"\x07\0"}
    assert client.hgetall(f"sok_lite:v3:user/emb:{one}") == first
    second = {b"\xfe" + b"\xff" * 7: b"\x08\x09"}
    assert client.hgetall(f"sok_lite:v3:user/emb:{other}") == second
    store.clear()
    assert client.keys("sok_lite:v3:*") == [b"sok_lite:v3:user/emb:form"]
    store.close()


def test_rows_of_another_length_are_refused(alone, client):
    store = RedisStore(make_settings(alone), "strange", 2, 1)
    client.hset("sok_lite:test:strange:0", b"\x01\0\0\0\0\0\0\0", b"long")
    for call in (lambda: store.get(np.int64([1])), lambda: list(store.export())):
        with pytest.raises(ValueError, match="rows of another length than 2 bytes"):
            call()
    store.close()


def test_an_export_of_a_table_that_shrinks_tells_of_each_key_once(alone):
    """Redis itself tells of some twice: those it has told of when the others go."""
    store = RedisStore(make_settings({**alone, "keys_sending_size": 100}), "shrinking", 12, 1)
    keys = np.arange(4000)
    store.put(keys, rows_of(keys))
    found = []
    for number, (piece, rows) in enumerate(store.export()):
        found += piece.tolist()
        np.testing.assert_array_equal(rows, rows_of(piece))
        if number == 0:
            store.delete(np.setdiff1d(keys, found))
    assert 100 <= len(found) < 1000
    assert len(found) == len(set(found))
    store.close()
