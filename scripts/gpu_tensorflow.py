"""The stages of `bash scripts/gpu_check.sh tensorflow FOLDER`: tables on a GPU, through TensorFlow.

  python -m scripts.gpu_tensorflow STAGE FOLDER

  unpack   the pieces of tools/slim_tensorflow.py, into FOLDER/unpacked; what is there stays
  device   TensorFlow sees the GPU and computes on it; what `sok-lite doctor` says
  stream   an operation's stream: its context, and whether work on it is in order with TensorFlow's
  step     one training step on the GPU and one on the CPU: rows, states and outputs, bit by bit
  steps    200 of them, new ids in each
  times    lookups and steps of three sizes

Each is a process of its own: one that hangs or crashes costs no other. Each prints lines `RESULT
{json}` and exits with 1 where something is not as it should be. With SOK_LITE_BACKEND=cpu all runs
without a GPU, at small sizes, as far as that goes.
"""

import argparse
import ctypes
import gc
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.common.measuring import result
from sok_lite.backend import default_backend, get_backend
from sok_lite.native.gpu import WAYS

LIST = "pieces.json"
# Tables, ids of each, dimension, keys in each: as the engine's in scripts/gpu_check.sh.
CASES = ((26, 8192, 16, 1_000_000), (26, 65_536, 128, 1_000_000), (10, 104_857, 128, 1_677_721))
SMALL_CASES = ((26, 64, 16, 2000), (26, 128, 128, 2000), (10, 256, 128, 3000))
# Of a training whose tables are compared.
BATCH, FIRST_KEYS, NEW_KEYS = 512, 1000, 100


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages: dict[str, Callable[[Path], None]] = {
        "unpack": unpack,
        "device": lambda _: device(),
        "stream": lambda _: stream(),
        "step": lambda _: compare(1),
        "steps": lambda _: compare(200),
        "times": lambda _: times(),
    }
    parser.add_argument("stage", choices=[*stages, "train"])
    parser.add_argument("folder", type=Path, help="of the pieces")
    parser.add_argument("--steps", type=int, help="of a training for `step` or `steps`")
    args = parser.parse_args()
    if args.stage == "train":
        np.savez(args.folder, **train(args.steps))
    else:
        stages[args.stage](args.folder)


# ----------------------------------------------------------------- the pieces


def unpack(folder: Path) -> None:
    """Unpacks the pieces in a folder, unless that is done.

    Raises:
      SystemExit: they are for another Python; one is missing, or is not what was made.
    """
    listed = json.loads((folder / LIST).read_text())
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if listed["python"] != here:
        sys.exit(f"error: the pieces in {folder} are for {listed['python']}, this is {here}.")
    target, start, is_new = folder / "unpacked", time.perf_counter(), False
    if not (target / LIST).is_file() or json.loads((target / LIST).read_text()) != listed:
        is_new = True
        shutil.rmtree(target, ignore_errors=True)
        read_pieces(folder, listed["pieces"], target)
        shutil.copy(folder / LIST, target / LIST)
    facts = {name: of for name, of in listed.items() if name != "pieces"}
    result(case="unpack", new=is_new, seconds=time.perf_counter() - start, **facts)


def read_pieces(folder: Path, pieces: dict[str, str], target: Path) -> None:
    """Unpacks the pieces of an archive, which `write_pieces` of tools/slim_tensorflow.py made.

    Args:
      pieces: their names, in order, with their checksums (SHA-256).
    """
    missing = [name for name in pieces if not (folder / name).is_file()]
    if missing:
        sys.exit(f"error: {folder} lacks {', '.join(missing)}. Bring all pieces of one run.")
    for name, expected in pieces.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            sys.exit(f"error: {folder / name} is not what {LIST} lists. Bring it again.")
    with tempfile.TemporaryFile(dir=folder) as file:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for part in pool.map(
                lambda name: lzma.decompress((folder / name).read_bytes()), pieces
            ):
                file.write(part)
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(target, filter="data")


# ----------------------------------------------------------------- the device


def device() -> None:
    """Says what TensorFlow sees, and has it compute there."""
    import tensorflow as tf

    start = time.perf_counter()
    gpus = tf.config.list_physical_devices("GPU")
    wanted = default_backend() == "cuda"
    if wanted and not gpus:
        sys.exit("error: TensorFlow sees no GPU; above it says which library it does not open.")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    with tf.device("GPU:0" if gpus else "CPU:0"):
        numbers = tf.range(1 << 20, dtype=tf.float32)
        halves = numbers * 0.5
        is_right = bool(np.array_equal(halves, np.arange(1 << 20, dtype=np.float32) / 2))
    command = [sys.executable, "-m", "sok_lite", "doctor"]
    doctor = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    result(
        case="device",
        tensorflow=tf.__version__,
        built_with=dict(tf.sysconfig.get_build_info()),
        gpus=[tf.config.experimental.get_device_details(gpu) for gpu in gpus],
        computed_on=halves.device,
        right=is_right,
        seconds=time.perf_counter() - start,
        doctor=doctor,
        # By which of the three ways launches are in order with TensorFlow's work.
        stream_choice=[line for line in doctor if "GPU launches" in line],
    )
    if not is_right or (wanted and "GPU:0" not in halves.device):
        sys.exit("error: TensorFlow did not compute on the GPU, or wrongly.")


# ----------------------------------------------------------------- the stream

# It is slow, so that whoever does not wait for it reads what was there before.
_SLOW_COPY = r"""
extern "C" __global__ void slow_copy(const float* from, float* to, long long n, long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) to[i] = from[i];
}
"""


def stream() -> None:
    """Asks an operation for its stream, and launches there without a wait.

    TensorFlow writes what the kernel reads, and reads what it writes: both are right only if the
    stream is TensorFlow's own.
    """
    import tensorflow as tf

    from sok_lite.native.stream import compile_stream_of, load_stream_of

    start = time.perf_counter()
    path, stream_of = compile_stream_of(), load_stream_of()
    facts: dict[str, Any] = {"library": path.name, "compile_seconds": time.perf_counter() - start}
    backend = get_backend()
    is_on_gpu, size, rounds = backend.name == "cuda", 1 << 22, 20
    found: set[int | None] = set()
    kernel = backend.xp.RawKernel(_SLOW_COPY, "slow_copy") if is_on_gpu else None

    def run(frame: Any, context: int) -> None:
        (given,) = frame.inputs(backend)
        copy = frame.output(0, given.shape, tf.float32.as_datatype_enum, backend)
        found.add(stream_of(context))
        if kernel is None:
            copy[...] = given
            return
        with backend.xp.cuda.ExternalStream(stream_of(context)):
            kernel((64,), (256,), (given, copy, np.int64(given.size), np.int64(20_000_000)))

    num_wrong = 0
    with tf.device("GPU:0" if is_on_gpu else "CPU:0"):
        for number in range(rounds):
            values = tf.fill([size], float(number))
            for _ in range(20):  # work that goes on when the operation is called
                values = values + 1.0
            copy = _operation(run, values)
            num_wrong += int(tf.reduce_sum(tf.cast(copy != number + 20.0, tf.int64)))
    facts |= {"streams": sorted(str(each) for each in found), "wrong": num_wrong}
    if is_on_gpu:
        facts["in_primary_context"] = all(_is_in_primary_context(each) for each in found)
    result(case="stream", rounds=rounds, **facts)
    expected = {None} if not is_on_gpu else found - {None, 0}
    if num_wrong or found != expected or len(found) != 1 or not facts.get("in_primary_context", 1):
        sys.exit("error: this is not TensorFlow's stream, or not one that tables can use.")


def _operation(run: Callable[[Any, int], None], values: Any) -> Any:
    """Runs an operation of ours, which calls `run` with its frame and TensorFlow's context."""
    import tensorflow as tf

    from sok_lite.native.callbacks import Call, operations

    context_of = operations().library.sok_ops_context
    context_of.restype = ctypes.c_void_p

    def called(frame: Any) -> None:
        run(frame, context_of(ctypes.c_void_p(frame.address)))

    call = Call(called, False)
    handle = tf.Variable(tf.zeros([0, 2])).handle  # it stands for a table's
    given = {"inputs": [values], "numbers": [], "Tout": [tf.float32], "J": 0, "Tkeys": [tf.int64]}
    given |= {"dims": [2], "handles_of": [1], "trainable": [True], "names": []}
    (made,) = operations().module.sok_lookup(handles=[handle], call=call.number, **given).outputs
    return made


def _is_in_primary_context(of: int | None) -> bool:
    """Returns whether a stream is in the context that CuPy and TensorFlow share."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, primary, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    for code in (
        driver.cuStreamGetCtx(ctypes.c_void_p(of), ctypes.byref(context)),
        driver.cuDeviceGet(ctypes.byref(handle), 0),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), handle),
    ):
        if code:
            raise RuntimeError(f"CUDA's driver says {code} about a stream.")
    driver.cuDevicePrimaryCtxRelease_v2(handle)
    return context.value is not None and context.value == primary.value


# ----------------------------------------------------------------- the same bits


def compare(steps: int) -> None:
    """Trains on the CPU and on this backend, there in each of the ways in which launches are in
    order with TensorFlow's work, each in a process of its own, and compares."""
    backend = default_backend()
    ways = WAYS if backend == "cuda" else WAYS[-1:]
    # One seed: in all a key has its row in the same place.
    trainings = [{"SOK_LITE_BACKEND": "cpu", "CUDA_VISIBLE_DEVICES": ""}]
    trainings += [{"SOK_LITE_BACKEND": backend, "SOK_LITE_GPU_STREAM": way} for way in ways]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.npz" for number in range(len(trainings))]
        started = []
        for training, path in zip(trainings, paths, strict=True):
            env = {**os.environ, "SOK_LITE_HASH_SEED": "1", **training}
            words = ["scripts.gpu_tensorflow", "train", str(path), "--steps", str(steps)]
            started.append(subprocess.Popen([sys.executable, "-m", *words], env=env))
        codes = [process.wait() for process in started]
        if codes[0]:
            sys.exit(f"error: training on the CPU ended with {codes[0]}.")
        cpu, *others = (dict(np.load(path)) if path.exists() else None for path in paths)
    assert cpu is not None
    ms_cpu, wrong = float(cpu.pop("ms")), []
    for way, code, other in zip(ways, codes[1:], others, strict=True):
        facts = {"case": "steps", "steps": steps, "backend": backend, "way": way, "code": code}
        if code or other is None:
            wrong.append(way)
            result(**facts)
            continue
        differing = differences(cpu, other)
        wrong += [way] * bool(differing)
        result(
            **facts,
            keys=int(sum(of.size for name, of in cpu.items() if name.endswith("keys"))),
            ms_cpu=ms_cpu,
            ms=float(other.pop("ms")),
            # Operations that entered Python: few, where keys are known.
            entries=int(other.pop("entries")),
            compared=sorted({name.partition("/")[2] for name in cpu if "/" in name}),
            differing=differing,
        )
    if wrong:
        sys.exit(f"error: a training failed, or its bits are not those of the CPU: {wrong}.")


def differences(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, str]:
    """Returns what two trainings have not in common, with a word on it each."""
    found = {}
    for name in sorted(one.keys() | other.keys()):
        if name in ("ms", "entries"):
            continue
        if name not in one or name not in other or one[name].shape != other[name].shape:
            shapes = [of[name].shape if name in of else None for of in (one, other)]
            found[name] = f"shapes {shapes[0]} and {shapes[1]}"
        elif one[name].tobytes() != other[name].tobytes():
            wrong = np.argwhere(one[name] != other[name])
            found[name] = f"{len(wrong)} of {one[name].size}, first at {wrong[:1].tolist()}"
            if one[name].dtype.kind == "f":
                most = np.abs(one[name].astype(np.float64) - other[name]).max(initial=0)
                found[name] += f", by {most:.3g} at most"
    return found


def train(steps: int) -> dict[str, Any]:
    """Trains tables of several kinds, new ids in each step; returns what is to be compared.

    The loss is such that a gradient is exactly a row: no sum of TensorFlow's is in what is
    compared.

    Returns:
      Of each table keys, rows and states, ordered by key, and checksums of each step's outputs.
    """
    import keras
    import tensorflow as tf

    import sok_lite as sok
    from sok_lite.native.plans import num_entries

    kinds: dict[str, dict[str, Any]] = {
        "hbm": {"dimension": 16},
        "ragged": {"dimension": 10},
        "hybrid": {"dimension": 8, "var_type": "hybrid", "init_capacity": 1 << 17},
    }
    kinds["hybrid"] |= {"max_capacity": 1 << 17}  # no key is evicted
    tables = [
        sok.DynamicVariable(name=name, initializer="random", **options)
        for name, options in kinds.items()
    ]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.01))

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec([None, 1], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64),
            tf.TensorSpec([None, 3], tf.int64),
        ],
    )
    def step(*ids: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(tables, list(ids), combiners=["sum", "mean", "sqrtn"])
            loss = tf.add_n([0.5 * tf.reduce_sum(tf.square(of)) for of in rows])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return rows

    sums, start = [], time.perf_counter()
    for ids in islice(batches(), steps):
        rows = step(tf.constant(ids[0]), tf.RaggedTensor.from_row_splits(*ids[1]), ids[2])
        sums.append([zlib.crc32(of.numpy().tobytes()) for of in rows])
    found: dict[str, Any] = {"ms": np.array(1e3 * (time.perf_counter() - start) / steps)}
    found["outputs"], found["entries"] = np.array(sums), np.array(num_entries())
    for table, name in zip(tables, kinds, strict=True):
        columns: dict[str, Any] = {"rows": table, **sok.optimizer_states(table)}
        for column, of in columns.items():
            keys, values = (np.asarray(part) for part in of.export())
            order = np.argsort(keys)
            found[f"{name}/keys"] = keys[order]
            found[f"{name}/{column}"] = values[order]
    return found


def batches() -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]]:
    """Yields the ids of three tables: (n, 1), (values, row splits), (n, 3), all int64."""
    rng = np.random.default_rng(0)
    most = FIRST_KEYS
    while True:
        lengths = rng.integers(0, 6, BATCH)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # Small ones come often, and again and again in one batch.
        drawn = [
            (most * rng.random(shape) ** 3).astype(np.int64) * 7919
            for shape in ((BATCH, 1), int(splits[-1]), (BATCH, 3))
        ]
        yield drawn[0], (drawn[1], splits), drawn[2]
        most += NEW_KEYS


# ----------------------------------------------------------------- times


def times() -> None:
    """Times lookups and steps of known ids from Zipf(1.05), one id a row."""
    for case in CASES if default_backend() == "cuda" else SMALL_CASES:
        _time_case(*case)
        gc.collect()  # a graph and its tables are in a cycle: the next need their memory


def _time_case(number: int, batch: int, dim: int, num_keys: int) -> None:
    import keras
    import tensorflow as tf

    import sok_lite as sok
    from scripts.bench.lookup import zipf_positions

    rng = np.random.default_rng(0)
    tables = [
        sok.DynamicVariable(dimension=dim, initializer="random", name=f"{number}x{batch}_{dim}_{i}")
        for i in range(number)
    ]
    for part in np.array_split(np.arange(num_keys, dtype=np.int64), 8):
        for table in tables:
            tf.nn.embedding_lookup(table, tf.constant(part))
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(1e-3))
    backend = get_backend()
    in_graph = tf.function(
        autograph=False, input_signature=[[tf.TensorSpec([None, 1], tf.int64)] * number]
    )

    def look_up(ids: Any) -> list[Any]:
        return sok.lookup_sparse(tables, ids, combiners=["sum"] * number)

    @in_graph
    def lookup(ids: Any) -> Any:
        return [of[0, 0] for of in look_up(ids)]

    @in_graph
    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(of) for of in look_up(ids)])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return [loss]

    order = [rng.permutation(num_keys) for _ in range(number)]
    drawn = []
    for _ in range(4):
        positions = zipf_positions(rng, num_keys, 1.05, (number, batch))
        parts = zip(order, positions, strict=True)
        drawn.append([tf.constant(keys[some][:, None]) for keys, some in parts])
    for name, call in (("lookup", lookup), ("step", step)):
        took = []
        for count in range(25):
            start = time.perf_counter()
            call(drawn[count % len(drawn)])[-1].numpy()
            backend.synchronize_device()  # an update goes on when its operation has returned
            took.append(time.perf_counter() - start)
        result(
            case=name,
            tables=number,
            keys=number * batch,
            dim=dim,
            keys_in_table=num_keys,
            ms=1e3 * float(np.median(took[4:])),
            fastest_ms=1e3 * min(took[4:]),
        )


if __name__ == "__main__":
    main()
