"""Scenarios of saving: TensorFlow's checkpoints, and files of keys and values."""

import tempfile
from pathlib import Path

from tests.dynamic_embedding.scenario_values import contents
from tests.dynamic_embedding.scenarios_of_graphs import exported, session_of
from tests.dynamic_embedding.scenarios_of_training import (
    BATCHES,
    loss_of,
    tf_keras_optimizers,
    train,
)


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


def files_beside_a_checkpoint(de, tf):
    """A saver of files: rows lie beside the checkpoint and come back with it."""
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver())
    table = filled_table(
        de, tf, "files_beside_a_checkpoint", kv_creator=creator, devices=["/CPU:0"] * 2
    )
    checkpoint = de.train.DECheckpoint(table=table)
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(f"{folder}/saved")
        files = sorted(path for ending in ("keys", "values") for path in _files(folder, ending))
        names = [str(path.relative_to(folder)) for path in files]
        table.clear()
        checkpoint.restore(path)
    return {"names": names, "restored": contents(tf, table)}


def saver_of_a_graph(de, tf):
    """tf.compat.v1.train.Saver: rows, states and steps come back, later ones go."""
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
        table = de.get_variable("saver_of_a_graph", dim=2, initializer=0.5)
        ids = tf.compat.v1.placeholder(tf.int64, [None])
        rows, trainable = de.embedding_lookup(table, ids, name="ids", return_trainable=True)
        adam = tf.compat.v1.train.AdamOptimizer(0.1, 0.9, 0.99, 1e-7)
        optimizer = de.DynamicEmbeddingOptimizer(adam)
        step = optimizer.minimize(loss_of(tf, rows, ids), var_list=[trainable])
        export, saver = table.export(), tf.compat.v1.train.Saver()
        answers = {}
        with session_of(tf) as session:
            for batch in BATCHES[:2]:
                session.run(step, {ids: batch})
            answers["saved"] = exported(session, export)
            path = saver.save(session, f"{folder}/saved")
            for name in ("trained", "trained again"):
                for batch in BATCHES[2:]:
                    session.run(step, {ids: batch})
                answers[name] = exported(session, export)
                saver.restore(session, path)
            answers["restored"] = exported(session, export)
    return answers
