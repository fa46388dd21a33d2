"""The callbacks that Keras 3 and tf_keras bring, beside tables."""

import inspect
from collections import defaultdict

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.models import batches, check_equal, compiled, content, rows_in, tables_of

EPOCHS = 2  # of 3 steps


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


# Keras calls these with logs and numbers alone, or a program does not give them to `fit`.
WITHOUT_WEIGHTS = {
    *("BaseLogger", "CSVLogger", "Callback", "CallbackList", "History", "LambdaCallback"),
    *("LearningRateScheduler", "ProgbarLogger", "ReduceLROnPlateau", "RemoteMonitor"),
    *("SidecarEvaluatorModelExport", "TerminateOnNaN"),
}
TESTED = {
    *("BackupAndRestore", "EarlyStopping", "ModelCheckpoint", "OrbaxCheckpoint"),
    *("SwapEMAWeights", "TensorBoard"),
}


def test_every_callback_is_known(keras):
    """One that a new Keras brings may save or set weights, and would leave tables out."""
    classes = {name: cls for name, cls in vars(keras.callbacks).items() if inspect.isclass(cls)}
    assert classes.keys() - TESTED == classes.keys() & WITHOUT_WEIGHTS
    assert len(classes) >= 12


# ---- stopping and saving -------------------------------------------------------------------------


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


SAVED_LAST = [
    {"save_freq": "epoch", "verbose": 1},
    {"save_freq": 2},
    {"save_best_only": True, "monitor": "loss", "mode": "max", "initial_value_threshold": -1e9},
]


@pytest.mark.parametrize("only_weights", [False, True], ids=["model", "weights"])
@pytest.mark.parametrize("options", SAVED_LAST, ids=str)
def test_model_checkpoint(keras, sk, tmp_path, options, only_weights, capsys):
    name = "{epoch}" if options.get("save_freq") == "epoch" else "m"
    path = str(tmp_path / "new" / (name + (".weights.h5" if only_weights else ".keras")))
    if only_weights and keras.__name__ == "tf_keras":
        options = {**options, "options": tf.train.CheckpointOptions()}
    at = "on_train_batch_end" if options.get("save_freq") == 2 else "on_epoch_end"
    callback, kept = watch(keras, at)
    saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=only_weights, **options)
    _, history = fit(keras, sk, callback, saving)
    last = len(kept) - 1  # 6 batches by two, 2 epochs
    if options.get("save_best_only"):
        last = int(np.argmax(history["loss"]))
    if not only_weights:
        loaded = keras.models.load_model(path.format(epoch=EPOCHS))
        check_equal(content(loaded), kept[last])
        return
    loaded = compiled(keras, sk)
    loaded.load_weights(path.format(epoch=EPOCHS))
    # The new optimizer begins anew.
    expected = {name: part for name, part in kept[last].items() if "/states" not in name}
    check_equal(rows_in(loaded), expected)


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
    with pytest.raises(NotImplementedError, match="convert_to_tensor"):  # as before and for others
        tf.convert_to_tensor(tables_of(model)["user"].variable)


# ---- what is refused -----------------------------------------------------------------------------


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
