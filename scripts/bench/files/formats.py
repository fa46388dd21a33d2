"""Measures what each format of checkpoints costs: seconds, and memory beside the table.

One line `RESULT {json}` per format and call. Rows are of float32, with two optimizer states of the
same length, as Adam's. `content` is the bytes of keys, rows and states. `peak` is what the process
has beside the table at its highest, as a multiple of that: of a restore beside the new table, which
was empty. Every format runs in a process of its own. CPU and Linux only: it reads
/proc/self/status.

Example:
  .venv/bin/python -m scripts.bench files formats --keys 10000000 --dim 8
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.common.measuring import result, status_bytes
from scripts.bench.common.row_steps import ensure_state

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FORMATS_COMMAND = [sys.executable, "-m", "scripts.bench", "files", "formats"]
STATES = ("m", "v")
# Restores, and what that goes into.
Restore = tuple[Callable[[], Any], Any]
# Saves, and makes a new table to be restored.
Format = tuple[Callable[[], Any], Callable[[], Restore]]


def filled(table: Any, num_keys: int, dim: int) -> Any:
    """Gives a table keys, in no order, and states."""
    rng = np.random.default_rng(0)
    for part in np.array_split(rng.permutation(num_keys), max(1, num_keys // 500_000)):
        table.insert_or_assign(part * 7 - num_keys, rng.normal(size=(part.size, dim)).astype("f"))
    for name in STATES:
        ensure_state(table.store, name, 0.0)
    return table


def dumps(args: argparse.Namespace, folder: str) -> Format:
    """`sok.dump` and `sok.load`, by the engine."""
    from sok_lite.backend import get_backend
    from sok_lite.comm.single import SingleCommunicator
    from sok_lite.engine.files.dump import dump
    from sok_lite.engine.files.load import load
    from sok_lite.engine.initializer_spec import make_initializer
    from sok_lite.engine.table import make_table

    def new() -> Any:
        initializer = make_initializer("zeros", args.dim)
        return make_table("hbm", get_backend("cpu"), args.dim, name="t", initializer=initializer)

    table, one = filled(new(), args.keys, args.dim), SingleCommunicator()

    def restore() -> Restore:
        other = new()
        return lambda: load(folder, [other], one), other

    return lambda: dump(folder, [table], one), restore


def checkpoints(args: argparse.Namespace, folder: str) -> Format:
    """`tf.train.Checkpoint` of a sok.DynamicVariable."""
    import tensorflow as tf

    import sok_lite as sok

    def new() -> Any:
        return sok.DynamicVariable(dimension=args.dim, name="t", initializer="zeros")

    variable = new()
    filled(variable.table, args.keys, args.dim)

    def restore() -> Restore:
        other = new()
        return lambda: tf.train.Checkpoint(it=other).read(f"{folder}/c"), (other, other.table)

    return lambda: tf.train.Checkpoint(it=variable).write(f"{folder}/c"), restore


def tfra_files(args: argparse.Namespace, folder: str) -> Format:
    """Files of a `FileSystemSaver`, beside tf.train.Checkpoint."""
    import tensorflow as tf

    from sok_lite import dynamic_embedding as de

    def new() -> Any:
        saver = de.FileSystemSaver(proc_size=1, proc_rank=0, save_path=folder)
        creator = de.CuckooHashTableCreator(saver=saver)
        return de.Variable(dim=args.dim, name="t", kv_creator=creator)

    variable = new()
    filled(variable.rows.table, args.keys, args.dim)

    def restore() -> Restore:
        other = new()
        table = other.rows.table
        return lambda: tf.train.Checkpoint(it=other).read(f"{folder}/c"), (other, table)

    return lambda: tf.train.Checkpoint(it=variable).write(f"{folder}/c"), restore


def savers(args: argparse.Namespace, folder: str) -> Format:
    """A tf.compat.v1 Saver of a KvVariable."""
    import tensorflow as tf

    from sok_lite.kv_variable import get_kv_variable

    v1 = tf.compat.v1

    def new() -> tuple[Any, ...]:
        graph = tf.Graph()
        with graph.as_default():
            variable = get_kv_variable("t", args.dim, initializer=v1.zeros_initializer())
            saver = v1.train.Saver(max_to_keep=1)
            init = v1.global_variables_initializer()
        session = v1.Session(graph=graph)
        session.run(init)
        return graph, variable, saver, session

    graph, variable, saver, session = new()
    filled(variable.table, args.keys, args.dim)

    def save() -> None:
        with graph.as_default():
            saver.save(session, f"{folder}/c", write_meta_graph=False)

    def restore() -> Restore:
        other = new()

        def run() -> None:
            with other[0].as_default():
                other[2].restore(other[3], f"{folder}/c")

        return run, other

    return save, restore


def keras_files(args: argparse.Namespace, folder: str) -> Format:
    """`model.save_weights` and `load_weights` of Keras 3."""
    import keras

    import sok_lite.keras as sk

    def new() -> tuple[Any, Any]:
        table = sk.Table("t", args.dim, initializer="zeros")
        ids = keras.Input((), dtype="int64", name="ids")
        model = keras.Model(ids, table(ids))
        model(np.zeros(1, np.int64), training=False)
        return model, table.variable.table

    model, table = new()
    filled(table, args.keys, args.dim)
    path = f"{folder}/model.weights.h5"

    def restore() -> Restore:
        other = new()
        return lambda: other[0].load_weights(path), other

    return lambda: model.save_weights(path), restore


FORMATS = {
    "dump": dumps,
    "tf.train.Checkpoint": checkpoints,
    "Keras' files": keras_files,
    "TFRA's files": tfra_files,
    "TFPlus' Saver": savers,
}


def measured(call: Callable[[], Any], content: int, is_restore: bool) -> dict[str, float]:
    """Runs a call and returns its seconds and its peak."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    new = status_bytes("VmRSS") - before if is_restore else 0
    peak = (status_bytes("VmHWM") - before - new) / content
    return {"seconds": round(seconds, 2), "peak": round(peak, 2)}


def run(args: argparse.Namespace) -> None:
    """Measures a format, in this process."""
    content = args.keys * (8 + 4 * args.dim * (1 + len(STATES)))
    about = {"format": args.format, "keys": args.keys, "dim": args.dim, "content": content}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        save, restore = FORMATS[args.format](args, folder)
        result(call="save", **about, **measured(save, content, False))
        call, kept = restore()
        result(call="restore", **about, **measured(call, content, True))
        assert kept is not None


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--folder", help="where checkpoints are written")
    parser.add_argument("--format", choices=FORMATS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.format:
        run(args)
        return
    for name in args.formats:
        options = ["--keys", str(args.keys), "--dim", str(args.dim), "--format", name]
        options += ["--folder", args.folder] if args.folder else []
        subprocess.run([*FORMATS_COMMAND, *options], check=True)
