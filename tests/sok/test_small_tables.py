"""Models have hundreds of tables, and most of these are small."""

import pytest

from tests.support.own_process import run_limited


@pytest.mark.parametrize(
    "kind", ["hbm", pytest.param("hybrid", marks=pytest.mark.full_only("a process more"))]
)
@pytest.mark.parametrize(
    ("count", "most"),
    [(100, 40), pytest.param(1000, 400, marks=pytest.mark.full_only("traces 1,000 tables"))],
)
def test_small_tables_take_little_memory(kind, count, most):
    program = """
        import sys
        import tensorflow as tf
        import sok_lite as sok

        sok.init("single")

        def resident():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

        def trained(count):
            tables = [sok.DynamicVariable(16, var_type=sys.argv[2]) for _ in range(count)]
            keys = [tf.range(50, dtype=tf.int64)[:, None]] * count
            optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
            with tf.GradientTape() as tape:
                ids = [tf.RaggedTensor.from_tensor(each) for each in keys]
                rows = sok.lookup_sparse(tables, ids, combiners=["sum"] * count)
                loss = tf.add_n([tf.reduce_sum(each) for each in rows])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))
            assert all(len(table.export()[0]) == 50 for table in tables)
            return tables, optimizer

        trained(3)  # TensorFlow, the library, the interpreter's own memory
        before = resident()
        kept = trained(int(sys.argv[1]))
        print(resident() - before)
    """
    (kilobytes,) = run_limited(program, count, kind)[-1:]
    assert int(kilobytes) < most << 10
