"""Trains a click model on dynamic embeddings, over as many ranks as were launched.

    python examples/train_ctr.py                          one rank
    horovodrun -np 2 python examples/train_ctr.py         two ranks
    ... --data day_0.tsv --epochs 1 --batch 8192          Criteo's own data

Without --data it writes its own click data in Criteo's format, whose best possible AUC is known. It
trains, evaluates on held-out rows, has every rank export its part of the tables, and lets one new
process put the parts together and evaluate again. It prints what came out in a sentence, and the
same for programs as the last line, `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# before TensorFlow and Keras are imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from ctr import planted
from ctr.criteo import NUM_CATEGORIES, Rows, read
from ctr.metrics import ProgressBar, auc
from ctr.model import ClickModel
from ctr.ranks import Ranks

import sok_lite as sok

EVALUATION_ROWS = 8192  # per rank and step
# name: (Keras class, its options, a learning rate that suits the default run)
OPTIMIZERS: dict[str, tuple[Any, dict[str, float], float]] = {
    "adam": (keras.optimizers.Adam, {}, 0.01),
    "adagrad": (keras.optimizers.Adagrad, {"initial_accumulator_value": 1e-6}, 0.05),
    "rmsprop": (keras.optimizers.RMSprop, {}, 0.005),
    "sgd": (keras.optimizers.SGD, {}, 1.0),
}


def train(model: ClickModel, rows: Rows, args: argparse.Namespace) -> dict[str, float]:
    """Trains on rows, reshuffled in every epoch. Every rank must call it.

    Returns:
      steps, the mean loss of the last epoch, and samples_per_second after the first step.
    """
    num_rows = len(rows.labels)
    steps_per_epoch = -(-num_rows // args.batch)
    optimizer, options, learning_rate = OPTIMIZERS[args.optimizer]
    schedule = keras.optimizers.schedules.CosineDecay(
        args.learning_rate or learning_rate, args.epochs * steps_per_epoch
    )
    model.optimizer = sok.OptimizerWrapper(optimizer(schedule, **options))
    progress = ProgressBar(args.epochs * num_rows, is_shown=model.ranks.rank == 0)
    for epoch in range(args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(num_rows)
        loss_sum = 0.0
        for first in range(0, num_rows, args.batch):
            batch = order[first : first + args.batch]
            mine = rows.take(batch[model.ranks.share(len(batch), args.batch)])
            loss = float(model.train_step(*mine, np.float32(len(batch))))
            loss_sum += loss * len(batch)
            progress.update(len(batch), loss)
    return {
        "steps": args.epochs * steps_per_epoch,
        "loss": loss_sum / num_rows,
        "samples_per_second": round(progress.samples_per_second, 1),
    }


def evaluate(model: ClickModel, rows: Rows) -> float:
    """Returns the AUC on rows; every rank computes a part of the scores and must call it."""
    labels, scores = [], []
    # a rank gets whole blocks of rows, the same ones for any number of ranks: then the scores are
    # the same to the last bit
    batch = EVALUATION_ROWS * model.ranks.size
    for first in range(0, len(rows.labels), batch):
        part = rows.take(slice(first, first + batch))
        mine = part.take(model.ranks.share(len(part.labels), batch))
        labels.append(mine.labels)
        scores.append(model.predict(mine.numbers, mine.keys).numpy())
    return auc(*(model.ranks.gather(np.concatenate(arrays)) for arrays in (labels, scores)))


def prepare(args: argparse.Namespace, workdir: Path) -> float | None:
    """Writes data of our own unless a file is given, and parses it for all ranks. For rank 0.

    Returns:
      The AUC of the true probabilities on the held-out rows, where they are known.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = args.data
    if path is None:
        path = workdir / "planted.tsv"
        probabilities = planted.write(path, args.rows or 500_000, args.seed)
    rows = read(path, args.rows)
    num_training = split(len(rows.labels), args.held_out)
    rows.save(workdir)
    if args.data is not None:
        return None
    return auc(rows.labels[num_training:], probabilities[num_training:])


def split(num_rows: int, held_out: float) -> int:
    """Returns how many rows, from the first, are for training; the others are held out."""
    num_training = num_rows - round(num_rows * held_out)
    if not 0 < num_training < num_rows:
        raise ValueError(
            f"Expected enough rows for training and for evaluation. Received: {num_rows} rows, of "
            f"which --held-out {held_out} leaves {num_training} for training."
        )
    return num_training


def evaluate_saved(workdir: Path) -> float:
    """Builds the model of a working directory from all its parts, in this one process."""
    settings = json.loads((workdir / "settings.json").read_text())
    model = ClickModel(settings["dim"], settings["seed"], Ranks())
    model.load(workdir, settings["ranks"])
    rows = Rows.open(workdir)
    return evaluate(model, rows.take(slice(settings["num_training"], None)))


def evaluate_in_new_process(workdir: Path) -> float:
    """Runs `evaluate_saved` in a process that knows nothing of this job and its launcher."""
    launcher = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MV2_", "SLURM_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    command = [sys.executable, __file__, "--evaluate", str(workdir)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))["auc"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; argparse ends the program where it is wrong."""
    description, _, epilog = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="a file in Criteo's format: its own TSV, or a CSV with a header")
    add("--rows", type=_positive, help="how many to write (500,000), or to read of --data (all)")
    add(
        "--held-out", type=float, default=0.2, help="share of the rows, the last ones (%(default)s)"
    )
    add("--epochs", type=_positive, default=1, help="(%(default)s)")
    add("--batch", type=_positive, default=1024, help="of all ranks together (%(default)s)")
    add("--dim", type=_positive, default=16, help="length of an embedding (%(default)s)")
    add("--optimizer", choices=sorted(OPTIMIZERS), default="adam", help="(%(default)s)")
    add("--learning-rate", type=float, help="at the start; it falls to 0 (the optimizer's own)")
    add("--seed", type=int, default=0, help="of data, initial values and order (%(default)s)")
    add("--ranks", type=_positive, help="stop unless the launcher started this many")
    add("--workdir", type=Path, help="where files go; all ranks must see it (a temporary one)")
    add("--evaluate", type=Path, metavar="WORKDIR", help="only evaluate what a run has saved there")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, received {text!r}")
    return value


def run(args: argparse.Namespace, ranks: Ranks, workdir: Path) -> dict[str, Any] | None:
    """Trains, evaluates, saves and evaluates again. Every rank must call it.

    Returns:
      What the RESULT line says, on rank 0; None elsewhere.
    """
    rows = Rows.open(workdir)
    num_training = split(len(rows.labels), args.held_out)
    model = ClickModel(args.dim, args.seed, ranks)
    training = train(model, rows.take(slice(num_training)), args)
    held_out_auc = evaluate(model, rows.take(slice(num_training, None)))
    num_keys = model.save(workdir)
    if ranks.rank != 0:
        return None
    settings = {"dim": args.dim, "seed": args.seed, "ranks": ranks.size}
    (workdir / "settings.json").write_text(json.dumps(settings | {"num_training": num_training}))
    return {
        "auc": held_out_auc,
        "reloaded_auc": evaluate_in_new_process(workdir),
        **training,
        "keys": num_keys,
        **settings,
        "rows": len(rows.labels),
        "batch": args.batch,
        "epochs": args.epochs,
        "optimizer": args.optimizer,
    }


def summary(result: dict[str, Any], num_training: int) -> str:
    """Returns what a run has done, and what came out, in a sentence."""
    best = "" if result["best_auc"] is None else f"; the best possible is {result['best_auc']:.4f}"
    return (
        f"Trained {NUM_CATEGORIES} tables of {result['keys']:,} keys on {num_training:,} rows in "
        f"{result['seconds']:.1f} s: AUC {result['auc']:.4f} on "
        f"{result['rows'] - num_training:,} held-out rows, and {result['reloaded_auc']:.4f} after "
        f"the ranks exported their tables and a new process loaded them{best}."
    )


def print_result(result: dict[str, Any]) -> None:
    """Prints the last line; what is not a number, such as the AUC of equal labels, is null."""
    print("RESULT " + json.dumps({k: None if v != v else v for k, v in result.items()}), flush=True)


def main() -> None:
    """Runs the job; see the top of this file."""
    args = parse_args()
    start_s = time.perf_counter()
    sok.init(comm_tool="horovod")
    if args.evaluate is not None:
        print_result({"auc": evaluate_saved(args.evaluate)})
        return
    ranks = Ranks()
    if args.ranks not in (None, ranks.size):
        sys.exit(
            f"--ranks {args.ranks}, but {ranks.size} were launched. Launch them with "
            f"`horovodrun -np {args.ranks} python {' '.join(sys.argv)}`."
        )
    with contextlib.ExitStack() as on_exit:
        temporary = tempfile.TemporaryDirectory  # made and removed by rank 0
        workdir = ranks.from_first(
            lambda: args.workdir or Path(on_exit.enter_context(temporary(prefix="train_ctr_")))
        )
        try:
            best_auc = ranks.from_first(lambda: prepare(args, workdir))
        except (ValueError, OSError) as error:
            sys.exit(f"No data to train on. {error}")
        result = run(args, ranks, workdir)
    if result is not None:
        seconds = round(time.perf_counter() - start_s, 1)
        result = {"auc": None, "best_auc": best_auc, **result, "seconds": seconds}
        print(summary(result, split(result["rows"], args.held_out)))
        print_result(result)


if __name__ == "__main__":
    main()
