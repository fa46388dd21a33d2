"""Records what TFRA answers to the scenarios of tests/dynamic_embedding/scenarios.py.

The answers go to tests/dynamic_embedding/recorded_by_tfra.json, with which the tests compare those
of sok_lite.dynamic_embedding. Runs in TFRA's own environment, which scripts/bench/peers.sh makes:

  bash scripts/bench/peers.sh
  .venv-peers/bin/python -m tools.record_tfra
"""

import argparse
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

RECORDED = ROOT / "tests" / "dynamic_embedding" / "recorded_by_tfra.json"


def versions() -> dict[str, str]:
    """Returns the versions of what answers, and the date."""
    import tensorflow as tf
    import tensorflow_recommenders_addons as tfra
    import tf_keras

    return {
        "date": datetime.date.today().isoformat(),
        "python": sys.version.split()[0],
        "tensorflow": tf.__version__,
        "tf_keras": tf_keras.__version__,
        "tensorflow_recommenders_addons": tfra.__version__,
    }


def answers_of(names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Runs scenarios with TFRA; returns their answers by name, and the names of those that failed.

    A failure is printed and does not end the others.
    """
    import tensorflow as tf  # before TFRA, whose libraries need it loaded
    from tensorflow_recommenders_addons import dynamic_embedding as de

    from tests.dynamic_embedding.scenarios import SCENARIOS

    answers, failed = {}, []
    for name in names or SCENARIOS:
        try:
            answers[name] = SCENARIOS[name](de, tf)
        except Exception:
            failed.append(name)
            print(f"--- {name}\n{traceback.format_exc()}", file=sys.stderr)
    return answers, failed


def as_text(recorded: dict[str, Any]) -> str:
    """Returns JSON with sorted keys, in which each answer of a scenario has a line of its own.

    Numbers keep 8 digits, which tell any two of float32 apart.
    """

    def lines(fields: dict[str, Any], value_of: Callable[[Any], str], indent: str) -> str:
        each = (
            f"{indent}  {json.dumps(name)}: {value_of(fields[name])}" for name in sorted(fields)
        )
        return "{\n" + ",\n".join(each) + f"\n{indent}}}"

    def dumped(value: Any) -> str:
        return json.dumps(shortened(value), sort_keys=True, allow_nan=False)

    def scenario(fields: dict[str, Any]) -> str:
        return lines(fields, dumped, "    ")

    parts = {
        "answers": lines(recorded["answers"], scenario, "  "),
        "versions": lines(recorded["versions"], dumped, "  "),
    }
    return lines(parts, str, "") + "\n"


def shortened(value: Any) -> Any:
    """Returns a scenario's answer with 8 digits of every float."""
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", help="scenarios to run and print; else all are run and written")
    args = parser.parse_args()
    # TFRA knows the optimizers of tf_keras only, and the answers are to be those of a CPU.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    answers, failed = answers_of(args.names)
    text = as_text({"answers": answers, "versions": versions()})
    if args.names:
        print(text, end="")
    elif not failed:
        RECORDED.write_text(text)
        print(f"{len(answers)} scenarios are recorded in {RECORDED.relative_to(ROOT)}")
    if failed:
        raise SystemExit(f"These failed, so nothing is written: {', '.join(failed)}")


if __name__ == "__main__":
    main()
