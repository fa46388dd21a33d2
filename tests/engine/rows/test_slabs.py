"""How much memory a store asks for: little for small tables, and few pieces for large ones."""

from sok_lite.engine.rows.slabs import Chunks, Slabs
from tests.support.own_process import run_limited

KB = 1 << 10


class Sizes:
    """The sizes of a backend.

    Attributes:
      chunk_bytes, far_chunk_bytes: as a GPU has them.
    """

    chunk_bytes, far_chunk_bytes = 64 * KB, 64 * KB * KB


def grown(slabs, room, least, times):
    """Returns the chunks of a store to which some are added again and again, and of each slab."""
    total, steps = Chunks(0, 0), []
    for _ in range(times):
        more = slabs.more(total, least, room - total.near, spare=True)
        total = Chunks(total.near + more.near, total.far + more.far)
        steps.append(more)
    return total, steps


def test_the_far_tier_doubles_until_its_slabs_are_large():
    slabs = Slabs.of(Sizes, 16, 0)
    assert slabs.chunk_shift == 10  # 64 KiB
    total, steps = grown(slabs, 0, 1, 21)
    kilobytes = [64 * step.far for step in steps]
    assert kilobytes[:6] == [64, 64, 128, 256, 512, 1024]
    assert kilobytes[10:19] == [32 * KB] + 8 * [64 * KB]
    # From then on an eighth of what is there.
    assert kilobytes[19:] == [72 * KB, 81 * KB]
    assert (total.near, 64 * total.far) == (0, sum(kilobytes))


def test_what_is_needed_is_added_whatever_it_is():
    slabs = Slabs.of(Sizes, 16, 40_000)
    assert (slabs.chunk_shift, slabs.near_rows) == (10, 39 << 10)
    assert slabs.more(Chunks(0, 0), 100, 39, spare=True) == (39, 61)
    assert slabs.more(Chunks(0, 0), 5, 39, spare=False) == (5, 0)
    assert slabs.more(Chunks(38, 0), 1, 1, spare=True) == (1, 0)
    assert slabs.more(Chunks(39, 61), 1, 0, spare=False) == (0, 1)


def test_small_tables_take_little_memory():
    program = """
        import sys
        import numpy as np
        from sok_lite.backend import get_backend
        from sok_lite.engine.update_rows import Update
        from tests.support.steps import apply_updates
        from sok_lite.engine.optimizers import Adagrad, Adam
        from tests.support.helpers import new_table

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4

        backend, keys = get_backend("cpu"), np.arange(50)
        grads = np.ones((50, 16), np.float32)
        rules = [Adam(), Adagrad()]

        def trained(count, near_rows):
            options = {}
            if near_rows is not None:
                near = near_rows * 64 / 2**30
                options = dict(var_type="hybrid", init_capacity=64, max_hbm_for_vectors=near)
            tables = [new_table(backend, 16, **options) for _ in range(count)]
            for i, table in enumerate(tables):
                table.lookup(keys)
                apply_updates([Update(table, rules[i % 2], keys, grads)], 0.1, 1)
            return tables

        kept = [trained(3, 0)]  # the library, the interpreter's own memory
        for near_rows in (None, 10, 0):
            before = resident()
            kept.append(trained(300, near_rows))
            print(resident() - before)
    """
    assert all(int(kilobytes) < 120 * KB for kilobytes in run_limited(program))
