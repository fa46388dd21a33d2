"""Random programs of the public API on random tables, against dicts of rows and of states.

A round makes a table and does some things that a program may do with it: looks keys up, some of
them chosen against the hash, trains it with optimizers that come and go, writes, erases, expires,
evicts, dumps, loads into it or into a table of another kind, gives its gradients to functions that
want dense tensors, and loads files that somebody has forged. After each the table must hold what
the dicts hold, and be sound inside (tests/support/table_audit.py). Every round has a seed of its
own and says it:

  python -m tests.fuzz.programs                        until the first failure, or Ctrl-C
  python -m tests.fuzz.programs --operations 20000 --backends simt
  python -m tests.fuzz.programs --seed 1234 --rounds 1 the round of that seed again

The last line is RESULT and the counts. The exit status is 1 if something was found.
"""

import argparse
import contextlib
import faulthandler
import gc
import itertools
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from scripts.bench.common.measuring import note, result
from sok_lite.backend import get_backend
from sok_lite.engine.hashing import fix_seed
from sok_lite.engine.table.locking import with_lock
from tests.fuzz.programs_dumps import Dumped
from tests.support import step_oracle
from tests.support.gpu_play import play_gpu
from tests.support.simt import backend as simt
from tests.support.simt import runtime
from tests.support.table_audit import audit

_HANGS_AFTER = 180.0
_WEIGHTS = {
    "lookup": 12,
    "lookup_sparse": 12,
    "evict": 4,
    "step": 16,
    "forget_optimizer": 1,
    "states": 6,
    "dense": 6,
    "assign": 8,
    "scatter": 8,
    "erase": 6,
    "clear": 1,
    "read": 4,
    "dump": 3,
    "load": 4,
    "forge": 6,
}


class Program(Dumped):
    """A table and what is done with it. An operation, `do_...`, leaves what the table must hold."""

    def run(self, num_operations: int) -> None:
        """Does some operations; raises whatever is wrong."""
        for _ in range(num_operations):
            (name,) = self.dice.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
            self.told.append(name)
            self.counts[name] += 1
            self.counts["operations"] += 1
            self.expected, self.moved = self.rows, set()
            self.before = self.table.statistics()
            try:
                getattr(self, f"do_{name}")()
            except RuntimeError as error:
                # Keys that are chosen against a hash whose seed is fixed; nothing was done.
                if "chosen" not in str(error):
                    raise
                self.expected, self.moved = self.rows, set()
            self.settle(self.expected)
            if name in ("load", "states", "forget_optimizer") or self.dice.random() < 0.2:
                self.settle_states()
            audit(self.table.table)

    # ---------------------------------------------------------------- lookups

    def do_lookup(self) -> None:
        keys = self.new_keys()
        given = tf.constant(keys.reshape(self.dice.choice([(-1,), (1, -1), (-1, 1)])))
        trains = self.dice.random() < 0.75
        missing = "initial" if trains else self.dice.choice(["initial", "zeros"])
        self.expected = self.looked_up(keys.tolist()) if trains else self.rows
        look = self.table.sparse_read
        if trains and self.dice.random() < 0.5:
            found = tf.nn.embedding_lookup(self.table, given)
        elif trains and self.dice.random() < 0.1:
            found = tf.function(look)(given)
        else:
            found = look(given, training=trains, missing=missing)
        self.assert_rows(found, keys.tolist(), self.rows_of(keys.tolist(), missing), "looked up")

    def do_lookup_sparse(self) -> None:
        keys, trains, weights = self.new_keys(), self.dice.random() < 0.8, None
        cuts = sorted(self.rng.integers(0, len(keys) + 1, self.dice.choice([0, 1, 4])).tolist())
        splits = [0, *cuts, len(keys)]
        ids = tf.RaggedTensor.from_row_splits(keys, np.array(splits, np.int64))
        combiner, numbers = self.dice.choice(["sum", "mean", "sqrtn"]), None
        if self.dice.random() < 0.5:
            numbers = self.rng.integers(0, 5, len(keys)).astype(np.float32) / 4
            weights = ids.with_values(tf.constant(numbers))
        if self.dice.random() < 0.3:
            ids, weights = (x if x is None else x.to_sparse() for x in (ids, weights))
        self.expected = self.looked_up(keys.tolist()) if trains else self.rows
        found = sok.lookup_sparse(self.table, ids, weights, combiner, training=trains)
        spans = list(itertools.pairwise(splits))
        listed = [keys[i:j].tolist() for i, j in spans]
        given = None if numbers is None else [numbers[i:j].tolist() for i, j in spans]
        row_of = self.rows_of(keys.tolist()).__getitem__
        pooled = step_oracle.outputs(listed, row_of, combiner, self.dim, given)
        self.assert_near(tf.cast(found, tf.float32).numpy(), pooled, combiner)

    def do_evict(self) -> None:
        keys = self.new_keys()
        self.expected = self.looked_up(keys.tolist())
        found, gone, values = sok.sparse_read_and_evict(self.table, tf.constant(keys))
        self.assert_rows(found, keys.tolist(), self.rows_of(keys.tolist()), "looked up")
        held = set(sok.export(self.table)[0].numpy().tolist())
        told = set(gone.numpy().tolist())
        assert self.rows.keys() - held == told, f"{self.rows.keys() - held} are gone, not {told}"
        self.assert_rows(values, gone.numpy().tolist(), self.rows, "evicted")

    # ---------------------------------------------------------------- writes

    def do_assign(self) -> None:
        keys = self.new_keys()
        values = self.new_rows(len(keys))
        self.expected = self.rows | dict(zip(keys.tolist(), values, strict=True))
        sok.assign(self.table, keys, tf.cast(values, self.dtype))

    def do_scatter(self) -> None:
        keys, kind = self.new_keys(), self.dice.choice(["add", "sub", "update"])
        values, given = self.new_rows(len(keys)), dict[int, Any]()
        for key, row in zip(keys.tolist(), values, strict=True):
            given[key] = row if kind == "update" else given.get(key, 0) + row
        sign = {"add": 1, "sub": -1}.get(kind)
        self.expected, self.moved = dict(self.rows), set(given)
        for key in given.keys() & self.rows.keys():
            new = given[key] if sign is None else self.rows[key] + sign * given[key]
            self.expected[key] = self.rounded(new)
        delta = tf.IndexedSlices(tf.cast(values, self.dtype), tf.constant(keys))
        getattr(self.table, f"scatter_{kind}")(delta)

    def do_erase(self) -> None:
        table, keys, third = self.table, self.new_keys(), self.dice.randrange(1, 9)
        held = with_lock(table.table, table.table.index.entries)
        host = table.table.backend.to_host
        keys_held = table.table.key_dtype.from_int64(np, host(held.keys))
        seen = dict(zip(keys_held.tolist(), host(held.last_seen).tolist(), strict=True))
        least = table.table.num_lookups - self.dice.randrange(6)
        kinds: dict[str, tuple[Callable[[], Any], Callable[[int], bool]]] = {
            "erase": (lambda: table.erase(keys), set(keys.tolist()).__contains__),
            "erase_if": (
                lambda: table.erase_if(lambda keys, rows, scores: keys % third == 0),
                lambda key: key % third == 0,
            ),
            "erase_below": (
                lambda: table.erase_below(third / 4),
                lambda key: bool((abs(self.rows[key]) < third / 4).all()),
            ),
            "expire": (
                lambda: table.expire(num_lookups=table.table.num_lookups - least),
                lambda key: seen[key] <= least,
            ),
        }
        kind = self.dice.choice(list(kinds))
        self.told[-1] += f" {kind}"
        erase, is_gone = kinds[kind]
        self.expected = {key: row for key, row in self.rows.items() if not is_gone(key)}
        count, gone = int(erase()), len(self.rows) - len(self.expected)
        assert count == gone, f"it says {count} are erased, and {gone} are"

    def do_clear(self) -> None:
        if self.dice.random() < 0.2:
            self.table.clear()
            self.expected = {}
        else:
            self.table.reserve(self.dice.choice([0, 10, 500]))

    def do_read(self) -> None:
        table, keys = self.table, self.new_keys()
        assert len(table) == len(self.rows) == table.statistics().size, "its size is wrong"
        found = table.contains(keys).numpy().tolist()
        assert found == [key in self.rows for key in keys.tolist()], "contains() is wrong"
        zeros = sum(not row.any() for row in self.rows.values())
        assert int(table.num_zero_rows()) == zeros, "num_zero_rows() is wrong"
        cutoff = self.dice.choice([1e-20, 0.5, 2.0])
        left = [key for key, row in self.rows.items() if not (abs(row) < cutoff).all()]
        assert sok.export(table, cutoff)[0].numpy().tolist() == sorted(left), "export() is wrong"
        pieces = [keys.numpy() for keys, *_ in table.export_chunks(self.dice.choice([16, 64]))]
        assert sorted(np.concatenate(pieces).tolist()) == sorted(self.rows), "chunks are wrong"


def run_round(seed: int, counts: Counter) -> None:
    """Runs the round of a seed; raises AssertionError with what it found."""
    fix_seed(seed)  # of the hash
    runtime.set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        program = Program(random.Random(seed), counts, Path(folder))
        made = program.options
        try:
            program.run(program.dice.randrange(5, 60))
        except Exception as error:
            raise AssertionError(
                f"{traceback.format_exc(limit=-8)}  table: {made}\n"
                f"  program: {', '.join(program.told)}"
            ) from error


@contextlib.contextmanager
def tables_on(name: str) -> Iterator[None]:
    """Lets tables be made on a backend, whose memory is in small pieces: they soon have several."""
    with pytest.MonkeyPatch.context() as patch:
        backend = play_gpu(patch).backend if name == "simt" else get_backend("cpu")
        patch.setattr(backend, "chunk_bytes", 512)
        patch.setattr(backend, "far_chunk_bytes", 512)
        patch.setattr(backend, "segment_slots", 128)
        yield


def begin() -> None:
    """Makes this process a job of one rank whose tables are in RAM unless `tables_on` says else."""
    os.environ["SOK_LITE_BACKEND"] = "cpu"
    sok.init("single")
    gc.freeze()  # what is there now need not be looked at whenever an optimizer goes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, help="on each backend, to the end of a round")
    parser.add_argument("--minutes", type=float, help="at most so long on each backend")
    parser.add_argument("--rounds", type=int, help="at most so many on each backend")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--backends", nargs="+", default=["cpu"], choices=["cpu", "simt"])
    parser.add_argument("--keep-going", action="store_true", help="after a failure")
    parser.add_argument("--quiet", action="store_true", help="say the seeds of failures only")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    begin()
    total, failures, start = Counter[str](), 0, time.monotonic()
    for name in args.backends:
        if name == "simt" and simt.unavailable() is not None:
            note(f"simt is left out: {simt.unavailable()}.")
            continue
        counts, rounds, begun = Counter[str](), 0, time.monotonic()
        with tables_on(name), contextlib.suppress(KeyboardInterrupt):
            while rounds != args.rounds and (args.keep_going or not failures):
                if args.operations is not None and counts["operations"] >= args.operations:
                    break
                if args.minutes is not None and time.monotonic() - begun >= 60 * args.minutes:
                    break
                seed = args.seed + rounds
                rounds += 1
                if not args.quiet:
                    print(f"round {rounds} on {name}, seed {seed}", flush=True)
                # What never ends cannot be interrupted: the process ends with it.
                faulthandler.dump_traceback_later(_HANGS_AFTER, exit=True)
                try:
                    run_round(seed, counts)
                except AssertionError as error:
                    failures += 1
                    print(f"FAILED --seed {seed} --rounds 1 --backends {name}\n{error}", flush=True)
        total += counts + Counter({"rounds": rounds, f"on {name}": counts["operations"]})
    faulthandler.cancel_dump_traceback_later()
    result(seed=args.seed, failures=failures, seconds=time.monotonic() - start, **total)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
