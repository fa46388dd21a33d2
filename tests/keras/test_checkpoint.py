"""`Checkpoint`: what `fit` comes to after a restore is what it comes to without a stop."""

import errno
import functools
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import uuid
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras
from sok_lite.bridge import saves as of_saves
from sok_lite.bridge import sigterm
from sok_lite.cli.main import main
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import BackgroundDump
from sok_lite.engine.files.store import Store
from sok_lite.keras.checkpoint import Restored
from sok_lite.keras.dense_states import DenseStates
from tests.keras.models import batches
from tests.support.stopping import Stop, stopping

STEPS = 3  # of an epoch of `batches()`


def made(keras, sk, seed=1, optimizer="adam", run_eagerly=True, **compiled):
    """A small model with dropout and moving averages; the seed is of dense weights alone.

    To trace a step takes longer than all steps of a test that are called at once.
    """
    keras.utils.set_random_seed(seed)
    item, user = sk.Table("items", 3, "ones"), sk.Table("users", 2)
    ids = {name: keras.Input([], dtype="int64", name=name) for name in ("item", "user")}
    x = keras.layers.Concatenate()([item(ids["item"]), user(ids["user"])])
    x = keras.layers.BatchNormalization()(keras.layers.Dense(4)(x))
    if keras.__name__ == "keras":  # of tf_keras nothing saves what it draws by
        x = keras.layers.Dropout(0.3, seed=seed)(x)
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    model.compile(optimizer, "mse", run_eagerly=run_eagerly, **compiled)
    return model


traced = functools.partial(made, run_eagerly=False)


def data():
    return batches().map(lambda x, y: ({name: x[name] for name in ("item", "user")}, y))


def fit(model, *callbacks, epochs=3, is_validated=False):
    options = {"epochs": epochs, "verbose": 0, "shuffle": False}
    options["validation_data"] = data() if is_validated else None
    return model.fit(data(), callbacks=list(callbacks), **options)


def break_off(keras, sk, path, after, model=None, epochs=3, **options):
    """Fits a model that stops after so many batches, before the last one can be saved."""
    with pytest.raises(Stop):
        model = made(keras, sk) if model is None else model
        fit(model, stopping(keras, after), sk.Checkpoint(path, **options), epochs=epochs)


@functools.cache
def never_stopped(keras, make=made, others=list, **options):
    """All that a model of seed 1 holds that was trained at once."""
    whole = make(keras, sok_lite.keras.classes_for(keras), 1)
    fit(whole, *others(), **options)
    return everything(whole)


def check_goes_on(keras, sk, path, options=None, after=STEPS + 2, make=made, others=list):
    """Trains a model with a stop as one without; returns what the last `fit` gave.

    Args:
      make: a model of a seed. others: makes callbacks beside the checkpoint.
    """
    broken, again = (make(keras, sk, seed) for seed in (1, 2))
    with pytest.raises(Stop):
        fit(broken, *others(), stopping(keras, after), sk.Checkpoint(path, **options or {}))
    history = fit(again, *others(), sk.Checkpoint(path, **options or {}))
    check_same(everything(again), never_stopped(keras, make, others))
    return history


def saves(folder):
    """The folders of saves, the oldest first; `latest` leads to one of them."""
    assert (folder / "latest").resolve().parent == folder.resolve()
    return sorted(folder.glob("step-*"))


def everything(model):
    """All that a model holds: tables with states, scores and times, dense weights, optimizer."""
    found = {}
    for layer in model.layers:
        if not hasattr(layer, "statistics"):
            continue
        for part, tensor in layer.variable.saved_tensors().items():
            found[f"{layer.name}/{part}"] = tensor.numpy()
        # Its other facts are when lookups were, by the clock.
        facts = json.loads(found.pop(f"{layer.name}/facts"))
        found[f"{layer.name}/lookups"] = facts["num_lookups"]
    dense = [v for v in model.variables if not hasattr(v, "table")]
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    dense = [v for v in dense if id(v) not in metrics]
    optimizer = model.optimizer.variables
    dense += optimizer() if callable(optimizer) else optimizer
    dense = [v for v in dense if not hasattr(v, "table")]
    return found | {f"dense {i}": tf.convert_to_tensor(v).numpy() for i, v in enumerate(dense)}


def check_same(found, expected):
    assert found.keys() == expected.keys() and any("states" in name for name in found)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def said_by_us(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "sok_lite"]


# ---- what goes on --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "options", "at"),
    [
        (STEPS + 2, {"every": 2}, (1, 1)),
        (STEPS + 2, {}, (1, 0)),
        (2 * STEPS, {"every": STEPS}, (1, 0)),  # the last batch of an epoch is saved at its end
        (STEPS + 2, {"every": 1, "incremental": 2}, (1, 1)),
        (2 * STEPS + 1, {"background": True}, (2, 0)),
    ],
)
def test_what_goes_on_is_what_never_stopped(
    keras, sk, tmp_path, capsys, monkeypatch, after, options, at
):
    write = BackgroundDump._write
    # It goes on when the next `fit` begins.
    monkeypatch.setattr(BackgroundDump, "_write", lambda *args: (time.sleep(0.3), write(*args)))
    history = check_goes_on(keras, sk, tmp_path, options, after, traced)
    assert history.epoch == list(range(at[0], 3))
    epochs = {1: "1 epoch complete", 2: "2 epochs complete"}[at[0]]
    batches = ", 1 batch of the next" if at[1] else ""
    said = f" (step {at[0] * STEPS + at[1]:,}, {epochs}{batches}).\n"
    assert capsys.readouterr().out.endswith(said)


def nadam(keras):
    return keras.optimizers.Nadam(0.1)


def scaled_nadam(keras):
    """Keras does not list Nadam's product where this has built it."""
    return keras.optimizers.LossScaleOptimizer(nadam(keras))


def accumulating(number):
    """What is saved after the three batches of an epoch is within a step."""

    def make(keras):
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return keras.optimizers.Adam(rate, gradient_accumulation_steps=number)

    return make


def fading(keras):
    """An optimizer that no rule follows: its power is that of all its variables together."""

    class Fading(keras.optimizers.SGD):
        has_means = False

        def build(self, variables):
            super().build(variables)
            if not self.has_means:
                self.has_means = True
                self.means = [self.add_variable_from_reference(v, "mean") for v in variables]
                if is_3:
                    self.power = keras.Variable(1.0)
                else:
                    one = (variables[0], "power", (), tf.ones([]))
                    self.power = self.add_variable_from_reference(*one)

        def update_step(self, gradient, variable, learning_rate=0.1):
            key = self._get_variable_index if is_3 else lambda v: self._index_dict[self._var_key(v)]
            mean = self.means[key(variable)]
            self.power.assign(self.power * 0.9)
            mean.assign(0.5 * mean + gradient)
            variable.assign(variable - 0.1 * mean * self.power)

    is_3 = keras.__name__ == "keras"
    return Fading()


OPTIMIZERS = {"Nadam": nadam, "scaled": scaled_nadam, "2": accumulating(2), "4": accumulating(4)}


@pytest.mark.parametrize("name", [*OPTIMIZERS, "without a rule"])
def test_what_an_optimizer_keeps_beside_its_states_of_rows_goes_on(keras, sk, tmp_path, name):
    if keras.__name__ == "tf_keras" and name in OPTIMIZERS:
        pytest.skip("its Nadam goes on otherwise, and it accumulates no gradients")
    optimizer = OPTIMIZERS.get(name, fading)
    check_goes_on(keras, sk, tmp_path, make=lambda *args: made(*args, optimizer(keras)))


def within(keras, act):
    """A callback that acts after the second batch of the first epoch."""

    class Within(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert "loss" in logs
            if self.model.optimizer.iterations == 2:
                act(self.model)

    return Within()


@pytest.mark.full_only("fits three models once more")
def test_an_epoch_that_a_callback_stops_goes_on_within(keras, sk, tmp_path):
    stopped, again = made(keras, sk), made(keras, sk, seed=2)
    stop = within(keras, lambda model: setattr(model, "stop_training", True))
    fit(stopped, stop, sk.Checkpoint(tmp_path))
    assert stopped.optimizer.iterations == 2
    fit(again, within(keras, lambda model: None), sk.Checkpoint(tmp_path))
    check_same(everything(again), never_stopped(keras))


@pytest.mark.full_only("fits three models once more")
def test_keys_expire_as_without_a_stop(keras, sk, tmp_path):
    def expire():
        return [sk.Expire(num_lookups=1, every=2)]

    check_goes_on(keras, sk, tmp_path, {"every": 1}, STEPS + 3, others=expire)


@pytest.mark.full_only("saves nine times")
def test_several_batches_in_one_call_that_do_not_divide_an_epoch(keras, sk, tmp_path):
    model = traced(keras, sk, steps_per_execution=2)
    fit(model, sk.Checkpoint(tmp_path, every=1, keep=99))
    assert model.optimizer.iterations == 3 * STEPS
    found = [manifest.read(path).extra["sok_lite.keras"] for path in saves(tmp_path)]
    at = [(each["epoch"], each["batch"], each["steps"]) for each in found]
    assert at == [(0, 2, 2), (1, 0, 3), (1, 2, 5), (2, 0, 6), (2, 2, 8), (3, 0, 9)]
    for path in saves(tmp_path)[3:]:
        shutil.rmtree(path)
    three = traced(keras, sk, steps_per_execution=3)
    with pytest.raises(ValueError, match="after 2 batches of an epoch, and this model takes 3"):
        fit(three, sk.Checkpoint(tmp_path, every=1, keep=99))


def test_metrics_that_no_batch_has_built_are_no_hindrance(keras, sk, tmp_path):
    def compiled():
        square = keras.metrics.MeanSquaredError("square")
        return traced(keras, sk, metrics=["mae", square])

    break_off(keras, sk, tmp_path, 2, compiled(), epochs=1, every=1)
    again = compiled()
    history = fit(again, sk.Checkpoint(tmp_path, every=1), epochs=1)
    assert again.optimizer.iterations == STEPS and history.history["square"][0] > 0


def test_a_layer_that_is_never_called_is_no_hindrance(keras, sk, tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.head = sk.Table("items", 3), keras.layers.Dense(1)
            self.never = keras.layers.Dense(7)

        def call(self, x):
            return self.head(self.table(x["item"]))

    model = Own()
    model.compile("sgd", "mse")
    fit(model, sk.Checkpoint(tmp_path), epochs=1)
    assert len(saves(tmp_path)) == 1


def test_a_program_that_fits_each_day_asks_which_day_it_is(keras, sk, tmp_path, caplog):
    def days(model, *callbacks):
        checkpoint = sk.Checkpoint(tmp_path / "days", every=1)
        place = checkpoint.newest()
        for day in range(0 if place is None else place.epoch, 3):
            of_day = data().repeat(2).skip(day).take(STEPS)  # others each day
            options = {"initial_epoch": day, "epochs": day + 1, "verbose": 0, "shuffle": False}
            model.fit(of_day, callbacks=[checkpoint, *callbacks], **options)
        return place

    whole = made(keras, sk)
    assert days(whole) is None
    shutil.rmtree(tmp_path / "days")
    with pytest.raises(Stop):
        days(made(keras, sk), stopping(keras, STEPS + 2))
    with pytest.raises(Stop):  # the same day again
        days(made(keras, sk, seed=2), stopping(keras, 2))
    place = days(again := made(keras, sk, seed=3))
    assert (place.epoch, place.steps) == (1, STEPS + 2) and place.batch == 2
    check_same(everything(again), everything(whole))
    assert not said_by_us(caplog)


@pytest.mark.full_only("fits three models once more")
def test_a_second_fit_trains_on(keras, sk, tmp_path):
    """With a checkpoint that is its own, and after `restore` in a next process."""
    model, checkpoint = made(keras, sk), sk.Checkpoint(tmp_path)
    for _ in range(2):
        assert fit(model, checkpoint, epochs=1).epoch == [0]
    again, later = made(keras, sk, seed=2), sk.Checkpoint(tmp_path)
    assert later.restore(again).steps == 2 * STEPS
    check_same(everything(again), everything(model))
    assert fit(again, later, epochs=1).epoch == [0]
    assert fit(made(keras, sk), sk.Checkpoint(tmp_path), epochs=1).epoch == []  # nothing to do


@pytest.mark.full_only("fits three models once more")
def test_a_resume_that_is_broken_off_leaves_later_fits_whole(keras, sk, tmp_path):
    break_off(keras, sk, tmp_path, STEPS + 3, every=2)
    again = made(keras, sk)
    break_off(keras, sk, tmp_path, 1, again, every=2)
    before = int(again.optimizer.iterations)
    fit(again, epochs=1)
    assert again.optimizer.iterations == before + STEPS


# ---- what is said --------------------------------------------------------------------------------


def test_a_restore_within_an_epoch_warns_of_what_fit_does_then(keras, sk, tmp_path, caplog):
    break_off(keras, sk, tmp_path, 2, every=1)
    assert sk.Checkpoint(tmp_path, every=1).restore(made(keras, sk)).batch == 1
    (said,) = said_by_us(caplog)
    assert "after 1 batches of epoch 0" in said


@pytest.mark.parametrize(
    "anew, stopped, is_said",
    [(True, STEPS + 2, True), (False, STEPS + 2, False), (True, 2, False), (True, STEPS, False)],
)
def test_data_that_shuffles_anew_in_each_epoch_is_named_within_one(
    keras, sk, tmp_path, caplog, anew, stopped, is_said
):
    def train(*callbacks):
        shuffled = data().unbatch().shuffle(48, seed=3, reshuffle_each_iteration=anew).batch(16)
        made(keras, sk).fit(shuffled, epochs=2, callbacks=list(callbacks), verbose=0)

    with pytest.raises(Stop):
        train(stopping(keras, stopped), sk.Checkpoint(tmp_path, every=1))
    train(sk.Checkpoint(tmp_path, every=1))
    assert len(said_by_us(caplog)) == is_said
    if is_said:
        assert "comes in another order than before the stop: of epoch 1" in said_by_us(caplog)[0]
        assert "reshuffle_each_iteration=False" in said_by_us(caplog)[0]


def test_arrays_that_come_in_another_order_are_named(keras, sk, tmp_path, caplog):
    (x, y), *_ = data().unbatch().batch(48)
    x = {name: ids.numpy() for name, ids in x.items()}

    def train(*callbacks, **options):
        arguments = {"batch_size": 16, "epochs": 2, "verbose": 0, "callbacks": list(callbacks)}
        made(keras, sk).fit(x, y.numpy(), **arguments, **options)

    with pytest.raises(Stop):
        train(stopping(keras, STEPS + 2), sk.Checkpoint(tmp_path, every=1))
    shutil.copytree(tmp_path, tmp_path / "ordered")
    train(sk.Checkpoint(tmp_path / "ordered"), shuffle=False)
    assert not said_by_us(caplog)
    train(sk.Checkpoint(tmp_path))
    (said,) = said_by_us(caplog)
    assert "a dict, comes in another order than before" in said and "shuffle=False" in said


def test_a_run_says_what_it_does_not_do_as_it_was_asked(keras, sk, tmp_path, capsys, caplog):
    def trained(rate, path=tmp_path, epochs=2):
        model = made(keras, sk, optimizer=keras.optimizers.Adam(rate))
        return fit(model, sk.Checkpoint(path), epochs=epochs), model

    trained(0.01)
    history, model = trained(0.1)
    assert history.epoch == []
    folder = tmp_path / f"step-{2 * STEPS:010}"
    said = f"Resuming from {folder} (step {2 * STEPS}, 2 epochs complete)."
    said += " Nothing to train: epochs=2 are done."
    is_saved = keras.__name__ == "keras"  # tf_keras does not have it among an optimizer's variables
    said += " The learning rate 0.01 of the checkpoint replaces 0.1.\n" if is_saved else "\n"
    assert capsys.readouterr().out == said
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01 if is_saved else 0.1)
    other = made(keras, sk, optimizer=keras.optimizers.Adam(0.2))
    sk.Checkpoint(tmp_path).restore(other)
    restored = "The learning rate 0.01 of the checkpoint replaces 0.2."
    assert said_by_us(caplog) == ([restored] if is_saved else [])
    for epochs in (1, 2):  # a schedule is no news
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        trained(rate, tmp_path / "schedule", epochs)
    assert capsys.readouterr().out.endswith(", 1 epoch complete).\n")


# ---- saves that fail or are broken off -----------------------------------------------------------


def test_a_dense_file_with_another_byte_is_named(tmp_path, keras, sk):
    model = made(keras, sk)
    fit(model, sk.Checkpoint(tmp_path), epochs=1)
    (path,) = tmp_path.glob("**/of_all_ranks.npz")
    whole, told = path.read_bytes(), 0
    for at in range(0, len(whole), 997):
        data = bytearray(whole)
        data[at] ^= 0xFF
        path.write_bytes(data)
        try:
            sk.Checkpoint(tmp_path).restore(model)
        except ValueError as error:
            assert str(path) in str(error)
            told += 1
    assert told


def killed(keras, path, number, options):
    """Trains in a process that is killed at the n-th change of a file below a folder.

    Between those it can be killed as well, but what is on the disk is then the same or of a file
    that nobody reads yet.
    """
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["tensorflow"])  # which takes seconds to import
    arguments = keras.__name__, str(path), number, options
    process = start.Process(target=train_until_killed, args=arguments)
    process.start()
    process.join(240)
    return process.exitcode == -signal.SIGKILL


def train_until_killed(name, path, number, options):
    keras, seen = importlib.import_module(name), 0

    def audit(event, args):
        nonlocal seen
        is_change = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if is_change and isinstance(args[0], str) and args[0].startswith(path):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sk = sok_lite.keras.classes_for(keras)
    sys.addaudithook(audit)
    fit(made(keras, sk), sk.Checkpoint(path, **options))


@pytest.mark.full_only("starts a process each")
@pytest.mark.parametrize(
    ("keras", "number", "options"),
    [
        ("keras", 30, {"every": 1, "keep": 1}),
        ("tf_keras", 53, {"every": 1, "incremental": 3}),
        ("tf_keras", 71, {"every": 1, "keep": 1}),
        ("keras", 104, {"every": 1, "incremental": 3}),
        ("keras", 127, {"every": 1, "keep": 1}),
    ],
    indirect=["keras"],
)
def test_a_killed_process_leaves_what_goes_on(keras, sk, tmp_path, number, options):
    assert killed(keras, tmp_path, number, options)
    again = made(keras, sk, seed=2)
    newest = sk.Checkpoint(tmp_path, **options).restore(made(keras, sk))
    assert newest is not None and 0 < newest.steps < 3 * STEPS
    assert manifest.is_whole(tmp_path / "latest")
    fit(again, sk.Checkpoint(tmp_path, **options))
    check_same(everything(again), never_stopped(keras))


def copied_unfinished(whole, folder):
    """A folder as a killed process leaves it, before the manifest."""
    shutil.copytree(whole, folder)
    (folder / manifest.NAME).unlink()
    return folder


def test_a_save_that_was_broken_off_goes_and_one_under_way_stays(keras, sk, tmp_path):
    model, path = made(keras, sk), tmp_path / "ck"
    fit(model, sk.Checkpoint(path), epochs=1)
    (whole,) = saves(path)
    under_way = copied_unfinished(whole, path / "step-0000000900")
    again, later = made(keras, sk, seed=2), sk.Checkpoint(path)
    assert later.restore(again) == (str(whole), 1, 0, STEPS)
    with manifest.lock(str(under_way)):
        fit(model, sk.Checkpoint(path), epochs=1)
        assert len(list(under_way.iterdir())) == 4  # rows, dense weights, the mark and the lock
    fit(again, later, epochs=1)
    assert [path.name for path in saves(path)] == ["step-0000000003", "step-0000000006"]


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_of_others_is_removed(keras, sk, tmp_path):
    """Files, whole dumps and broken-off ones: without the mark nobody knows that they are ours."""
    rows = sok.DynamicVariable(2, name="mine")
    sok.assign(rows, [1], [[1.0, 2.0]])
    others = ["step-1", "step-7", "step-0000000000", "step-0000000001", "step-0000000900"]
    for name in [*others[:2], others[4]]:
        sok.dump(tmp_path / name, rows)
    (tmp_path / others[4] / manifest.NAME).unlink()
    (tmp_path / others[3]).mkdir()
    (tmp_path / others[3] / "weights.pt").write_text("of another tool")
    before = []

    def dump_and_look(epoch, logs):
        if epoch == 0:
            sok.dump(tmp_path / others[2], rows)  # a name as of ours, of its own while it trains
            before.append(files_in(tmp_path))

    own = keras.callbacks.LambdaCallback(on_epoch_begin=dump_and_look)
    fit(made(keras, sk), own, sk.Checkpoint(tmp_path, every=2, keep=1), epochs=2)
    assert before[0].items() <= files_in(tmp_path).items()
    assert {path.name for path in saves(tmp_path)} == {*others, f"step-{2 * STEPS:010d}"}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_folder_of_others_is_not_written(keras, sk, tmp_path, is_whole):
    folder = tmp_path / f"step-{STEPS:010d}"
    if is_whole:
        sok.dump(folder, sok.DynamicVariable(2, name="mine"))
    else:
        folder.mkdir()
        (folder / "weights.pt").write_text("of another tool")
    before = files_in(tmp_path)
    error = ValueError if is_whole else FileExistsError  # before and after the epoch
    with pytest.raises(error, match="Give (it|Checkpoint) a path of its own"):
        fit(made(keras, sk), sk.Checkpoint(tmp_path), epochs=1)
    assert files_in(tmp_path) == before


def test_the_folder_of_one_save_is_refused_with_that_above_it(keras, sk, tmp_path):
    fit(made(keras, sk), sk.Checkpoint(tmp_path, keep=2), epochs=2)
    (tmp_path / "step-0000000006" / manifest.NAME).unlink()  # unfinished
    before = files_in(tmp_path)
    for name in ("step-0000000003", "latest", "step-0000000006"):
        with pytest.raises(ValueError, match=f"{name}', one of its saves. Give '{tmp_path}'"):
            sk.Checkpoint(tmp_path / name)
    assert files_in(tmp_path) == before


def test_the_link_leads_to_the_newest_whole_save(keras, sk, tmp_path):
    seen = []

    def look(*_, **__):
        if (tmp_path / "latest").is_symlink():
            steps = manifest.read(tmp_path / "latest").extra["sok_lite.keras"]["steps"]
            seen.append((steps, os.readlink(tmp_path / "latest")))

    own = keras.callbacks.LambdaCallback(on_train_batch_end=look, on_epoch_end=look)
    checkpoint = sk.Checkpoint(tmp_path, every=1, incremental=1, keep=1)
    fit(made(keras, sk), checkpoint, own, epochs=2)
    whole = [(n, f"step-{n - (n + 1) % 2:010d}") for n in (1, 2, 2, 3, 4, 5, 5, 6)]
    assert seen == whole
    link = tmp_path / "latest"
    assert main(["verify", str(link)]) == 0 and len(list(link.glob("dense-*"))) == 1
    link.unlink()
    link.write_text("of the user")
    fit(made(keras, sk), sk.Checkpoint(tmp_path, keep=1))
    assert link.read_text() == "of the user"


def test_two_processes_do_not_write_one_folder(keras, sk, tmp_path):
    folder = tmp_path / f"step-{STEPS:010d}"
    with manifest.lock(str(folder)):
        with pytest.raises(BlockingIOError, match=r"must have one writer.*\(pid \d+ on host"):
            fit(made(keras, sk), sk.Checkpoint(tmp_path, on_error="raise"), epochs=1)
        assert [path.name for path in folder.iterdir()] == ["manifest.json.lock"]


class Failing:
    """A disk that is full for the n-th to m-th save."""

    def __init__(self, monkeypatch, first, last):
        self.count = 0
        sync = manifest.publish

        def publish(*args):
            self.count += 1
            if first <= self.count <= last:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(*args)

        monkeypatch.setattr(manifest, "publish", publish)


@pytest.mark.parametrize("options", [{}, {"background": True}, {"incremental": 5}])
def test_a_save_that_fails_is_told_and_the_next_makes_up_for_it(
    keras, sk, tmp_path, caplog, monkeypatch, options
):
    again = made(keras, sk, seed=2)
    Failing(monkeypatch, 2, 3)
    checkpoint = sk.Checkpoint(tmp_path, every=1, **options)
    with pytest.raises(Stop):
        fit(made(keras, sk), stopping(keras, STEPS + 3), checkpoint)
    checkpoint.wait()
    told = said_by_us(caplog)
    assert len(told) == 2 and all("No space left" in text for text in told)
    assert "failure 1 of the 3" in told[0] and "failure 2 of the 3" in told[1]
    fit(again, sk.Checkpoint(tmp_path, **options))
    check_same(everything(again), never_stopped(keras))


@pytest.mark.parametrize(
    ("failing", "options", "attempts", "steps"),
    [((2, 4), {"every": 1}, 4, 1), ((1, 2), {}, 2, None), ((1, 1), {}, 2, STEPS)],
    ids=["the third in a row", "the last twice", "the last once"],
)
def test_saves_that_fail_thrice_or_at_the_end_are_an_error(
    keras, sk, tmp_path, monkeypatch, failing, options, attempts, steps
):
    disk, is_error = Failing(monkeypatch, *failing), failing != (1, 1)
    with pytest.raises(OSError, match="No space left") if is_error else nullcontext():
        fit(made(keras, sk), sk.Checkpoint(tmp_path, **options), epochs=2 if options else 1)
    assert disk.count == attempts
    newest = sk.Checkpoint(tmp_path).newest()
    assert (newest and newest.steps) == steps


@pytest.fixture
def told_to_end():
    """Gives what SIGTERM is noted by, and takes it back."""
    action, before = sigterm._action_now(), signal.getsignal(signal.SIGTERM)
    yield lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    sigterm._libc.sigaction(int(signal.SIGTERM), action, None)
    sigterm._has_come = False
    sigterm.renew()


@pytest.mark.parametrize(
    ("when", "options", "at"),
    [
        ("on_train_batch_begin", {}, (1, 2)),
        ("on_train_batch_end", {"every": 2, "background": True, "incremental": 3}, (1, 2)),
        ("on_test_batch_begin", {}, (2, 0)),
        ("on_epoch_end", {}, (2, 0)),
    ],
)
def test_a_fit_that_is_told_to_end_saves_where_it_is_and_ends(
    keras, sk, tmp_path, told_to_end, when, options, at
):
    class Telling(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    def tell(self, number, *_, **__):
        if self.epoch == 1 and (when == "on_epoch_end" or number == 1):
            told_to_end()
            told_to_end()

    setattr(Telling, when, tell)
    again = made(keras, sk, seed=2)
    with pytest.raises(SystemExit) as ended:
        told = Telling(), sk.Checkpoint(tmp_path, **options)
        fit(made(keras, sk), *told, is_validated=True)
    assert ended.value.code == 143
    place = sk.Checkpoint(tmp_path).newest()
    assert (place.epoch, place.batch, place.steps) == (*at, at[0] * STEPS + at[1])
    sigterm._has_come = False
    fit(again, sk.Checkpoint(tmp_path), is_validated=True)
    check_same(everything(again), never_stopped(keras, is_validated=True))


def test_it_saves_by_the_clock(keras, sk, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(of_saves, "monotonic", lambda: clock[0])

    def tick(batch, logs=None):
        clock[0] += 31

    own = keras.callbacks.LambdaCallback(on_train_batch_begin=tick)
    fit(made(keras, sk), own, sk.Checkpoint(tmp_path, every="1min", keep=99), epochs=2)
    # A minute is over after two steps, and begins anew with each save.
    assert [int(path.name[5:]) for path in saves(tmp_path)] == [2, STEPS, STEPS + 2, 2 * STEPS]


# ---- addresses -----------------------------------------------------------------------------------


@pytest.fixture
def address(stores_here):
    """A file system in memory, and a new folder of it."""
    return pytest.importorskip("fsspec").filesystem("memory"), f"/{uuid.uuid4().hex}"


def test_at_an_address(keras, sk, stores_here, address):
    system, at = address
    path, options = f"memory:/{at}", {"every": 1, "incremental": 1, "keep": 2}
    again = made(keras, sk, seed=2)
    break_off(keras, sk, path, STEPS + 2, **options)
    # Of a process that was killed, and of somebody else.
    mine, other = f"{at}/step-0000000900", f"{at}/step-0000000901"
    for file in (f"{mine}/of_sok_lite_keras_checkpoint", f"{mine}/dense/x", f"{other}/x"):
        system.pipe(file, b"")
    later = sk.Checkpoint(path, **options)
    found = later.newest()
    assert (found.epoch, found.batch) == (1, 1) and found.path.startswith(f"{path}/step-")
    assert fit(again, later).epoch == [1, 2]
    check_same(everything(again), never_stopped(keras))
    saved = {file.split("/")[2] for file in system.find(at) if file.endswith(manifest.NAME)}
    assert len(saved) == 2
    assert {file.split("/")[2] for file in system.find(at)} == saved | {"step-0000000901"}
    assert len(system.glob(f"{at}/*/dense-*")) == 2
    here = {file.parent.name for file in (stores_here / "staging").rglob(manifest.NAME)}
    assert here == {max(saved)}
    assert len(sok.open_readonly(path)["items"]) == len(again.get_layer("items").export()[0])


def test_what_is_restored_stays_until_it_was_read(keras, sk, address, monkeypatch):
    system, at = address
    trained, again, read = made(keras, sk), made(keras, sk, seed=2), DenseStates.read
    fit(trained, sk.Checkpoint(f"memory:/{at}"), epochs=1)

    def late(states, *args):  # another process has opened a newer one
        system.copy(f"{at}/step-{STEPS:010d}", f"{at}/step-0000000900", recursive=True)
        sok.open_readonly(f"memory:/{at}")
        return read(states, *args)

    monkeypatch.setattr(DenseStates, "read", late)
    sk.Checkpoint(f"memory:/{at}").restore(again)
    check_same(everything(again), everything(trained))


def test_a_save_that_failed_before_its_upload_goes(keras, sk, address, monkeypatch):
    system, at = address

    def failing(store, *args):  # when other ranks have files there
        system.pipe(f"{store.address}/data-{'0' * 16}/x", b"")
        raise OSError("full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(Store, "upload", failing)
        fit(made(keras, sk), sk.Checkpoint(f"memory:/{at}", every=1, on_error="raise"))
    assert {name.split("/")[2] for name in system.find(at)} == {"step-0000000001"}
    fit(made(keras, sk), sk.Checkpoint(f"memory:/{at}"), epochs=1)
    assert {name.split("/")[2] for name in system.find(at)} == {f"step-{STEPS:010d}"}


def test_an_address_is_no_path_and_is_shown_without_its_password(sk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("file://host/ck", ""):
        with pytest.raises(ValueError, match="must be in a folder of this machine"):
            sk.Checkpoint(path)
    assert list(tmp_path.iterdir()) == []
    found = Restored("sftp://me:secret@host/c", 0, 1, steps=2)
    assert repr(found) == "Restored(path='sftp://me@host/c', epoch=0, batch=1, steps=2)"


# ---- the folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["reshard", "--ranks", "2"], ["merge"]])
def test_a_copy_of_its_tables_does_not_name_dense_weights(keras, sk, tmp_path, command):
    model = made(keras, sk)
    fit(model, sk.Checkpoint(tmp_path / "own"), epochs=1)
    (own,) = saves(tmp_path / "own")
    name, *options = command
    copy = tmp_path / "copies" / own.name
    copy.parent.mkdir()
    assert main([name, str(own), str(copy), *options]) == 0
    with pytest.raises(ValueError, match=r"was not written by sok_lite\.keras\.Checkpoint"):
        sk.Checkpoint(copy.parent).restore(model)
    # In its own place it still has them.
    assert main([name, str(own), str(own), *options, "--force"]) == 0
    assert sk.Checkpoint(own.parent).restore(made(keras, sk)).steps == STEPS


@pytest.mark.parametrize("options", [{}, {"background": True}, {"every": 1, "incremental": True}])
def test_the_folder_of_all_saves_gives_the_newest(keras, sk, tmp_path, options):
    model = made(keras, sk)
    fit(model, sk.Checkpoint(tmp_path, **options), epochs=2)
    expected = {name: model.get_layer(name).export() for name in ("items", "users")}
    other = made(keras, sk, seed=2)
    sok.load(tmp_path / "latest", other)
    rows = sok.DynamicVariable(dimension=3, name="items")
    sok.load(tmp_path, rows)
    read = sok.open_readonly(tmp_path)
    for name, (keys, values) in expected.items():
        for found, right in zip(other.get_layer(name).export(), (keys, values), strict=True):
            np.testing.assert_array_equal(found, right)
        np.testing.assert_array_equal(read[name].lookup(keys.numpy()), values)
    np.testing.assert_array_equal(rows.export()[1], expected["items"][1])


def test_a_file_of_keras_is_no_folder_of_saves(keras, sk, tmp_path):
    model = made(keras, sk)
    model.save(tmp_path / "m.keras")
    text = "is a file, .*model.load_weights read files of Keras; .*sok-lite co"
    for read in (lambda path: sok.load(path, model), sok.open_readonly):
        with pytest.raises(FileNotFoundError, match=text):
            read(tmp_path / "m.keras")


def test_increments_are_added_to_a_whole_one(keras, sk, tmp_path):
    fit(made(keras, sk), sk.Checkpoint(tmp_path, every=1, incremental=2, keep=9), epochs=2)
    found = {path.name: manifest.read(path) for path in saves(tmp_path)}
    increments = [
        max(len(s.before) for s in found[n].tables["items"].shards) for n in sorted(found)
    ]
    assert (sorted(found), increments) == (["step-0000000001", "step-0000000004"], [2, 2])
    assert [found[n].extra["sok_lite.keras"]["steps"] for n in sorted(found)] == [3, 6]


# ---- what is refused -----------------------------------------------------------------------------


def test_another_training_and_another_model_are_refused_and_nothing_changes(keras, sk, tmp_path):
    model, checkpoint = made(keras, sk), sk.Checkpoint(tmp_path)
    fit(model, checkpoint, epochs=2)
    other = sk.Checkpoint(tmp_path / "other")
    assert other.restore(model) is None
    shutil.copytree(tmp_path / "step-0000000006", tmp_path / "other" / "step-0000000006")
    with pytest.raises(ValueError, match="has a checkpoint of 6 steps, and this training is at 0"):
        fit(model, other)
    another = made(keras, sk, seed=2, optimizer="sgd")
    before = [np.array(weight) for weight in another.get_weights()]
    with pytest.raises(ValueError, match="The model must be as it was"):
        fit(another, sk.Checkpoint(tmp_path))
    for weight, kept in zip(another.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, kept)


def test_wrong_arguments_are_refused(sk):
    for arguments, error, reason in (
        ({"every": 0}, ValueError, "`every` must be at least 1"),
        ({"every": 2.5}, TypeError, "`every` must be an integer"),
        ({"every": "epoch"}, ValueError, "a number of steps, or a time such as"),
        ({"on_error": "ignore"}, ValueError, "`on_error` must be one of 'warn', 'raise'"),
        ({"keep": 0}, ValueError, "`keep` must be at least 1"),
        ({"incremental": -1}, ValueError, "`incremental` must be True, False, or how many"),
    ):
        with pytest.raises(error, match=reason):
            sk.Checkpoint("anywhere", **arguments)


def test_models_without_tables_and_such_that_are_not_built_are_refused(keras, sk, tmp_path):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="which has none. Use BackupAndRestore"):
        model.fit(np.ones([2, 1]), np.ones(2), callbacks=[sk.Checkpoint(tmp_path)], verbose=0)

    def fit_unbuilt(epochs):
        model = keras.Sequential([sk.Embedding(sk.Table("rows", 2), "sum"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        x, y = np.arange(8).reshape(4, 2), np.ones([4, 1], np.float32)
        model.fit(x, y, epochs=epochs, callbacks=[sk.Checkpoint(tmp_path)], verbose=0)

    fit_unbuilt(1)
    with pytest.raises(ValueError, match="needs a model that is built"):
        fit_unbuilt(2)
