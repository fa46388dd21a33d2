"""`sok-lite plan`: the verdict, what to write, and the numbers behind it."""

import json
from collections import Counter

import numpy as np
import pytest

from sok_lite.cli.commands.plan import GIB, Machines, Need, _launch, plan, room, sent
from sok_lite.comm import run_ranks
from sok_lite.engine import lookup
from sok_lite.engine.files.dump import dump
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.owner import HASH
from sok_lite.engine.table import sizing
from sok_lite.engine.texts import TextStore
from tests.cli.helpers import CPU, ONE, Optimizer, fine, optimized, run
from tests.support.helpers import new_table
from tests.support.parts import Part, forward_parts

BIG = ("plan", "--keys", "2e9", "--dim", "64", "--gpus", "8", "--gpu-gb", "80", "--host-gb")


def described(*arguments):
    """Status and JSON of a command that says nothing else."""
    status, out, err = run("plan", *arguments, "--json")
    assert err == ""
    return status, json.loads(out)


def test_what_does_not_fit_has_status_1_and_says_what_would_help():
    status, out, err = run(*BIG, "1000")
    assert (status, err) == (1, "") and out.startswith("does not fit: ")
    assert "16 ranks on 2 machines " in out and ", and it fits" in out
    assert "create the tables" not in out and "\nlaunch" not in out
    # Ranks of one machine share its memory, and more of them have no more.
    one = ("--keys", "1e9", "--dim", "64", "--ranks", "2", "--host-gb", "400")
    status, out, _ = run("plan", *one, "--ranks-per-host", "8")
    assert status == 1 and "of 180.0 GiB RAM on the fullest rank" in out
    assert "  4 ranks on 2 machines (--ranks-per-host 2) " in out
    (helping,) = [each for each in described(*one)[1]["would_help"] if "4 ranks" in each["what"]]
    half = described(*one[:4], "--ranks", "4", "--host-gb", "400", "--ranks-per-host", "2")[1]
    assert helping["saved_bytes"] == described(*one)[1]["near_bytes"] - half["near_bytes"]
    assert helping["fits"] == half["fits"]


def test_the_parts_of_a_plan_add_up_and_are_within_the_room():
    status, found = described(*BIG[1:], "1400")
    (table,) = found["tables"]
    parts = ("near_rows", "near_states", "slots", "access_counts", "near_spare")
    assert status == 0 and found["near_bytes"] == sum(table[f"{part}_bytes"] for part in parts)
    assert 0.99 * found["near_limit_bytes"] < found["near_bytes"] <= found["near_limit_bytes"]
    assert found["far_bytes"] <= found["far_limit_bytes"] == int(1400 * 0.9 * GIB / 8)
    near_rows = int(table["max_hbm_for_vectors"] * GIB / 256)
    row = sizing.RowBytes(256, 512)
    again = sizing.hybrid_bytes(table["keys_of_rank"], row, table["max_capacity"], near_rows)
    assert again.near == found["near_bytes"]


@pytest.mark.parametrize(
    ("arguments", "status", "kinds"),
    [
        (
            "--table name=user,keys=3e8,dim=32 --table name=item,keys=1e7,dim=64,ids=9 "
            "--gpus 1 --gpu-gb 80 --host-gb 500",
            *(0, ["hybrid", "hbm"]),
        ),
        # Without far memory nothing is put there.
        ("--keys 1e9 --dim 64 --gpus 1 --gpu-gb 80", 1, ["hbm"]),
        # More keys than a rank can hold.
        ("--keys 5e9 --dim 1 --optimizer sgd --ranks 1 --host-gb 9999", 1, ["hbm"]),
    ],
)
def test_which_tables_are_put_in_two_tiers(arguments, status, kinds):
    found = described(*arguments.split())
    assert (found[0], [table["var_type"] for table in found[1]["tables"]]) == (status, kinds)
    if len(kinds) == 2:
        user, item = found[1]["tables"]
        assert (user["keys_of_rank"], item["far_rows_bytes"], item["ids"]) == (3e8, 0, 9.0)
    _, out, _ = run("plan", *arguments.split())
    assert ("more keys than a rank can hold: table" in out) == ("5e9" in arguments)


def test_tables_grow_by_new_keys_and_by_times():
    one = ("--dim", "8", "--ranks", "2", "--host-gb", "64")
    _, grown = described("--keys", "1e6", *one, "--times", "2.5")
    _, whole = described("--keys", "2500000", *one)
    assert grown["now"] == [] and grown.pop("times") == 2.5 and whole.pop("times") == 1
    assert grown == whole
    _, found = described("--keys", "1e8", *one, "--new-keys-per-day", "1e6")
    assert found["days"] == pytest.approx((found["room"] - 1) * 100)
    assert "; full in " in fine("plan", "--keys", "1e8", *one, "--new-keys-per-day", "1e6")


def test_the_room_is_the_most_that_fits():
    needs, machines = [Need("a", 10**8, 16, "float32", 32)], Machines(2, 2, 20 * GIB, 30 * GIB)
    factor = room(needs, machines)
    for close, fits in ((0.999, True), (1.001, False)):
        keys = int(10**8 * factor * close)
        assert plan([needs[0]._replace(num_keys=keys)], machines).fits == fits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_sends_what_is_planned(dtype):
    """Where no id comes twice, up to the chance of whose the ids are."""
    ranks, batch, dim = 3, 30_000, 5

    def program(comm):
        noted, together = Counter(), comm._run_collective

        def noting(collective, call, *arguments):
            if call.split()[0] in ("send_keys", "return_rows", "send_grads"):
                rows, splits = arguments
                others = len(rows) - int(splits[comm.rank])
                noted[call.split()[0]] += others * rows.shape[1] * rows.itemsize
            return together(collective, call, *arguments)

        comm._run_collective = noting
        keys = np.random.default_rng(comm.rank).integers(0, 2**62, batch // ranks)
        table = new_table(CPU, dim, dtype=dtype)
        part = Part(table, keys, np.arange(keys.size + 1), None, "sum")
        _, context = forward_parts(CPU, comm, [part])
        grads = [np.ones((keys.size, dim), np.float32)]
        lookup.backward(CPU, grads, context)
        return noted

    planned = sent([Need("a", batch, dim, dtype, 0)], ranks, batch)
    for noted in run_ranks(ranks, program):
        found = [noted[trip] for trip in ("send_keys", "return_rows", "send_grads")]
        assert found == pytest.approx(list(planned), rel=0.05)


def test_how_a_job_is_started():
    assert _launch(Machines(1, 1, 1, 0)) == "python train.py"
    assert _launch(Machines(8, 8, 1, 0)) == "horovodrun -np 8 python train.py"
    several = "horovodrun -np 20 -H host1:8,host2:8,host3:4 python train.py"
    assert _launch(Machines(20, 8, 1, 0)) == several


def test_wrong_use_says_what_to_give():
    for arguments, reason in [
        (["--gpus", "1", "--gpu-gb", "8"], "say which tables"),
        (["--keys", "5", "--gpus", "1", "--gpu-gb", "8"], "--keys and --dim, both"),
        (["--keys", "5", "--dim", "2", "--gpus", "1"], "give --gpu-gb"),
        (["--keys", "5", "--dim", "2", "--ranks", "1"], "give --host-gb"),
        (["--keys", "0.5", "--dim", "2", "--ranks", "1"], "whole number from 1 on"),
        (["--keys", "nan", "--dim", "2", "--ranks", "1"], "whole number from 1 on"),
        (["--keys", "5", "--dim", "2", "--ranks", "1", "--times", "1e308"], "at most 1e12"),
        (["--keys", "5", "--dim", "2", "--ranks", "1", "--times", "0"], "a number above 0"),
        (["--table", "name=a,dim=2", "--ranks", "1", "--host-gb", "1"], "name=N,keys=K,dim=D"),
        (["--table", "name=a,keys=x,dim=2", "--ranks", "1", "--host-gb", "1"], "whole number"),
        (
            ["--table", "name=a,keys=1,dim=2,optimizer=x", "--ranks", "1", "--host-gb", "1"],
            "optimizer must be one of",
        ),
        (
            2 * ["--table", "name=a,keys=1,dim=2"] + ["--ranks", "1", "--host-gb", "1"],
            "different names",
        ),
    ]:
        status, out, err = run("plan", *arguments)
        assert (status, out) == (2, "") and reason in err


def test_a_checkpoint_that_is_to_grow_is_planned_with_its_states(tmp_path):
    optimized(tmp_path / "made", np.arange(1000), 1.0)
    where = (tmp_path / "made", "--ranks", "1", "--host-gb", "1")
    status, found = described(*where, "--times", "100")
    (now,), (table,) = found["now"], found["tables"]
    assert (status, now["keys"], table["keys"], found["times"]) == (0, 1000, 100_000, 100)
    assert (now["rows_bytes"], table["row_bytes"], table["state_bytes"]) == (12_000, 12, 28)
    states = [(state["name"], state["dim"], state["bytes"]) for state in now["states"]]
    assert sorted(states) == [("acc", 3, 12_000), ("m", 3, 12_000), ("v", 1, 4000)]
    # Beside those a key, and the number of the lookup that last saw it.
    assert now["bytes"] == 12_000 + 28_000 + 8000 + 4000
    text = fine("plan", *where, "--times", "100")
    assert "\nin the checkpoint, planned for 100 times as many keys\n  " in text
    assert "1,000 keys, 50.8 KiB: rows of 3 x float32 11.7 KiB, " in text
    _, same = described(*where)
    assert (same["now"], same["times"], same["tables"][0]["keys"]) == (found["now"], 1, 1000)
    assert "planned for" not in fine("plan", *where)
    _, plain = described(*where, "--optimizer", "sgd")
    assert plain["tables"][0]["state_elements"] == 0


def test_the_tables_of_a_checkpoint_are_made_as_they_were(tmp_path):
    towns = new_table(CPU, 2, name="town")
    towns.insert_or_assign([5], np.ones((1, 2), np.float32))
    towns.texts = TextStore(lambda keys: np.ones(keys.size, bool))
    towns.texts.add({5: b"Oslo"})
    items = new_table(CPU, 4, name="item", key_type="uint64", dtype="float16")
    shops = new_table(CPU, 4, name="shop", owner=HASH)
    optimizers = []
    for table, kinds in ((items, {"accumulator": (1, 0.1)}), (shops, {"m": (4, 0), "v": (4, 0)})):
        table.insert_or_assign(np.array([7], table.key_dtype.dtype), np.ones((1, 4), np.float32))
        optimizers.append(Optimizer())  # or its states go
        acquire_states([table], [kinds], optimizers[-1:])
    dump(tmp_path / "c", [towns, items, shops], ONE)
    out = fine("plan", tmp_path / "c", "--ranks", 1, "--host-gb", 1)
    item = 'row_dtype="float16", key_type="uint64", optimizer=RowWiseAdagrad()'
    lines = (
        "create the tables (import sok_lite.keras as sk; from sok_lite.optimizers import "
        'RowWiseAdagrad)\n  sk.Table("town", 2, key_type=str, keep_texts=True)\n'
        f'  sk.Table("item", 4, {item})\n  sk.Table("shop", 4, partitioner="hash")\n\n'
    )
    assert lines in out and " KiB of 0.900 GiB RAM on the fullest rank" in out
    two = ("name=a,keys=9,dim=2", "name=b,keys=9,dim=2", "name=c,keys=9,dim=2,optimizer=sgd")
    given = [each for table in two for each in ("--table", table)]
    out = fine("plan", *given, "--ranks", 1, "--host-gb", 1)
    assert '  sk.Table("b", 2)\n  sk.Table("c", 2, optimizer="sgd")\n' in out
    assert "0.000" not in out
