"""Makes the table of docs/optimizers.md: the optimizers of the frameworks, and the rules of rows.

Walks the optimizer classes of Keras 3, tf_keras, its legacy ones, tf.compat.v1.train and, where it
has any, sok_lite, makes each of them and asks what stands for it. A class that a newer framework
brings appears by itself.

Example:
  python -m tools.optimizer_table            prints it
  python -m tools.optimizer_table --write    puts it into the page
"""

import argparse
import importlib.util
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
import tf_keras

import sok_lite as sok
from sok_lite.bridge.optimizers.family import Settings
from sok_lite.bridge.optimizers.loss_scale import scales_loss
from sok_lite.bridge.optimizers.settings import family_of, settings_of
from sok_lite.bridge.optimizers.slots import own_names
from sok_lite.engine.optimizers import UpdateRule

PAGE = Path(__file__).resolve().parent.parent / "docs" / "optimizers.md"
BEGIN, END = "<!-- made by tools/optimizer_table.py -->", "<!-- to here -->"
_LINE = 120

# What a class asks for and has no default.
_ARGUMENTS: dict[str, Any] = {
    "learning_rate": lambda: 0.1,
    "momentum": lambda: 0.9,
    "global_step": lambda: tf.Variable(0, dtype=tf.int64, trainable=False),
    "inner_optimizer": lambda: keras.optimizers.SGD(),
    "optimizer_map": lambda: keras.optimizers.OptimizerMap(keras.optimizers.SGD()),
    "opt": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
    "replicas_to_aggregate": lambda: 1,
}
# Options that bring states, and a rule of its own to SGD.
_BRING_STATES: dict[str, Any] = {"momentum": 0.9, "amsgrad": True, "centered": True}
# Options that act on more than one row.
_BEYOND_ROWS: dict[str, Any] = {
    "clipnorm": 1.0,
    "clipvalue": 1.0,
    "global_clipnorm": 1.0,
    "use_ema": True,
    "gradient_accumulation_steps": 2,
    "loss_scale_factor": 2.0,
    "gradient_transformers": [lambda grads_and_vars: grads_and_vars],
}


# Rule, states of a row, and what is lazy, where a class alone does not say it.
FALLBACK_STEP = ("fallback step", "its own", "what its step does")
OF_ITS_INNER = ("that of the wrapped optimizer", "its", "its")


@dataclass
class Row:
    """What stands for an optimizer with its default arguments.

    Attributes:
      family: of the optimizer.
      name: of its class.
      option: the one that selects this rule, or "".
      rule: None: no rule stands for it.
      states: names of the states of a row, as the optimizer calls them.
      more_states: option -> names that it adds.
      has_inner: whether it wraps an optimizer, whose rule it has.
      refusal: what the error says, or "".
      refused_options: those of `_BEYOND_ROWS` that it has, and that are refused.
    """

    family: str
    name: str
    option: str = ""
    rule: type[UpdateRule] | None = None
    states: tuple[str, ...] = ()
    more_states: tuple[tuple[str, tuple[str, ...]], ...] = ()
    has_inner: bool = False
    refusal: str = ""
    refused_options: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, str, str]:
        """Rule, states of a row, and what is lazy."""
        if self.refusal:
            return "refused", "", ""
        if self.rule is None:
            return OF_ITS_INNER if self.has_inner else FALLBACK_STEP
        states = ", ".join(f"`{name}`" for name in self.states)
        for option, names in self.more_states:
            added = ", ".join(f"`{name}`" for name in names)
            states += f"{'; ' if states else ''}{option}: {added}"
        return self.rule.__name__, states or "none", self.rule.lazy


def optimizer_classes() -> Iterator[tuple[str, str, type]]:
    """Yields (family, name, class) of every optimizer class of the frameworks."""
    legacy, v1 = tf_keras.optimizers.legacy, tf.compat.v1.train
    walked: list[tuple[str, Any, type]] = [
        ("Keras 3", keras.optimizers, keras.optimizers.Optimizer),
        ("tf_keras", tf_keras.optimizers, tf_keras.optimizers.Optimizer),
        ("tf_keras.optimizers.legacy", legacy, legacy.Optimizer),
        ("tf.compat.v1.train", v1, v1.Optimizer),
    ]
    if importlib.util.find_spec("sok_lite.optimizers"):
        own = importlib.import_module("sok_lite.optimizers")
        walked.append(("Keras 3", own, keras.optimizers.Optimizer))
    if importlib.util.find_spec("sok_lite.kv_variable"):
        training = importlib.import_module("sok_lite.kv_variable.training")
        # Those that TensorFlow does not have under the same name.
        names = {name: getattr(training, name) for name in training.__all__ if name not in dir(v1)}
        walked.append(("tf.compat.v1.train", SimpleNamespace(**names), v1.Optimizer))
    for family, module, base in walked:
        for name in sorted(dir(module)):
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, base) and value is not base:
                yield family, name, value


def rows() -> Iterator[Row]:
    """Yields the rows of the table, those of one optimizer one after another."""
    for family, name, make in optimizer_classes():
        required, unknown = _required(make)
        if unknown:
            yield Row(family, name, refusal=f"not tried: it asks for {', '.join(unknown)}")
            continue
        row = _row(family, name, make(**required))
        row.refused_options = tuple(_refused_options(make))
        others = []
        for option, value in _BRING_STATES.items():
            optimizer = _made_with(make, option, value)
            if optimizer is None or row.rule is None:
                continue
            other = _row(family, name, optimizer)
            if other.rule is not row.rule:
                other.option, other.refused_options = option, row.refused_options
                others.append(other)
            elif added := tuple(state for state in other.states if state not in row.states):
                row.more_states += ((option, added),)
        yield row
        yield from others


def _required(make: type) -> tuple[dict[str, Any], list[str]]:
    """Returns the arguments that a class asks for, and those that we cannot give."""
    names = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    known = {name: _ARGUMENTS[name]() for name in names if name in _ARGUMENTS}
    return known, [name for name in names if name not in _ARGUMENTS]


def _made_with(make: type, option: str, value: Any) -> Any:
    """Returns an optimizer with an option, or None where its class has no such."""
    try:
        return make(**{**_required(make)[0], option: value})
    except (TypeError, ValueError):
        return None


def _row(family: str, name: str, optimizer: Any) -> Row:
    if scales_loss(optimizer):
        sok.OptimizerWrapper(optimizer)
        return Row(family, name, has_inner=True)
    try:
        known = family_of(optimizer)
        assert known.name == family, f"{name} is of {known.name}, not of {family}"
        settings = settings_of(optimizer, known)
        sok.OptimizerWrapper(optimizer)
    except NotImplementedError as error:
        return Row(family, name, refusal=str(error).split(". Use Adam")[0])
    if not isinstance(settings, Settings):
        return Row(family, name)
    return Row(family, name, rule=settings.rule, states=tuple(own_names(settings, known)))


def _refused_options(make: type) -> Iterator[str]:
    for option, value in _BEYOND_ROWS.items():
        optimizer = _made_with(make, option, value)
        if optimizer is not None:
            try:
                sok.OptimizerWrapper(optimizer)
            except NotImplementedError:
                yield option


def made_part() -> str:
    """Returns what stands in the page between BEGIN and END."""
    found = list(rows())
    return "\n\n".join([_versions(), _table(found), _refusals(found), _options(found)])


def _versions() -> str:
    return (
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, tf_keras {tf_keras.__version__}."
    )


def _table(found: list[Row]) -> str:
    """Returns the table; an optimizer that is the same in several families has one line."""
    families: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        name = f"{row.name} with {row.option}" if row.option else row.name
        families.setdefault((name, *row.cells), []).append(_short(row.family))
    lines = ["| optimizer | family | rule | states of a row | not done without a gradient |"]
    lines.append("|---|---|---|---|---|")
    for (name, *cells), of in sorted(families.items(), key=lambda item: item[0][0].lower()):
        lines.append("| " + " | ".join([name, ", ".join(of), *cells]).rstrip() + " |")
    own = ["your own, or a subclass that changes the step", "any", *FALLBACK_STEP]
    lines.append(f"| {' | '.join(own)} |")
    return "\n".join(lines)


def _refusals(found: list[Row]) -> str:
    """Returns what the errors say of the optimizers that are refused."""
    by_text: dict[str, list[str]] = {}
    for row in found:
        if row.refusal:
            text = row.refusal.replace(f"{row.name} of {row.family}", "it")
            by_text.setdefault(text, []).append(f"{row.name} ({_short(row.family)})")
    return "\n".join(
        _wrapped(f"* {', '.join(names)}: {text.rstrip('.')}.") for text, names in by_text.items()
    )


def _options(found: list[Row]) -> str:
    """Returns which options each family has and refuses."""
    by_options: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in found:
        if row.rule and not row.option:
            of_family = by_options.setdefault(row.refused_options, {})
            of_family.setdefault(row.family, []).append(row.name)
    lines = []
    for options, of_family in by_options.items():
        which = ", ".join(
            _short(family)
            if len(names) == _count(found, family)
            else f"{', '.join(names)} ({_short(family)})"
            for family, names in of_family.items()
        )
        text = ", ".join(f"`{option}`" for option in options) or "none"
        lines.append(_wrapped(f"* {which}: {text}."))
    return "Options that are refused:\n\n" + "\n".join(lines)


def _count(found: list[Row], family: str) -> int:
    return sum(row.family == family and row.rule is not None and not row.option for row in found)


def _short(family: str) -> str:
    return {"tf_keras.optimizers.legacy": "legacy", "tf.compat.v1.train": "TF1"}.get(family, family)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _LINE, subsequent_indent="  ", break_on_hyphens=False)


def page_with(page: str, part: str) -> str:
    """Returns the page with its made part replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/optimizers.md")
    args = parser.parse_args()
    part = made_part()
    if args.write:
        PAGE.write_text(page_with(PAGE.read_text(), part))
    else:
        print(part)


if __name__ == "__main__":
    main()
