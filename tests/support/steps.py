"""Steps of the engine in one call, as tests take them."""

from sok_lite.engine.gathered_update import GatheredStep
from sok_lite.engine.update import StepOptions, UpdateStep, make_step


def apply_updates(updates, learning_rate, number, *args, **options):
    """Takes a step by update rules of tables of this process; see StepOptions."""
    UpdateStep(updates, StepOptions(learning_rate, number, *args, **options)).commit()


def apply_all_updates(updates, learning_rate, number, note=None, **options):
    """Takes a step by update rules, wherever rows are."""
    options = StepOptions(learning_rate, number, **options)
    make_step(updates, options).commit(note)


def apply_gathered(updates, kinds, function, **options):
    """Takes a step by a function of rows."""
    GatheredStep(updates, kinds, function, StepOptions(0.0, 1, **options)).commit()


def prepared_updates(updates, learning_rate, number, *args, **options):
    """Returns such a step as `apply_updates` takes, prepared."""
    step = UpdateStep(updates, StepOptions(learning_rate, number, *args, **options))
    step.prepare()
    return step
