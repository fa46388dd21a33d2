"""Models have hundreds of tables, and most of these are small."""

import pytest

from tests.support.own_process import run_with_tensorflow

KINDS = ["hbm", "hybrid"]


@pytest.mark.parametrize(
    ("kinds", "count", "most"),
    [
        (["hbm"], 100, 40),
        pytest.param(["hybrid"], 100, 40, marks=pytest.mark.full_only("a process more")),
        pytest.param(KINDS, 400, 160, marks=pytest.mark.full_only("looks up in 400 tables")),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, list) else None,
)
def test_small_tables_take_little_memory(tmp_path, kinds, count, most):
    program = f"""
        import tensorflow as tf
        import sok_lite as sok

        sok.init("single")

        def resident():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

        def trained(count):
            kinds = {kinds} * count
            tables = [sok.DynamicVariable(16, var_type=kind) for kind in kinds[:count]]
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
        kept = trained({count})
        print(resident() - before)
    """
    kilobytes = run_with_tensorflow(program, tmp_path).split()[-1]
    assert int(kilobytes) < most << 10
