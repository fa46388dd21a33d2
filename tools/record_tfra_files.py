"""Has TFRA write the files that tests/cli/ converts, and records what TFRA says is in them.

They go to tests/cli/data/tfra/, a folder for each case, with what TFRA exports of each table in
expected.json. Runs in TFRA's own environment, which scripts/bench/peers.sh makes:

  bash scripts/bench/peers.sh
  .venv-peers/bin/python -m tools.record_tfra_files
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

DATA = ROOT / "tests" / "cli" / "data" / "tfra"

# Keys of 64 bits, some that int32 does not have.
KEYS = [3, 4, 6, 7, 9, -5, 2**40 + 1, -(2**50)]
# Of a step after the save: one that Adam has not seen yet, and none twice, which TFRA counts once.
LATER_BATCH = [3, 9, 7]
# What is in a table after that step, by the table's name.
later: dict[str, Any] = {}


def contents(table: Any) -> dict[str, Any]:
    """Returns what TFRA says is in a table, in ascending order of the keys."""
    return listed(table, *(part.numpy() for part in table.export()))


def listed(table: Any, keys: Any, values: Any) -> dict[str, Any]:
    """Returns keys and rows with what the files do not say of them."""
    order = keys.argsort()
    return {
        "key_type": table.key_dtype.name,
        "dtype": table.value_dtype.name,
        "dim": table.dim,
        "keys": keys[order].tolist(),
        "values": [[float(x) for x in row] for row in values[order]],
    }


def filled(de: Any, tf: Any, name: str, keys: list[int], dim: int = 3, **options: Any) -> Any:
    """Returns a table with rows of small numbers, of which every dtype has each."""
    table = de.Variable(name=name, dim=dim, **options)
    rows = tf.reshape(tf.range(len(keys) * dim), [len(keys), dim]) - 5
    table.upsert(tf.constant(keys, table.key_dtype), tf.cast(rows, table.value_dtype))
    return table


def trained(de: Any, tf: Any, table: Any, optimizer: Any) -> Any:
    """Trains a table for three steps; returns what a checkpoint tracks of the lookup."""
    shadow = de.shadow_ops.ShadowVariable(table, name=f"{table.name}-shadow")
    for step, batch in enumerate(([3, 4, 4], [2**40 + 1, 3], [100, 7, -5])):
        train(de, tf, shadow, optimizer, batch, step + 1)
    return shadow


def train(de: Any, tf: Any, shadow: Any, optimizer: Any, batch: list[int], weight: float) -> None:
    """Trains a table for a step: the loss is the weighted sum of the squares of the rows."""
    with tf.GradientTape() as tape:
        rows = de.shadow_ops.embedding_lookup(shadow, tf.constant(batch, tf.int64))
        loss = tf.reduce_sum(rows * rows) * weight
    optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])


def with_slots(optimizer: Any, *tables: Any) -> dict[str, Any]:
    """Returns what is in tables and in the tables of an optimizer's slots, by name."""
    slots = [each for each in optimizer._variables if hasattr(each, "params")]
    every = [*tables, *(slot.params for slot in slots)]
    return {table.name: contents(table) for table in every}


def saver_of(de: Any) -> Any:
    """Returns what makes tables that are saved into files."""
    return de.CuckooHashTableCreator(saver=de.FileSystemSaver())


def files_of_one_shard(de: Any, tf: Any, folder: Path) -> dict[str, Any]:
    """A checkpoint with a FileSystemSaver: Adam's slots, and names and types of several kinds."""
    creator, place = saver_of(de), ["/CPU:0"]
    table = filled(de, tf, "user/emb", KEYS, kv_creator=creator, devices=place)
    others = [
        filled(de, tf, "odd.name-1_b", [1, -2, 7], 1, key_dtype=tf.int32, kv_creator=creator),
        filled(de, tf, "halves", KEYS[:5], 5, value_dtype=tf.float16, kv_creator=creator),
        filled(de, tf, "bytes", KEYS[:4], 2, value_dtype=tf.int8, kv_creator=creator),
        filled(de, tf, "brains", KEYS[:4], 2, value_dtype=tf.bfloat16, kv_creator=creator),
        filled(de, tf, "empty", [], 4, kv_creator=creator, devices=place),
    ]
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
    shadow = trained(de, tf, table, optimizer)
    checkpoint = de.train.DECheckpoint(
        table=table, optimizer=optimizer, shadow=shadow, others=others
    )
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint.save(f"{temporary}/saved")
        shutil.copytree(f"{temporary}/TFRADynamicEmbedding-1", folder, dirs_exist_ok=True)
    saved = with_slots(optimizer, table, *others)
    train(de, tf, shadow, optimizer, LATER_BATCH, 4)
    later[table.name] = contents(table)
    return saved


def files_of_two_shards(de: Any, tf: Any, folder: Path) -> dict[str, Any]:
    """The same of two devices, with Adagrad's slot."""
    table = filled(
        de, tf, "two/shards", KEYS, kv_creator=saver_of(de), devices=["/CPU:0", "/CPU:0"]
    )
    adagrad = tf.keras.optimizers.legacy.Adagrad(0.1, initial_accumulator_value=0.25)
    optimizer = de.DynamicEmbeddingOptimizer(adagrad)
    shadow = trained(de, tf, table, optimizer)
    checkpoint = de.train.DECheckpoint(table=table, optimizer=optimizer, shadow=shadow)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint.save(f"{temporary}/saved")
        shutil.copytree(f"{temporary}/TFRADynamicEmbedding-1", folder, dirs_exist_ok=True)
    slots = [slot.params for by_name in optimizer._slots.values() for slot in by_name.values()]
    return {each.name: contents(each) for each in (table, *slots)}


def files_of_two_processes(de: Any, tf: Any, folder: Path) -> dict[str, Any]:
    """What two processes of two shards write, each with keys of its own."""
    devices, whole = ["/CPU:0", "/CPU:0"], []
    for rank, keys in enumerate((KEYS[:5], KEYS[5:])):
        table = filled(de, tf, "table", keys, devices=devices)
        table.save_to_file_system(str(folder), proc_size=2, proc_rank=rank)
        whole.append(table.export())
        table.clear()
    keys, values = (tf.concat(parts, 0).numpy() for parts in zip(*whole, strict=True))
    return {"table": listed(table, keys, values)}


def files_of_a_table_alone(de: Any, tf: Any, folder: Path) -> dict[str, Any]:
    """What a table of a variable writes by itself: names without processes."""
    table = filled(de, tf, "alone", KEYS, devices=["/CPU:0"])
    table.tables[0].save_to_file_system(str(folder))
    return {"alone": contents(table)}


def checkpoint_of_tensorflow(de: Any, tf: Any, folder: Path) -> dict[str, Any]:
    """tf.train.Checkpoint: one table with Adam's slots, one of two shards of float64."""
    table = filled(de, tf, "ck/emb", KEYS, devices=["/CPU:0"])
    other = filled(de, tf, "pair", KEYS, 2, value_dtype=tf.float64, devices=["/CPU:0", "/CPU:0"])
    empty = filled(de, tf, "none", [], 4, devices=["/CPU:0"])
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
    shadow = trained(de, tf, table, optimizer)
    checkpoint = tf.train.Checkpoint(
        table=table, other=other, empty=empty, optimizer=optimizer, shadow=shadow
    )
    checkpoint.write(str(folder / "saved"))
    return with_slots(optimizer, table, other, empty)


def checkpoint_of_a_graph(de: Any, tf: Any, folder: Path) -> dict[str, Any]:
    """The saver of TF1: a table of two shards with Adam's slots."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        table = de.get_variable("v1/emb", dim=2, initializer=0.5, devices=["/CPU:0", "/CPU:0"])
        ids = tf1.placeholder(tf.int64, [None])
        rows, trainable = de.embedding_lookup(table, ids, name="ids", return_trainable=True)
        adam = tf1.train.AdamOptimizer(0.1)
        optimizer = de.DynamicEmbeddingOptimizer(adam)
        step = optimizer.minimize(tf.reduce_sum(rows * rows), var_list=[trainable])
        tables = [table, *table.get_slot_variables(optimizer)]
        exports, saver = [each.export() for each in tables], tf1.train.Saver()
        with tf1.Session() as session:
            session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
            for batch in ([3, 4, 4], [2**40 + 1, 3], [100, 7, -5]):
                session.run(step, {ids: batch})
            saver.save(session, str(folder / "saved"), 7, write_meta_graph=False)
            found = session.run(exports)
        return {each.name: listed(each, *of) for each, of in zip(tables, found, strict=True)}


CASES: tuple[Callable[[Any, Any, Path], dict[str, Any]], ...] = (
    files_of_one_shard,
    files_of_two_shards,
    files_of_two_processes,
    files_of_a_table_alone,
    checkpoint_of_tensorflow,
    checkpoint_of_a_graph,
)


def main() -> None:
    # TFRA knows the optimizers of tf_keras only, and the files are to be those of a CPU.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import tensorflow as tf  # before TFRA, whose libraries need it loaded
    from tensorflow_recommenders_addons import dynamic_embedding as de

    from tools.record_tfra import versions

    shutil.rmtree(DATA, ignore_errors=True)
    expected: dict[str, Any] = {}
    for case in CASES:
        folder = DATA / case.__name__
        folder.mkdir(parents=True)
        expected[case.__name__] = case(de, tf, folder)
        (folder / "checkpoint").unlink(missing_ok=True)  # it has absolute paths
    recorded = {"cases": expected, "later": later, "versions": versions()}
    text = json.dumps(recorded, indent=1, sort_keys=True)
    (DATA / "expected.json").write_text(text + "\n")
    print(f"{len(CASES)} cases are recorded in {DATA.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
