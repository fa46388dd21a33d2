"""Static tables in checkpoints, beside dynamic ones and in their place."""

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.owner import MOD, OneRank
from sok_lite.engine.static_table import StaticTable
from tests.engine.files.test_dump_load import bits_to_float
from tests.support.helpers import new_table
from tests.support.static_parts import DIM, Rows, assert_equal, everything, part_of

ONE = SingleCommunicator()
CPU = get_backend("cpu")


@pytest.mark.parametrize(
    ("ranks", "owners"),
    [
        *(((1, 1), (MOD, MOD)), ((2, 2), (MOD, MOD)), ((2, 2), (MOD, OneRank(0)))),
        *(((3, 2), (OneRank(0), MOD)), ((3, 2), (MOD, MOD)), ((1, 3), (MOD, OneRank(0)))),
    ],
    ids=str,
)
def test_rows_and_states_come_back(backend, tmp_path, owners, ranks):
    whole, other = everything(11), everything(11, seed=1)
    keys, mode = np.arange(-5, 6), "merge" if ranks == (3, 2) else "replace"

    def mine_of(comm):
        return keys[keys % comm.size == comm.rank]

    def dynamic(comm):
        table = new_table(backend, DIM, name="d")
        mine = mine_of(comm)
        table.insert_or_assign(mine, np.repeat(mine[:, None], DIM, 1).astype(np.float32))
        return table

    def write(comm):
        tables = [dynamic(comm), part_of(backend, comm, whole, owners[0])]
        dump(tmp_path, tables, comm, chunk_bytes=40)

    def read(comm):
        part = part_of(backend, comm, other, owners[1])
        table = new_table(backend, DIM, name="d")
        load(tmp_path, [part, table], comm, mode)
        assert_equal(part, part_of(backend, comm, whole, owners[1]))
        np.testing.assert_array_equal(backend.to_host(table.export()[0]), mine_of(comm))

    run_ranks(ranks[0], write)
    run_ranks(ranks[1], read)


def test_states_are_left_out_where_nobody_asks(tmp_path, backend=CPU):
    dump(tmp_path, [part_of(backend, ONE, everything(4))], ONE)
    part = part_of(backend, ONE, everything(4, ()))
    load(tmp_path, [part], ONE)
    assert_equal(part, part_of(backend, ONE, {"value": everything(4)["value"]}))


def test_what_does_not_fit_is_one_error(tmp_path, backend=CPU):
    dump(tmp_path, [part_of(backend, ONE, everything(4))], ONE)
    fitting = part_of(backend, ONE, everything(4, seed=1))
    before = {name: rows.copy() for name, rows in fitting.columns.items()}
    dump(tmp_path / "both", [fitting, part_of(backend, ONE, everything(4), name="t")], ONE)
    for columns, said in (
        (everything(5), r"shape \(4, 3\)\. Received: shape \(5, 3\)"),
        (everything(4, ("m",)), r"'m', 'v'\. Received: an optimizer with 'm'\."),
        (everything(4, ("m", "w")), "with 'm', 'w'"),
    ):
        other = part_of(backend, ONE, columns, name="t")
        fitting.columns["value"] = before["value"] + 1
        with pytest.raises(ValueError, match=said):
            load(tmp_path / "both", [fitting, other], ONE)
        np.testing.assert_array_equal(fitting.columns["value"], before["value"] + 1)
        assert other.columns is columns or other.columns.keys() == columns.keys()
    wide = StaticTable(backend, 4, DIM + 1, name="s")
    with pytest.raises(ValueError, match=r"dimension 3, .*Received: dimension 4"):
        load(tmp_path, [Rows(wide, {"value": np.zeros((4, 4), np.float32)})], ONE)


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_with_other_rows_all_say_so(backend, tmp_path, failing):
    def program(comm):
        part = part_of(backend, comm, everything(4 + (comm.rank == failing)))
        with pytest.raises(ValueError, match="must be the same on all ranks"):
            dump(tmp_path, [part], comm)

    run_ranks(2, program)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_a_dynamic_table_takes_static_rows_and_gives_them(backend, tmp_path, ranks):
    whole = everything(11, ("m",))

    def give(comm):
        dump(tmp_path / "static", [part_of(backend, comm, whole)], comm)

    def take(comm):
        table = new_table(backend, DIM, name="s")
        load(tmp_path / "static", [table], comm)
        keys, rows = map(backend.to_host, table.export())
        np.testing.assert_array_equal(keys, np.arange(comm.rank, 11, comm.size))
        np.testing.assert_array_equal(rows, whole["value"][keys])
        np.testing.assert_array_equal(
            backend.to_host(table.read_state("m", keys)), whole["m"][keys]
        )
        dump(tmp_path / "dynamic", [table], comm)
        if comm.rank == 0:
            table.erase([0])
            table.insert_or_assign([12], np.ones((1, DIM), np.float32))
        dump(tmp_path / "others", [table], comm)

    def give_back(comm):
        part = part_of(backend, comm, everything(11, ("m",), 1))
        load(tmp_path / "dynamic", [part], comm)
        assert_equal(part, part_of(backend, comm, whole))
        with pytest.raises(ValueError, match="takes the keys 0 to 10.*has others"):
            load(tmp_path / "others", [part], comm)

    run_ranks(ranks[0], give)
    run_ranks(ranks[1], take)
    run_ranks(ranks[0], give_back)


def test_rows_of_another_dtype_are_cast_when_asked(tmp_path, backend=CPU):
    bits = np.random.default_rng(0).integers(0, 0x7F80, (5, DIM), np.uint16)
    table = StaticTable(backend, 5, DIM, dtype="bfloat16", name="s")
    dump(tmp_path, [Rows(table, {"value": bits})], ONE)
    wide = part_of(backend, ONE, everything(5, ()))
    with pytest.raises(ValueError, match="cast=True"):
        load(tmp_path, [wide], ONE)
    load(tmp_path, [wide], ONE, cast=True)
    np.testing.assert_array_equal(wide.columns["value"], bits_to_float(bits))
    back = Rows(table, {"value": np.zeros_like(bits)})
    dump(tmp_path, [wide], ONE)
    load(tmp_path, [back], ONE, cast=True)
    np.testing.assert_array_equal(back.columns["value"], bits)
