"""Scenarios of saving: TensorFlow's checkpoints, and files of keys and values."""

import tempfile
from pathlib import Path

from tests.dynamic_embedding.scenario_values import contents
from tests.dynamic_embedding.scenarios_of_training import BATCHES, tf_keras_optimizers, train


def filled_table(de, tf, name, **options):
    """Returns a table with five rows of two numbers."""
    table = de.Variable(dim=2, name=name, **options)
    rows = tf.reshape(tf.range(10, dtype=tf.float32), [5, 2])
    table.upsert(tf.constant([3, 4, 6, 7, 9], tf.int64), rows)
    return table


def checkpoint_restores_rows(de, tf):
    """tf.train.Checkpoint: what is there when it is restored goes, what was saved comes back."""
    table = filled_table(de, tf, "checkpoint_restores_rows", devices=["/CPU:0"] * 2)
    checkpoint = tf.train.Checkpoint(table=table)
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(f"{folder}/saved")
        table.upsert(tf.constant([3, 100], tf.int64), tf.constant([[8.0, 8.0], [9.0, 9.0]]))
        table.remove(tf.constant([4], tf.int64))
        changed = contents(tf, table)
        checkpoint.restore(path)
    return {"changed": changed, "restored": contents(tf, table)}


def files_of_keys_and_values(de, tf):
    """save_to_file_system and back: the files' names and sizes, and what they hold."""
    answers = {}
    for shards in (1, 2):
        name = f"files/of_{shards}"
        table = filled_table(de, tf, name, devices=["/CPU:0"] * shards)
        with tempfile.TemporaryDirectory() as folder:
            table.save_to_file_system(folder, proc_size=1, proc_rank=0)
            files = sorted(path for ending in ("keys", "values") for path in _files(folder, ending))
            answers[f"files of {shards}"] = [path.name for path in files]
            answers[f"sizes of {shards}"] = [path.stat().st_size for path in files]
            table.clear()
            table.load_from_file_system(folder, proc_size=1, proc_rank=0)
            answers[f"loaded of {shards}"] = contents(tf, table)
    return answers


def _files(folder, ending):
    return Path(folder).rglob(f"*-{ending}")


def training_goes_on_after_a_restore(de, tf):
    """A checkpoint of a table and its optimizer: the last steps are the same again."""
    table = de.get_variable("training_goes_on_after_a_restore", dim=2, initializer=0.5)
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())
    shadow = de.shadow_ops.ShadowVariable(table, name=f"{table.name}-shadow")
    checkpoint = tf.train.Checkpoint(table=table, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as folder:
        train(de, tf, table, optimizer, BATCHES[:2], shadow)
        saved = contents(tf, table)
        path = checkpoint.save(f"{folder}/saved")
        train(de, tf, table, optimizer, BATCHES[2:], shadow)
        trained = contents(tf, table)
        checkpoint.restore(path)
        restored = contents(tf, table)
        train(de, tf, table, optimizer, BATCHES[2:], shadow)
    again = contents(tf, table)
    return {"saved": saved, "trained": trained, "restored": restored, "again": again}


SCENARIOS = (
    checkpoint_restores_rows,
    files_of_keys_and_values,
    training_goes_on_after_a_restore,
)
