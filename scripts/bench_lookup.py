"""Times lookups and training steps through TensorFlow: ours, a dense tf.Variable, and TFRA.

Every system runs in a process of its own and they are timed in turns, one call each, so that
whatever else the machine does meets all of them alike. Each case ends with one line
`RESULT {json}` that holds the median milliseconds of each system and ours against the others.

Cases: lookup of keys that are all present, a training step (lookup, gradient, Adam on the touched
rows), both eager and in a tf.function, with uniform and Zipf(1.05) keys; and the insertion of
1,000,000 new keys.

TFRA needs TensorFlow 2.16 and its own environment: scripts/bench_peers.sh makes it. Without it the
other two are timed.

Example:
  bash scripts/setup.sh && bash scripts/bench_peers.sh
  .venv/bin/python scripts/bench_lookup.py
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CASES = [
    f"{work}-{mode}-{keys}"
    for work in ("lookup", "train")
    for mode in ("eager", "function")
    for keys in ("uniform", "zipf")
] + ["insert"]
NUM_BATCHES = 8
LEARNING_RATE = 1e-3


# ----------------------------------------------------------------- the work


def make_keys(num_keys):
    """Distinct random keys of 62 bits, as hashed features are."""
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(0, 2**62, num_keys + num_keys // 100, dtype=np.int64))
    return rng.permutation(keys)[:num_keys]


def make_positions(args, distribution):
    """Positions of keys, (NUM_BATCHES, batch): with replacement, as a click log has them."""
    rng = np.random.default_rng(1)
    if distribution == "uniform":
        return rng.integers(0, args.keys, (NUM_BATCHES, args.batch))
    weights = 1.0 / np.arange(1, args.keys + 1) ** 1.05
    edges = np.cumsum(weights / weights.sum())
    return np.searchsorted(edges, rng.random((NUM_BATCHES, args.batch))).clip(0, args.keys - 1)


class Ours:
    """sok_lite.DynamicVariable and sok_lite.OptimizerWrapper(Keras 3 Adam)."""

    name = "sok_lite"

    def __init__(self, args):
        import tensorflow as tf

        import sok_lite as sok

        self.tf, self.sok, self.args = tf, sok, args
        self.count = 0

    def new_variable(self):
        self.count += 1
        return self.sok.DynamicVariable(
            dimension=self.args.dim, initializer="random", name=f"bench_{self.count}"
        )

    def insert(self, variable, ids):
        self.sok.assign(variable, ids, self.tf.zeros([ids.shape[0], self.args.dim]))

    def prepare(self, keys):
        variable = self.new_variable()
        for part in np.array_split(keys, 20):
            self.insert(variable, self.tf.constant(part))
        self.optimizer = self.sok.OptimizerWrapper(self.tf.keras.optimizers.Adam(LEARNING_RATE))
        return variable

    def ids(self, keys, positions):
        return keys[positions]

    def lookup(self, variable, ids):
        return self.tf.nn.embedding_lookup(variable, ids)

    def train(self, variable, ids, weights):
        with self.tf.GradientTape() as tape:
            loss = self.tf.reduce_sum(self.lookup(variable, ids) * weights)
        grads = tape.gradient(loss, [variable])
        self.optimizer.apply_gradients(zip(grads, [variable], strict=True))
        return loss


class Dense(Ours):
    """A dense tf.Variable that already has every row: no keys, so no hash table to pay for."""

    name = "dense"

    def __init__(self, args):
        import tensorflow as tf

        self.tf, self.args = tf, args

    def prepare(self, keys):
        rows = np.random.default_rng(2).random((len(keys), self.args.dim), np.float32)
        variable = self.tf.Variable(rows)
        # Keras 3 updates every row of a dense variable; TF 1's Adam has the sparse kernel.
        self.optimizer = self.tf.compat.v1.train.AdamOptimizer(LEARNING_RATE)
        return variable

    def ids(self, keys, positions):
        return positions

    def lookup(self, variable, ids):
        return self.tf.gather(variable, ids)


class Tfra(Ours):
    """TFRA's Variable, shadow lookup with unique, DynamicEmbeddingOptimizer(tf_keras Adam)."""

    name = "tfra"

    def __init__(self, args):
        import tensorflow as tf
        import tensorflow_recommenders_addons.dynamic_embedding as de

        self.tf, self.de, self.args = tf, de, args
        self.count = 0

    def new_variable(self):
        self.count += 1
        return self.de.get_variable(
            f"bench_{self.count}", dim=self.args.dim, initializer=0.0, init_size=0
        )

    def insert(self, variable, ids):
        variable.upsert(ids, self.tf.zeros([ids.shape[0], self.args.dim]))

    def prepare(self, keys):
        variable = self.new_variable()
        for part in np.array_split(keys, 20):
            self.insert(variable, self.tf.constant(part))
        self.shadow = self.de.shadow_ops.ShadowVariable(variable, name=f"shadow_{self.count}")
        self.optimizer = self.de.DynamicEmbeddingOptimizer(
            self.tf.keras.optimizers.Adam(LEARNING_RATE)
        )
        return variable

    def lookup(self, variable, ids):
        return variable.lookup(ids)

    def train(self, variable, ids, weights):
        with self.tf.GradientTape() as tape:
            rows = self.de.shadow_ops.embedding_lookup_unique(
                self.shadow, ids, self.args.dim, with_unique=True
            )
            loss = self.tf.reduce_sum(rows * weights)
        grads = tape.gradient(loss, [self.shadow])
        self.optimizer.apply_gradients(zip(grads, [self.shadow]))  # noqa: B905 (its Python)
        return loss


SYSTEMS = {system.name: system for system in (Ours, Dense, Tfra)}


# ----------------------------------------------------------------- the process of one system


def timed_calls(system, args, case):
    """Returns a function of the step number that does one call and returns its seconds."""
    tf = system.tf
    keys = make_keys(args.keys)
    if case == "insert":
        parts = [tf.constant(part) for part in np.array_split(keys, 16)]

        def insert(step):
            variable = system.new_variable()
            start = time.perf_counter()
            for part in parts:
                system.insert(variable, part)
            return time.perf_counter() - start

        return insert

    work, mode, distribution = case.split("-")
    variable = system.prepare(keys)
    batches = [
        tf.constant(system.ids(keys, positions)) for positions in make_positions(args, distribution)
    ]
    weights = tf.random.stateless_uniform([args.batch, args.dim], seed=[1, 2])

    def step(ids):
        if work == "lookup":
            return system.lookup(variable, ids)
        return system.train(variable, ids, weights)

    run = tf.function(step) if mode == "function" else step

    def call(number):
        ids = batches[number % NUM_BATCHES]
        start = time.perf_counter()
        result = run(ids)
        # Reads one element, so that whatever was only enqueued is done.
        float(tf.reshape(result, [-1])[0])
        return time.perf_counter() - start

    return call


def work_loop(args):
    """Reads a case; answers `ready`, then milliseconds for every further line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    system = SYSTEMS[args.worker](args)
    case = sys.stdin.readline().strip()
    call = timed_calls(system, args, case)
    answers.write("ready\n")
    answers.flush()
    for number, _ in enumerate(sys.stdin):
        answers.write(f"{1000 * call(number)}\n")
        answers.flush()


# ----------------------------------------------------------------- the process in front


class Worker:
    """A system in its own process."""

    def __init__(self, name, python, args):
        self.name = name
        command = [python, __file__, "--worker", name]
        for option in ("keys", "batch", "dim"):
            command += [f"--{option}", str(getattr(args, option))]
        root = Path(__file__).resolve().parent.parent
        env = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "-1"),
        }
        if name == "tfra":
            env["TF_USE_LEGACY_KERAS"] = "1"
        else:
            env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, word: str) -> str:
        """Sends a line and returns the answer; ends this program if the process has died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words are told below
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"The process of {self.name} died in {word!r}; its words are above.")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


def measure(args, case, workers):
    """Times one case in turns and returns its RESULT as a dict."""
    for worker in workers:
        worker.ask(case)
    times: dict[str, list[float]] = {worker.name: [] for worker in workers}
    rounds = 3 if case == "insert" else args.rounds
    warm = 1 if case == "insert" else 3
    for number in range(warm + rounds):
        for worker in workers:
            took = float(worker.ask("go"))
            if number >= warm:
                times[worker.name].append(took)
    medians = {name: statistics.median(each) for name, each in times.items()}
    result = {
        "case": case,
        "keys": args.keys,
        "batch": args.keys if case == "insert" else args.batch,
        "dim": args.dim,
        "rounds": rounds,
        "median_ms": {name: round(took, 3) for name, took in medians.items()},
    }
    ours = medians["sok_lite"]
    for name, took in medians.items():
        if name != "sok_lite":
            # Above 1: ours is so many times faster.
            result[f"{name}_over_sok_lite"] = round(took / ours, 2)
    return result


def find_peer(args):
    """Returns the Python of TFRA's environment, or None where it has not been made."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(args.peers or os.environ.get("SOK_LITE_PEERS") or root / ".venv-peers")
    python = folder / "bin" / "python"
    if args.peers and not python.exists():
        raise SystemExit(f"No Python at {python}. Make it: bash scripts/bench_peers.sh {folder}")
    return str(python) if python.exists() else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys in the table")
    parser.add_argument("--batch", type=int, default=65_536, help="ids of one call")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21, help="timed calls of each system")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--peers", help="folder of TFRA's environment (default: .venv-peers)")
    parser.add_argument("--worker", choices=sorted(SYSTEMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work_loop(args)

    pythons = {"sok_lite": sys.executable, "dense": sys.executable}
    peer = find_peer(args)
    if peer:
        pythons["tfra"] = peer
    else:
        print("TFRA is not measured: make its environment with scripts/bench_peers.sh.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{platform.processor() or platform.machine()}, {cores} cores, {platform.platform()}")
    for case in args.cases:
        names = [name for name in pythons if not (case == "insert" and name == "dense")]
        workers = [Worker(name, pythons[name], args) for name in names]
        try:
            print("RESULT " + json.dumps(measure(args, case, workers)), flush=True)
        finally:
            for worker in workers:
                worker.close()


if __name__ == "__main__":
    main()
