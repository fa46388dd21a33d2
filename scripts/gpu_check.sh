#!/usr/bin/env bash
# Checks the engine on a machine with a GPU: its tests on the cuda back end, the benchmarks, and the
# tests once more under compute-sanitizer where that is found.
# Needs python3 with numpy, cupy, pytest and hypothesis. Needs no TensorFlow, no Horovod, no pip.
#
#   bash scripts/gpu_check.sh
#   bash scripts/gpu_check.sh --sweep      instead: what the memory can do, and the table kernels
#                                          over their tunables, in under 10 minutes
#
# What follows --sweep goes to scripts/bench_sweep.py, which says more.
#
# SOK_LITE_PYTHON      the Python to use; else python3
# SOK_LITE_MEMCHECK_S  the most seconds for compute-sanitizer; else 900
# SOK_LITE_BACKEND     cpu: the sweep without a GPU, to try it
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${SOK_LITE_PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

sweep=0
case "${1:-}" in
  --sweep) sweep=1; shift ;;
  '') ;;
  *) echo "error: unknown argument $1. The only one is --sweep." >&2; exit 2 ;;
esac
if [ "$sweep" -eq 1 ] && [ "${SOK_LITE_BACKEND:-cuda}" = cpu ]; then
  exec "$python" scripts/bench_sweep.py "$@"
fi

"$python" - <<'PY' || exit 1
import importlib, sys

missing = []
for name in ("numpy", "cupy", "pytest", "hypothesis"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}. "
             "pip install numpy cupy-cuda13x pytest hypothesis (cupy-cuda12x for CUDA 12)")
import cupy

try:
    count = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError as error:
    sys.exit(f"error: CuPy finds no GPU: {error}")
if count == 0:
    sys.exit("error: CuPy finds no GPU.")
device = cupy.cuda.runtime.getDeviceProperties(0)
print(f"Python {sys.version.split()[0]}, CuPy {cupy.__version__}, "
      f"{device['name'].decode()}, {device['totalGlobalMem'] >> 30} GiB")
PY

if [ "$sweep" -eq 1 ]; then
  SOK_LITE_BACKEND=cuda exec "$python" scripts/bench_sweep.py "$@"
fi

failed=0

stage() { # name, command...
  local name="$1" start="$SECONDS" code=0
  shift
  printf '\n=== %s\n' "$name"
  "$@" </dev/null || code=$?
  [ "$code" -eq 0 ] || failed=$((failed + 1))
  printf -- '--- %s: exit code %d, %d s\n' "$name" "$code" "$((SECONDS - start))"
}

# Only cuda: the other tests say nothing new here, and some need a C++ compiler.
pytest=("$python" -m pytest -q -p no:cacheprovider)
SOK_LITE_BACKEND=cuda stage 'engine tests on the GPU' "${pytest[@]}" tests/engine -k cuda
SOK_LITE_BACKEND=cuda stage 'benchmarks run' "${pytest[@]}" tests/test_benchmarks.py -k cuda

stage 'benchmark of the tables' "$python" scripts/bench_tables.py --backends cuda --dims 8 64 \
  --capacity 4194304
stage 'benchmark of the engine' "$python" scripts/bench_engine.py --backends cuda

sanitizer="$(command -v compute-sanitizer || true)"
for folder in "${CUDA_HOME:-/usr/local/cuda}"/bin "${CUDA_HOME:-/usr/local/cuda}"/compute-sanitizer; do
  if [ -z "$sanitizer" ] && [ -x "$folder/compute-sanitizer" ]; then sanitizer="$folder/compute-sanitizer"; fi
done
if [ -n "$sanitizer" ]; then
  # The large sizes would take hours under it, and find nothing that the awkward small ones do not.
  # Last, and with a limit, so that what came before is known where time is short.
  SOK_LITE_BACKEND=cuda stage 'memcheck' timeout "${SOK_LITE_MEMCHECK_S:-900}" \
    "$sanitizer" --tool memcheck --error-exitcode 9 \
    "${pytest[@]}" -p tests.no_memory_pool tests/engine -k 'cuda and not 100_003 and not 100003 and not million'
else
  printf '\n=== memcheck: left out, no compute-sanitizer\n'
fi

printf '\n%d stages failed, %d s\n' "$failed" "$SECONDS"
[ "$failed" -eq 0 ]
