"""The numbers of a step as kernels/update/scalars.h has them, against Python's floats."""

import ctypes
import dataclasses
import math
import pickle
import re
import struct
import threading

import numpy as np
import pytest

from sok_lite.backend.sources import kernel_folder
from sok_lite.engine import optimizers
from sok_lite.engine.optimizers import Adam, Nadam, UpdateRule, rule
from tests.engine.optimizers.helpers import VARIANTS
from tests.support import rule_formulas

RULES = [getattr(optimizers, name) for name in optimizers.__all__ if name != "UpdateRule"]

# Of settings and learning rates: what is usual, and the ends of what may be.
SETTINGS = [0.0, 5e-324, 1e-38, 1e-8, 1e-7, 0.004, 0.1, 0.5, 0.61, 0.9, 0.99, 0.999, 0.9999]
SETTINGS += [1 - 1e-7, 1 - 1e-9, 1 - 2**-53, 1.0, 3.0, 5.0, 1000.0, 1e9, 1e30, -0.5, -0.7]
RATES = [0.1, 0.001, 1.0, 0.3333, 0.0, -0.1, 5e-324, 1e-45, 1e-30, 1e30, 1e38, 1e39, -1e39, 1e300]
STEPS = [1, 2, 3, 5, 6, 7, 10, 100, 999, 12345, 2**24 + 1, 2**31 - 1, 2**31]
# Products take as many turns as they take to vanish.
SLOW = {"beta_1": 0.99}
BOTH_SLOW = {"beta_1": 0.99, "beta_2": 0.99}


def bits(numbers):
    """Numbers by their types and bits; a NaN may have any."""
    return [(type(x), "nan" if math.isnan(x) else struct.pack("d", x)) for x in numbers]


def draw(kind, rng):
    """A rule with settings of which some are drawn."""
    while True:
        settings = {}
        for field in dataclasses.fields(kind):
            if field.type is bool:
                settings[field.name] = bool(rng.integers(2))
            elif rng.random() < 0.5:
                drawn = rng.choice(SETTINGS) if rng.random() < 0.7 else rng.random()
                settings[field.name] = float(drawn)
        if kind is Nadam or settings.get("has_products"):
            slow = SLOW if kind is Nadam else BOTH_SLOW
            settings = {name: min(x, slow.get(name, x)) for name, x in settings.items()}
        try:
            return kind(**settings)
        except ValueError:
            continue


def expected(rule, rate, step):
    """The numbers of the oracle; None: there are none."""
    with np.errstate(all="ignore"):
        try:
            return bits(rule_formulas.scalars(rule, rate, step))
        except ValueError:
            return None


def found(rule, rate, step):
    try:
        return bits(rule.scalars(rate, step))
    except ValueError:
        return None


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_the_numbers_of_a_step_are_those_of_the_formulas_bit_for_bit(kind):
    rng = np.random.default_rng(7)
    rules = [each for each in VARIANTS if type(each) is kind]
    rules += [draw(kind, rng) for _ in range(40)]
    for each in rules:
        for _ in range(12):
            rate = float(rng.choice(RATES)) if rng.random() < 0.5 else float(rng.random())
            step = int(rng.choice(STEPS)) if rng.random() < 0.7 else int(rng.integers(1, 2**31))
            assert found(each, rate, step) == expected(each, rate, step), (each, rate, step)


def test_the_products_of_momenta_are_right_in_any_order_of_steps_and_settings():
    rng = np.random.default_rng(8)
    # More than are known of a thread at a time; 0 and -0.0 are the same setting.
    rules = [Nadam(beta_1=beta, schedule_decay=0.004) for beta in np.linspace(0.1, 0.99, 11)]
    rules += [Nadam(), Nadam(schedule_decay=0.0), Nadam(schedule_decay=-0.0), Nadam(beta_1=0.0)]

    def compare(order):
        for number, step in order:
            each = rules[number]
            assert found(each, 0.1, step) == expected(each, 0.1, step), (each, step)

    compare([(number, step) for step in (1, 2, 3, 50, 49, 1) for number in range(len(rules))])
    compare([(0, step) for step in range(1, 100)])
    order = [(int(rng.integers(len(rules))), int(rng.integers(1, 300))) for _ in range(300)]
    compare(order)
    wrong = []

    def run():
        try:
            compare(order)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------- both languages


def test_both_languages_have_room_for_the_numbers_of_every_rule():
    text = (kernel_folder() / "update" / "scalars.h").read_text()
    (most,) = re.findall(r"kMostScalars = (\d+);", text)
    assert ctypes.sizeof(rule._ScalarsOut) == 8 * int(most)
    assert max(len(each.scalars(0.1, 1)) for each in VARIANTS) == int(most)


# ---------------------------------------------------------------- in Python


def test_a_rule_that_native_code_does_not_have_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(UpdateRule):
        kernel = "update_own"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Longer(Adam):
        more: float = 0.0

    with pytest.raises(NotImplementedError, match="Received: kernel='update_own'"):
        Own().scalars(0.1, 1)
    with pytest.raises(NotImplementedError, match="Longer must .*scalars.h, 8. Received: 9"):
        Longer().scalars(0.1, 1)


def test_a_rule_that_has_taken_steps_is_as_before():
    before = Adam(beta_1=0.5)
    before.scalars(0.1, 1)
    assert before == Adam(beta_1=0.5) and repr(before) == repr(Adam(beta_1=0.5))
    again = pickle.loads(pickle.dumps(before))
    assert again == before and again.scalars(0.1, 2) == before.scalars(0.1, 2)
    other = dataclasses.replace(before, beta_1=0.9)
    assert other.scalars(0.1, 1) == Adam().scalars(0.1, 1)
