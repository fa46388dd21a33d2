"""Texts of keys: what a rank remembers, what it forgets, and what ranks tell each other."""

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.engine import texts
from sok_lite.engine.owner import HASH
from sok_lite.engine.texts import KeyTexts, TextStore, prune_texts, texts_of
from tests.support.helpers import new_table


def text_of(key):
    return f"text {key}".encode() * (key % 3)


def texts_by_key(*keys):
    return {key: text_of(key) for key in keys}


def store_with(*keys, held=lambda keys: np.ones(keys.size, bool)):
    store = TextStore(held)
    store.add(texts_by_key(*keys))
    return store


@pytest.mark.parametrize("n", [0, 1, 33, 1000])
def test_texts_come_back_from_arrays(n):
    kept = texts_by_key(*range(-5, n - 5))
    arrays = KeyTexts.of(kept)
    assert arrays.as_dict() == kept and arrays.fault() is None
    assert (arrays.keys.dtype, arrays.ends.dtype, arrays.data.dtype) == ("<i8", "<i8", "u1")


@pytest.mark.parametrize("ends", [[3, 2, 9], [-1, 2, 9], [1, 2, 8], [1, 2, 10]])
def test_arrays_that_contradict_themselves_are_noticed(ends):
    arrays = KeyTexts(np.arange(3), np.array(ends), np.zeros(9, np.uint8))
    assert "texts" in arrays.fault()


def test_the_first_text_of_a_key_stays():
    store, asked = store_with(4), []
    store.add({4: b"other", 5: b"five"}, lambda *pair: asked.append(pair))
    assert asked == [(text_of(4), b"other")]
    assert (store.get(4), store.get(5), store.get(6)) == (text_of(4), b"five", None)
    assert store.of([6, 5]) == {5: b"five"}


def test_only_new_keys_are_looked_at_and_each_once():
    store = store_with(7, 9)
    places = store.places_of_new(np.array([9, 8, 7, 8, 2]))
    assert sorted(places.tolist()) == [1, 4]
    assert store.places_of_new(np.array([], np.int64)).size == 0


def test_what_is_known_stays_known_while_new_texts_come(monkeypatch):
    """A key without a row, such as one that was erased, may get one by the lookup that asks."""
    monkeypatch.setattr(texts, "RECENT", 4)
    store = store_with(held=lambda keys: np.zeros(keys.size, bool))
    known = []
    for number in range(100):  # some of these calls forget what is older
        keys = np.array([0, 100 + number])
        asked = store.places_of_new(keys)
        store.add({int(key): text_of(int(key)) for key in keys[asked]})
        known.append(store.get(0) is not None)
        texts_of_both = {0: b"again", 200 + number: b""}
        store.add(texts_of_both)
        known.append(store.get(0) is not None)
    assert all(known)


def test_texts_of_late_outlive_one_checkpoint():
    store = store_with(1, 2, held=lambda keys: np.zeros(keys.size, bool))
    store.drop([1])
    assert store.all() == texts_by_key(1, 2)
    store.drop([1])
    assert store.all() == texts_by_key(2)


def test_answers_that_are_too_long_raise_on_all_ranks(monkeypatch):
    monkeypatch.setattr(texts, "MOST_BYTES", 1000)

    def program(comm):
        store = TextStore(lambda keys: np.ones(keys.size, bool))
        if comm.rank == 0:
            store.add(dict.fromkeys(range(20), b"x" * 40))
        wanted = np.arange(20) if comm.rank == 1 else np.arange(1)
        with pytest.raises(ValueError, match="Ask for fewer keys at a time"):
            texts_of(store, wanted, comm)
        assert len(texts_of(store, wanted[:2], comm)) == len(wanted[:2])

    run_ranks(2, program)


def test_texts_of_keys_that_are_gone_go_and_new_ones_stay(monkeypatch):
    monkeypatch.setattr(texts, "RECENT", 10)
    store = store_with(held=lambda keys: keys % 10 == 0)
    for key in range(3000):
        store.add(texts_by_key(key))
    assert len(store) < 1000 and store.get(2999) == text_of(2999)
    assert all(store.get(key) == text_of(key) for key in range(0, 3000, 10))
    assert store.all() == store.of(range(3000))


def ranks_with_texts(comm, of_rank, held):
    """A table of each rank, with the keys that it owns of those held, and its texts."""
    table = new_table(get_backend("cpu"), 2, owner=HASH)
    owners = HASH.owners(np.array(held, np.int64), comm.size, table.key_dtype)
    table.lookup(np.array(held, np.int64)[owners == comm.rank])
    table.texts = store_with(*of_rank[comm.rank])
    return table


@pytest.mark.parametrize("at_once", [2, 1 << 17])
def test_a_rank_finds_the_texts_that_others_know(at_once, monkeypatch):
    monkeypatch.setattr(texts, "ASKED_AT_ONCE", at_once)
    of_rank = {0: range(10), 1: range(5, 20), 2: []}
    asked = {0: [0, 19, 19, 77], 1: [], 2: range(25)}

    def program(comm):
        store = store_with(*of_rank[comm.rank])
        return texts_of(store, np.array(asked[comm.rank], np.int64), comm)

    found = run_ranks(3, program)
    assert found == [texts_by_key(0, 19), {}, texts_by_key(*range(20))]


def test_of_two_texts_of_one_key_the_lower_rank_counts():
    def program(comm):
        store = TextStore(lambda keys: keys == keys)
        store.add({1: f"of {comm.rank}".encode()} if comm.rank else {})
        return texts_of(store, np.array([1]), comm)

    assert run_ranks(3, program) == 3 * [{1: b"of 1"}]


def test_what_no_rank_holds_is_forgotten_and_each_text_is_written_once():
    of_rank, held = {0: range(12), 1: range(8, 30), 2: range(28, 34)}, range(10, 32)

    def program(comm):
        table = ranks_with_texts(comm, of_rank, held)
        prune_texts(table, table.texts, comm)  # forgets none of late
        written = prune_texts(table, table.texts, comm).as_dict()
        return written, table.texts.all(), table.size

    found = run_ranks(3, program)
    assert sum(size for *_, size in found) == len(held)
    for rank, (written, kept, _) in enumerate(found):
        assert kept == texts_by_key(*(key for key in of_rank[rank] if key in held))
        lower = {key for other in range(rank) for key in of_rank[other]}
        assert written == {key: text for key, text in kept.items() if key not in lower}
