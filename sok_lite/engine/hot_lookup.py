"""A lookup over several ranks in which hot keys travel as bits, and only rows that have changed.

 keys    to each owner   the other keys; for each of its hot keys whether this rank asks for it
         to each rank    for each hot key of this rank whether that one needs its row if it asks
 rows    to each rank    the rows of the other keys, and of the hot keys that it asks for and needs

With the keys both sides know which rows come, so nothing else has to be said. A hot key without a
row is one whose row is needed. From there on all is as if every key had been sent: the way back
and what tables note of a lookup know of no hot keys.

Ranks compare in each lookup what they agree on. Where one has failed alone, and so has other hot
keys, or has not got rows that others take it to have, all forget their hot keys and send the keys
of that lookup as they do without.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import publish
from sok_lite.comm import Communicator
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.asked_keys import AskedKeys
from sok_lite.engine.batch import Batch
from sok_lite.engine.exchange import Route, return_rows, send_keys
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.hot_words import InTurn, Said, Told, num_of_owners, told, words_for
from sok_lite.engine.segments import Distinct, cut, gather_rows, gathering
from sok_lite.engine.sent_keys import SentKeys, distinct_keys, keeps_keys, send, send_distinct
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone
from sok_lite.engine.table.hot_keys import HotKeys, OwnRows


class _Table(NamedTuple):
    """A table of a call that has hot keys.

    Attributes:
      table, hot: it and them.
      parts: which parts of the call are its own.
      reads: whether the lookup inserts nothing.
      own: the rows of this rank's hot keys.
      said: what this rank says of them.
    """

    table: EmbeddingTable
    hot: HotKeys
    parts: list[int]
    reads: bool
    own: OwnRows
    said: Said


class _Cold(NamedTuple):
    """The keys of a batch that are not hot.

    Attributes:
      keys: (n,) int64, those of all parts.
      sizes: (num_parts,) int64, how many each part has.
      place: (u,) int32, on the host: what number each distinct key gets, where those of a part that
        are not hot come first and then its hot ones as they are numbered.
    """

    keys: Array
    sizes: np.ndarray
    place: np.ndarray


def send_hot(
    backend: Backend, comm: Communicator, batch: Batch, tag: int
) -> tuple[SentKeys, "HotWay | None"]:
    """Sends the keys of a batch to their owners, hot ones as bits. Every rank must call it.

    Returns:
      (the keys as if all had been sent; how their rows travel, None: as without hot keys).

    Raises:
      As of `send`.
    """
    if all(table.hot is None for table in batch.tables):
        return send(backend, comm, batch, tag), None
    num_parts = len(batch.tables)
    with shared_failure(comm):
        check, distinct = distinct_keys(backend, batch)
        tables, cold = _prepared(backend, comm, batch, distinct)
        said = [table.said for table in tables]
        words = [words_for(said, rank) for rank in range(comm.size)]
        keys = backend.xp.concatenate([cold.keys, backend.from_host(np.concatenate(words))])
        counts = tuple(map(len, words))
    received, route = send_keys(
        backend,
        comm,
        keys,
        [*cold.sizes.tolist(), sum(counts)],
        [*(table.key_dtype for table in batch.tables), "int64"],
        [*(table.owner for table in batch.tables), InTurn(counts)],
        tag=tag,
        check=check,
    )
    with failure_known_to_all(comm):
        num_words = route.recv_counts[:, num_parts]
        end = len(received) - int(num_words.sum())
        words_in = cut(backend.to_host(received[end:]), num_words)
        route.check()  # words that were lost say nothing of hot keys
        received, all_told = received[:end], told(said, words_in)
        if all_told is not None:
            way = HotWay(backend, route, received, tables, cold, all_told)
            inverse = backend.xp.take(backend.from_host(cold.place), distinct.inverse)
            sent = None
            if keeps_keys(batch):
                order = backend.from_host(np.argsort(cold.place))
                sent = backend.xp.take(distinct.keys, order)
            return SentKeys(way.route, inverse, way.keys, sent), way
        for table in tables:
            table.hot.forget(comm.size)
    return send_distinct(backend, comm, batch, tag, check, distinct), None


def _prepared(
    backend: Backend, comm: Communicator, batch: Batch, distinct: Distinct
) -> tuple[list[_Table], _Cold]:
    """Tells hot keys from others, and what this rank says of them."""
    parts_of: dict[int, list[int]] = {}
    for i, table in enumerate(batch.tables):
        if table.hot is not None:
            table.hot.meet(comm.rank, comm.size)
            parts_of.setdefault(id(table), []).append(i)
    hots = {i: cast(HotKeys, batch.tables[i].hot) for parts in parts_of.values() for i in parts}
    keys, sizes = cut(distinct.keys, distinct.sizes), distinct.sizes
    numbers = [hot.hot.numbers_of(backend, keys[i]) for i, hot in hots.items()]
    on_host = cut(backend.to_host(backend.xp.concatenate(numbers)), sizes[list(hots)])
    place, is_cold = np.arange(len(distinct.keys), dtype=np.int32), np.ones(sum(sizes), bool)
    cold_sizes, asked = sizes.copy(), {}
    for (i, hot), its in zip(hots.items(), on_host, strict=True):
        part, is_hot, first = slice(*distinct.starts[i : i + 2]), its >= 0, distinct.starts[i]
        asked[i] = np.zeros(hot.size, bool)
        asked[i][its[is_hot]] = True
        cold_sizes[i] -= np.count_nonzero(is_hot)
        within = place[part]
        within[~is_hot] = first + np.arange(cold_sizes[i])
        within[is_hot] = first + cold_sizes[i] + (np.cumsum(asked[i]) - 1)[its[is_hot]]
        is_cold[part] = ~is_hot
    tables = []
    for parts in parts_of.values():
        table, hot = cast(EmbeddingTable, batch.tables[parts[0]]), hots[parts[0]]
        own = _own_rows(table, hot, comm.rank)
        hot.count([keys[i] for i in parts])
        proposal = hot.proposal() if hot.is_choosing else np.zeros((0, 2), np.int64)
        said = Said(hot.hot, hot.token, [asked[i] for i in parts], own.needed, proposal)
        tables.append(_Table(table, hot, parts, not batch.inserts[parts[0]], own, said))
    cold_keys = distinct.keys
    if not is_cold.all():
        cold_keys = backend.xp.take(cold_keys, backend.from_host(np.flatnonzero(is_cold)))
    return tables, _Cold(cold_keys, cold_sizes, place)


def _own_rows(table: EmbeddingTable, hot: HotKeys, rank: int) -> OwnRows:
    """Looks at the rows of the hot keys of this rank."""
    keys = table.backend.from_host(hot.hot.keys[hot.hot.of_owner(rank)])

    def look() -> OwnRows:
        rows = table._find(keys).rows
        return hot.compared(rank, rows, table.store.read(rows), table.generation)

    return alone(table, look)


class HotWay:
    """How the rows of a lookup travel that has hot keys.

    Attributes:
      route: how the keys would have travelled if all had been sent, hot ones behind others.
      keys: (m,) int64, those that this rank would have been asked, part by part.
      asked: (k,) int64, those of them that it has to look up. A lookup that inserts nothing leaves
        out the hot keys whose rows nobody needs.
      sizes: how many of those each part has.
    """

    def __init__(
        self,
        backend: Backend,
        route: Route,
        received: Array,
        tables: list[_Table],
        cold: _Cold,
        all_told: list[Told],
    ) -> None:
        """Args:
        route: how the other keys have travelled, and the words behind them.
        received: (c,) int64, the other keys.
        tables: those with hot keys.
        cold: the other keys of this rank.
        all_told: of each of the tables.
        """
        self._backend, self._tables, self._told, self._cold = backend, tables, all_told, cold
        self._rank = route.comm.rank
        num_parts = route.num_tables - 1
        # Of the hot keys that each rank asks for, and of those whose rows come.
        sent, came, sent_rows, came_rows = np.zeros((4, route.comm.size, num_parts), np.int64)
        items: dict[int, tuple[np.ndarray, ...]] = {}
        num_own = 0
        for table, its in zip(tables, all_told, strict=True):
            hot, needed = table.hot.hot, table.own.needed
            own_keys = hot.keys[hot.of_owner(self._rank)]
            for i, by_me, of_me in zip(table.parts, table.said.asked, its.asked, strict=True):
                sent[:, i] = num_of_owners(hot, by_me)
                came[:, i] = of_me.sum(axis=1)
                came_rows[:, i] = num_of_owners(hot, by_me & its.needed)
                sent_rows[:, i] = (of_me & needed).sum(axis=1)
                own = np.nonzero(of_me)[1]
                is_asked = needed[of_me] | (not table.reads)
                items[i] = own_keys[own], own + num_own, needed[of_me], is_asked
            num_own += len(own_keys)
        others = (route.send_counts[:, :num_parts], route.recv_counts[:, :num_parts])
        self.route = _with_hot(route, others, (sent, came))
        self._row_route = _with_hot(route, others, (came_rows, sent_rows))
        # Of the other keys that came, then of the hot ones; and how both lie part by part.
        of_hot = [
            np.concatenate(each) for each in zip(*(items[i] for i in sorted(items)), strict=True)
        ]
        place = _woven(others[1].T.reshape(-1), came.T.reshape(-1))
        of_others = np.zeros(len(received), np.int64), *np.ones((2, len(received)), bool)
        self._own, self._is_needed, self._is_asked = (
            np.concatenate(each)[place] for each in zip(of_others, of_hot[1:], strict=True)
        )
        keys = backend.xp.concatenate([received, backend.from_host(of_hot[0])])
        self.keys = backend.xp.take(keys, backend.from_host(place))
        sizes = self.route.num_received
        self.asked, self.sizes = self.keys, sizes.tolist()
        if not self._is_asked.all():
            at = np.flatnonzero(self._is_asked)
            self.asked = backend.xp.take(self.keys, backend.from_host(at))
            self.sizes = [int(each.sum()) for each in cut(self._is_asked, sizes)]

    def return_rows(self, owned: AskedKeys, rows: Sequence[Array]) -> list[Array]:
        """Brings the rows to the ranks that asked. Every rank must call it.

        Args:
          owned: what was found of `asked`; gets what is known of `keys`.
          rows: of each part, of `asked`.

        Returns:
          Of each part (u, dim), the rows of the keys that this rank has asked for.
        """
        results = return_rows(self._row_route, self._needed(rows))
        for table, its in zip(self._tables, self._told, strict=True):
            for i, asked in zip(table.parts, table.said.asked, strict=True):
                table.hot.refresh(np.flatnonzero(asked & its.needed), results[i][self._first(i) :])
        for table in self._tables:
            for i, asked in zip(table.parts, table.said.asked, strict=True):
                at = self._backend.from_host(np.flatnonzero(asked).astype(np.int32))
                copies = gather_rows(self._backend, table.hot.copies, at)
                results[i] = self._backend.xp.concatenate([results[i][: self._first(i)], copies])
        self._complete(owned)
        self._finish()
        return results

    def _first(self, part: int) -> int:
        """Returns where hot keys begin among those of a part."""
        return int(self._cold.sizes[part])

    def _needed(self, rows: Sequence[Array]) -> list[Array]:
        """Returns the rows that are sent, of those that were looked up."""
        needed, actions = list(rows), []
        is_needed = cut(self._is_needed[self._is_asked], self.sizes)
        for i, each in enumerate(is_needed):
            if not each.all():
                at = self._backend.from_host(np.flatnonzero(each).astype(np.int32))
                needed[i], action = gathering(self._backend, rows[i], at)
                actions.append([action])
        publish(*actions)
        return needed

    def _complete(self, owned: AskedKeys) -> None:
        """Adds what is known of the keys that were not looked up."""
        owned.keys, owned.sizes = self.keys, self.route.num_received.tolist()
        if self._is_asked.all():
            return
        is_left = ~self._is_asked
        source = np.empty(len(is_left), np.int64)
        source[self._is_asked] = np.arange(len(is_left) - is_left.sum())
        source[is_left] = self._own[is_left] + self._is_asked.sum()
        left = cut(is_left, owned.sizes)
        for table in self._tables:
            num_left = sum(int(left[i].sum()) for i in table.parts)
            alone(table.table, partial(table.table._count_found, num_left, 0))
            for i in table.parts:  # if row numbers have become stale since, those are not used
                owned.generations[i] = table.own.generation
        rows = [owned.rows, *(table.own.rows for table in self._tables)]
        rows_of_all = self._backend.xp.concatenate(rows)
        owned.rows = self._backend.xp.take(rows_of_all, self._backend.from_host(source))

    def _finish(self) -> None:
        comm = self.route.comm
        for table, its in zip(self._tables, self._told, strict=True):
            chosen = None
            if table.hot.is_choosing:
                how = (table.table.owner, table.table.key_dtype, comm.size)
                chosen = table.hot.choose(its.proposals, *how)
            by_me = sum(int(asked.sum()) for asked in table.said.asked)
            rows = sum(int((asked & its.needed).sum()) for asked in table.said.asked)
            of_me = np.logical_or.reduce(its.asked)
            table.hot.finish(self._rank, table.own, of_me, (by_me, rows), chosen)


def _with_hot(
    route: Route,
    others: tuple[np.ndarray, np.ndarray],
    hot: tuple[np.ndarray, np.ndarray],
) -> Route:
    """Returns the route of a batch whose parts have some of their hot keys behind the others.

    Args:
      route: of the others, and of words behind them.
      others: (size, num_parts) each, how many others this rank has sent, and has received.
      hot: likewise of the hot keys.
    """
    backend, size = route.backend, len(route.send_counts)
    num_others, num_hot = others[0].sum(axis=0), hot[0].sum(axis=0)
    starts = split_offsets(num_others + num_hot)[:-1]
    # The others as they were sent, without the words.
    is_key = np.repeat(np.tile([*[True] * len(starts), False], size), route.send_counts.reshape(-1))
    order = backend.xp.take(route.order, backend.from_host(np.flatnonzero(is_key)))
    shifts = np.tile(starts - split_offsets(num_others)[:-1], size)
    order += backend.from_host(np.repeat(shifts, others[0].reshape(-1)).astype(np.int32))
    # Hot keys are numbered by owner: those of a part go one after the other.
    first = starts + num_others + np.cumsum(hot[0], axis=0) - hot[0]
    order_of_hot = _ranges(first.reshape(-1), hot[0].reshape(-1)).astype(np.int32)
    place = _woven(others[0].reshape(-1), hot[0].reshape(-1))
    both = backend.xp.concatenate([order, backend.from_host(order_of_hot)])
    return replace(
        route,
        send_counts=others[0] + hot[0],
        recv_counts=others[1] + hot[1],
        order=backend.xp.take(both, backend.from_host(place)),
    )


def _ranges(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns first[0], first[0] + 1 ... as many as lengths[0] says, then of the next, int64."""
    index = np.repeat(first - split_offsets(lengths)[:-1], lengths)
    index += np.arange(len(index))
    return index


def _woven(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns where pieces of two arrays lie in both together, one of each in turn, int64.

    Args:
      first, second: (n,) how long the pieces of each array are.
    """
    starts = [split_offsets(first)[:-1], first.sum() + split_offsets(second)[:-1]]
    return _ranges(np.stack(starts, 1).reshape(-1), np.stack([first, second], 1).reshape(-1))
