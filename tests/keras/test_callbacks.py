"""The callbacks that Keras 3 and tf_keras bring, each with each of its options, beside tables."""

import contextlib
import csv
import http.server
import inspect
import json
import re
import threading
import urllib.parse
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.models import batches, check_equal, compiled, content, rows_in, tables_of

EPOCHS, STEPS = 2, 3

# The options of each callback that a test here gives to it. `test_every_option_is_tried` looks
# whether a callback or an option of Keras is missing.
TRIED = defaultdict(set)


def tried(name, *options):
    """Notes that a test gives options to a callback."""
    TRIED[name].update(options)


def watch(keras, at="on_epoch_end"):
    """Returns a callback that keeps what the tables hold at one of the calls, and the list."""
    kept = []

    def note(*_, **__):
        kept.append(content(callback.model))

    callback = keras.callbacks.Callback()
    setattr(callback, at, note)
    return callback, kept


def fit(keras, sk, *callbacks, epochs=EPOCHS, optimizer="adam", **options):
    """Trains a new model of the same seeds; returns it and the losses."""
    model = compiled(keras, sk, optimizer)
    history = model.fit(batches(), epochs=epochs, verbose=0, callbacks=list(callbacks), **options)
    return model, history.history


# ---- those that only look ------------------------------------------------------------------------


def check_csv(options):
    tried("CSVLogger", "filename", *options)

    def make(keras, folder):
        return keras.callbacks.CSVLogger(str(folder / "log.csv"), **options)

    def check(folder, callback, history):
        with open(folder / "log.csv", newline="") as file:
            rows = list(csv.DictReader(file, delimiter=options.get("separator", ",")))
        assert [float(row["loss"]) for row in rows] == pytest.approx(history["loss"])

    return make, check


def check_lambdas():
    told = defaultdict(int)
    names = ("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end")
    of_batches = {
        "keras": ("on_train_batch_begin", "on_train_batch_end"),
        "tf_keras": ("on_batch_begin", "on_batch_end"),
    }
    for each in (*names, *of_batches["keras"], *of_batches["tf_keras"]):
        tried("LambdaCallback", each)

    def make(keras, folder):
        told.clear()

        def noting(name):
            return lambda *_, **__: told.update({name: told[name] + 1})

        every = (*names, *of_batches[keras.__name__])
        return keras.callbacks.LambdaCallback(**{name: noting(name) for name in every})

    def check(folder, callback, history):
        assert sorted(told.values()) == sorted([EPOCHS] * 2 + [1] * 2 + [EPOCHS * STEPS] * 2)

    return make, check


def make_progress(keras, folder):
    if keras.__name__ == "keras":
        return keras.callbacks.ProgbarLogger()
    return keras.callbacks.ProgbarLogger(count_mode="steps", stateful_metrics=["auc"])


tried("ProgbarLogger", "count_mode", "stateful_metrics")


def check_nothing(folder, callback, history):
    """Nothing but that the training is the same."""


LOOKING = {
    "CSVLogger": check_csv({}),
    "CSVLogger, append": check_csv({"separator": ";", "append": True}),
    "History": (lambda keras, folder: keras.callbacks.History(), check_nothing),
    "LambdaCallback": check_lambdas(),
    "ProgbarLogger": (make_progress, check_nothing),
    "TerminateOnNaN": (lambda keras, folder: keras.callbacks.TerminateOnNaN(), check_nothing),
}


@pytest.mark.parametrize("case", LOOKING)
def test_a_callback_that_looks_changes_nothing(keras, sk, tmp_path, case, capsys):
    make, check = LOOKING[case]
    callback = make(keras, tmp_path)
    model, history = fit(keras, sk, callback)
    plain, expected = fit(keras, sk)
    check_equal(content(model), content(plain))
    np.testing.assert_array_equal(history["loss"], expected["loss"])
    check(tmp_path, callback, history)


@pytest.fixture
def server():
    """A server on this machine, and the bodies that were posted to it, with path and type."""
    told = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            told.append((self.path, self.headers, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", told
        running.shutdown()


tried("RemoteMonitor", "root", "path", "field", "headers", "send_as_json")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_remote_monitor_is_told(keras, sk, server, as_json, monkeypatch):
    pytest.importorskip("requests")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    root, told = server
    monitor = keras.callbacks.RemoteMonitor(
        root, path="/here", field="d", headers={"X-Run": "7"}, send_as_json=as_json
    )
    _, history = fit(keras, sk, monitor)
    assert [(path, headers["X-Run"]) for path, headers, _ in told] == [("/here", "7")] * EPOCHS
    bodies = [body if as_json else urllib.parse.parse_qs(body)["d"][0] for _, _, body in told]
    assert [json.loads(body)["loss"] for body in bodies] == pytest.approx(history["loss"])


tried("TerminateOnNaN", "raise_error")


@pytest.mark.parametrize("raises", [False, True])
def test_a_nan_ends_training(keras, sk, raises):
    ending = keras.callbacks.TerminateOnNaN
    if raises and "raise_error" not in inspect.signature(ending).parameters:
        pytest.skip("not in this Keras")
    ending = ending(raise_error=True) if raises else ending()
    callback, kept = watch(keras, "on_train_batch_end")
    model = compiled(keras, sk)
    bad = batches().map(lambda x, y: (x, y * np.nan))
    error = pytest.raises(RuntimeError, match="NaN") if raises else contextlib.nullcontext()
    with error:
        model.fit(batches().take(2).concatenate(bad), verbose=0, callbacks=[callback, ending])
    assert len(kept) == 3


# ---- learning rates ------------------------------------------------------------------------------


def by_hand(keras, sk, rates):
    """Trains an epoch at each of the learning rates."""
    model = compiled(keras, sk, keras.optimizers.Adagrad(1.0))
    for rate in rates:
        model.optimizer.learning_rate = rate
        model.fit(batches(), verbose=0)
    return content(model)


tried("LearningRateScheduler", "schedule", "verbose")
tried(
    "ReduceLROnPlateau",
    *("monitor", "factor", "patience", "verbose", "mode", "min_delta", "cooldown", "min_lr"),
)


def test_rates_of_a_schedule(keras, sk, capsys):
    rates = [0.5, 0.25, 0.125]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rates[epoch], verbose=1)
    model, _ = fit(keras, sk, schedule, epochs=3, optimizer=keras.optimizers.Adagrad(1.0))
    check_equal(content(model), by_hand(keras, sk, rates))


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"factor": 0.5, "patience": 1}, [1, 1, 0.5, 0.25, 0.125]),
        ({"factor": 0.5, "patience": 1, "cooldown": 2}, [1, 1, 0.5, 0.5, 0.25]),
        ({"factor": 0.5, "patience": 1, "min_lr": 0.3}, [1, 1, 0.5, 0.3, 0.3]),
        ({"factor": 0.25, "patience": 2}, [1, 1, 1, 0.25, 0.25]),
    ],
    ids=str,
)
def test_rates_on_a_plateau(keras, sk, options, rates, capsys):
    """Of a loss that by `min_delta` never gets better."""
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", mode="min", min_delta=1e9, verbose=1, **options
    )
    adagrad = keras.optimizers.Adagrad(1.0)
    model, _ = fit(keras, sk, plateau, epochs=len(rates), optimizer=adagrad)
    check_equal(content(model), by_hand(keras, sk, rates))


# ---- stopping and saving -------------------------------------------------------------------------

tried(
    "EarlyStopping",
    *("monitor", "min_delta", "patience", "verbose", "mode", "baseline"),
    *("restore_best_weights", "start_from_epoch"),
)


@pytest.mark.parametrize(
    ("options", "num_epochs", "best"),
    [
        # By `min_delta` the loss is best in the first epoch that counts.
        ({"patience": 2, "restore_best_weights": True}, 3, 0),
        ({"patience": 2, "restore_best_weights": True, "start_from_epoch": 1}, 4, 1),
        ({"patience": 1, "restore_best_weights": False}, 2, 1),
        ({"patience": 2, "baseline": -1e9}, 2, 1),
    ],
    ids=str,
)
def test_early_stopping(keras, sk, options, num_epochs, best, capsys):
    callback, kept = watch(keras)
    stop = keras.callbacks.EarlyStopping(
        monitor="loss", mode="min", min_delta=1e9, verbose=1, **options
    )
    model, _ = fit(keras, sk, callback, stop, epochs=6)
    assert len(kept) == num_epochs
    check_equal(content(model), kept[best])


tried(
    "ModelCheckpoint",
    *("filepath", "monitor", "verbose", "save_best_only", "save_weights_only", "mode"),
    *("save_freq", "initial_value_threshold", "options"),
)
SAVED_LAST = [
    {"save_freq": "epoch", "verbose": 1},
    {"save_freq": 2},
    {"save_best_only": True, "monitor": "loss", "mode": "max", "initial_value_threshold": -1e9},
]


@pytest.mark.parametrize("only_weights", [False, True], ids=["model", "weights"])
@pytest.mark.parametrize("options", SAVED_LAST, ids=str)
def test_model_checkpoint(keras, sk, tmp_path, options, only_weights, capsys):
    path = str(tmp_path / "new" / ("m.weights.h5" if only_weights else "m.keras"))
    if only_weights and keras.__name__ == "tf_keras":
        options = {**options, "options": tf.train.CheckpointOptions()}
    at = "on_train_batch_end" if options.get("save_freq") == 2 else "on_epoch_end"
    callback, kept = watch(keras, at)
    saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=only_weights, **options)
    _, history = fit(keras, sk, callback, saving)
    if only_weights:
        loaded = compiled(keras, sk)
        loaded.load_weights(path)
    else:
        loaded = keras.models.load_model(path)
    last = len(kept) - 1  # 6 batches by two, 2 epochs
    if options.get("save_best_only"):
        last = int(np.argmax(history["loss"]))
    expected = kept[last]
    if only_weights:  # the new optimizer begins anew
        expected = {name: part for name, part in expected.items() if "/states" not in name}
    check_equal(rows_in(loaded) if only_weights else content(loaded), expected)


def test_a_file_of_each_epoch(keras, sk, tmp_path):
    callback, kept = watch(keras)
    path = str(tmp_path / "{epoch}.keras")
    fit(keras, sk, callback, keras.callbacks.ModelCheckpoint(path))
    for epoch in range(EPOCHS):
        check_equal(content(keras.models.load_model(path.format(epoch=epoch + 1))), kept[epoch])


@pytest.mark.parametrize(
    ("name", "only_weights"),
    [("m.h5", False), ("folder", False), ("m.h5", True), ("m.keras", True)],
)
def test_a_format_without_a_place_for_tables_is_refused_before_training(
    keras, sk, tmp_path, name, only_weights
):
    try:
        saving = keras.callbacks.ModelCheckpoint(
            str(tmp_path / name), save_weights_only=only_weights
        )
    except ValueError:
        assert keras.__name__ == "keras"  # which takes no such name
        return
    model = compiled(keras, sk)
    with pytest.raises(NotImplementedError, match=f"leave the keys of 'city:0', .*{name}"):
        model.fit(batches(), verbose=0, callbacks=[[saving]])
    assert not any(map(len, tables_of(model).values()))
    assert not any(tmp_path.iterdir())


def test_weights_under_the_name_of_a_model_are_refused(keras, sk, tmp_path):
    """By tf_keras, which would write an older format there; Keras 3 refuses them itself."""
    model, _ = fit(keras, sk, epochs=1)
    with pytest.raises((NotImplementedError, ValueError), match=r"\.weights\.h5"):
        model.save_weights(str(tmp_path / "m.keras"))


def test_weights_in_tensorflows_format(keras, sk, tmp_path):
    if keras.__name__ == "keras":
        pytest.skip("of tf_keras alone")
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "w"), save_weights_only=True)
    model, _ = fit(keras, sk, saving)
    other = compiled(keras, sk)
    other.load_weights(str(tmp_path / "w"))
    check_equal(content(other), content(model))


tried(
    "BackupAndRestore",
    *("backup_dir", "save_freq", "double_checkpoint", "delete_checkpoint"),
    "save_before_preemption",
)
BACKUPS = [
    {"save_freq": "epoch"},
    {"save_freq": 2, "delete_checkpoint": False},
    {"save_freq": "epoch", "double_checkpoint": True},
    {"save_freq": 1, "delete_checkpoint": True},
]


@pytest.mark.parametrize("options", BACKUPS, ids=str)
def test_backup_and_restore_brings_back_what_was_saved_last(keras, sk, tmp_path, options):
    options, folder = dict(options), tmp_path / "backup"
    if keras.__name__ == "tf_keras" and options.pop("double_checkpoint", False):
        options["save_before_preemption"] = False

    class Fault(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("power is off")

    def backup():
        return keras.callbacks.BackupAndRestore(str(folder), **options)

    at = "on_epoch_end" if options["save_freq"] == "epoch" else "on_train_batch_end"
    callback, kept = watch(keras, at)
    with pytest.raises(RuntimeError, match="power is off"):
        fit(keras, sk, callback, backup(), Fault(), epochs=4)
    found, restored = watch(keras, "on_train_begin")
    fit(keras, sk, backup(), found, epochs=4)
    check_equal(restored[0], kept[-1])  # 6 batches by two, 2 epochs
    is_kept = any(path.is_file() for path in folder.rglob("*"))
    assert is_kept == (not options.get("delete_checkpoint", True))


# ---- TensorBoard ---------------------------------------------------------------------------------

tried(
    "TensorBoard",
    *("log_dir", "histogram_freq", "write_graph", "write_images", "write_steps_per_second"),
    *("update_freq", "profile_batch", "embeddings_freq", "embeddings_metadata"),
)


def events_in(folder):
    """Returns tag -> the tensors that a run has written under it."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("events.out.tfevents*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[value.tag].append(tf.make_ndarray(value.tensor))
    return found


def test_tensorboard_has_the_rows_of_tables(keras, sk, tmp_path):
    pytest.importorskip("tensorboard")
    board = keras.callbacks.TensorBoard(
        str(tmp_path),
        histogram_freq=1,
        write_graph=True,
        write_images=True,
        write_steps_per_second=True,
        update_freq=1,
    )
    callback, kept = watch(keras)
    model, history = fit(keras, sk, callback, board)
    found = events_in(tmp_path)
    assert [float(each) for each in found["epoch_loss"]] == pytest.approx(history["loss"])
    for name, table in tables_of(model).items():
        tag = f"{table.variable.name.replace(':', '_')}/histogram"
        if keras.__name__ == "keras":
            tag = f"{table.variable.path}/histogram"
        for each, histogram in zip(kept, found[tag], strict=True):
            rows = each[f"{name}/values"]
            assert histogram[:, 2].sum() == rows.size
            assert (histogram[0, 0], histogram[-1, 1]) == pytest.approx((rows.min(), rows.max()))
        assert len(found[tag.replace("histogram", "image")]) == EPOCHS


def test_tensorboard_reads_tables_in_the_epochs_of_histograms_alone(keras, sk, tmp_path):
    """And saves weights in the same epoch, which are those of the table, not a dense variable's."""
    pytest.importorskip("tensorboard")
    board = keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=2, embeddings_freq=2)
    model, _ = fit(keras, sk, board, epochs=4)
    plain, _ = fit(keras, sk, epochs=4)
    check_equal(content(model), content(plain))
    tags = [tag for tag in events_in(tmp_path) if tag.endswith("/histogram")]
    assert len(tags) == 5  # three tables, a kernel and a bias
    assert {len(events_in(tmp_path)[tag]) for tag in tags} == {2}


def test_tensorboard_draws_no_table_without_rows(keras, sk, tmp_path):
    pytest.importorskip("tensorboard")
    table = sk.Table("empty", 2, trainable=False)
    ids = keras.Input([], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    model.compile("sgd", "mse", run_eagerly=True)
    board = keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1, write_images=True)
    with pytest.warns(UserWarning, match="no images in this epoch: 'empty:0' would be one of no"):
        model.fit(np.arange(8), np.ones(8), verbose=0, callbacks=[board])
    assert len(table) == 0 and board.write_images
    assert not any(tag.endswith("/image") for tag in events_in(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"update_freq": "epoch", "write_graph": False, "profile_batch": (2, 3)},
        {"update_freq": "batch", "embeddings_freq": 1, "embeddings_metadata": "meta.tsv"},
    ],
    ids=str,
)
def test_tensorboard_changes_nothing(keras, sk, tmp_path, options):
    pytest.importorskip("tensorboard")
    model, _ = fit(keras, sk, keras.callbacks.TensorBoard(str(tmp_path), **options))
    plain, _ = fit(keras, sk)
    check_equal(content(model), content(plain))
    if "embeddings_freq" in options:
        (path, *_) = sorted(tmp_path.rglob("keras_embedding.ckpt-1*"))
        assert path.stat().st_size > 0


def test_a_table_is_no_tensor_for_others(keras, sk, tmp_path):
    """Neither before, after, nor where a callback that is none of TensorBoard asks."""
    model, _ = fit(keras, sk, epochs=1)
    table = tables_of(model)["user"]
    with pytest.raises(NotImplementedError, match="convert_to_tensor"):
        tf.convert_to_tensor(table.variable)


# ---- what is refused -----------------------------------------------------------------------------

tried("SwapEMAWeights", "swap_on_epoch")
tried("OrbaxCheckpoint", "directory")


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_averages_of_weights_are_refused_before_training(keras, sk, swap_on_epoch):
    swap = getattr(keras.callbacks, "SwapEMAWeights", None)
    callbacks = [] if swap is None else [swap(swap_on_epoch=swap_on_epoch)]
    model = compiled(keras, sk, keras.optimizers.Adam(use_ema=True))
    with pytest.raises(NotImplementedError, match="use_ema=True of Adam.*average the rows"):
        model.fit(batches(), verbose=0, callbacks=callbacks)
    assert not any(map(len, tables_of(model).values()))


def test_an_orbax_checkpoint_is_refused_before_training(keras, sk):
    if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
        pytest.skip("not in this Keras")
    # Its __init__ needs a package that a TensorFlow program has no use for.
    cls = keras.callbacks.OrbaxCheckpoint
    callback = cls.__new__(cls)
    model = compiled(keras, sk)
    with pytest.raises(NotImplementedError, match="OrbaxCheckpoint .*Use ModelCheckpoint"):
        model.fit(batches(), verbose=0, callbacks=[callback])
    assert not any(map(len, tables_of(model).values()))


# Options of what is refused; and of what fails in any `fit` of TensorFlow 2, tables or none.
NOT_TRIED = {
    "BaseLogger": {"stateful_metrics"},
    "OrbaxCheckpoint": {
        *("monitor", "verbose", "save_best_only", "mode", "save_freq", "initial_value_threshold"),
        *("max_to_keep", "save_on_background", "save_weights_only"),
    },
}

BY_PLACE = {"filename", "filepath", "log_dir", "directory", "backup_dir", "root", "schedule"}


def test_every_option_is_tried(keras):
    of_keras = {
        name: cls
        for name, cls in vars(keras.callbacks).items()
        if inspect.isclass(cls)
        and issubclass(cls, keras.callbacks.Callback)
        and name not in ("CallbackList", "SidecarEvaluatorModelExport")  # no program gives them
    }
    assert len(of_keras) >= 12
    statement = r"(?ms)^ *tried\((?:[^\n]*\)|.*?^\))$"
    used = re.sub(statement, "", Path(__file__).read_text())
    assert re.search(r"(?m)^ *tried\(", used) is None
    for options in TRIED.values():
        for option in options - BY_PLACE:
            assert re.search(rf"\b{option}\b", used), option
    for name, cls in of_keras.items():
        options = {
            each.name
            for each in inspect.signature(cls.__init__).parameters.values()
            if each.kind is not each.VAR_KEYWORD and each.name != "self"
        }
        assert options <= TRIED[name] | NOT_TRIED.get(name, set()), name
