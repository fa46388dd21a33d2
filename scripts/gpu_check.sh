#!/usr/bin/env bash
# Checks the engine on a machine with a GPU, in stages; each ends within 10 minutes.
# Needs python3 with numpy, cupy, pytest and hypothesis. Needs no TensorFlow, no Horovod, no pip.
#
#   bash scripts/gpu_check.sh                     every stage, in this order
#   bash scripts/gpu_check.sh tests memcheck      these stages
#   bash scripts/gpu_check.sh tests FILE...       these files of tests, by their paths
#
#   compile     every kernel compiled for this GPU
#   tests       the tests below TensorFlow on the GPU, a process for each file
#   faults      the tests that fail, interrupt or hold up a table at every step
#   memcheck, synccheck, racecheck, initcheck
#               compute-sanitizer over the kernels' tests at small sizes, where it is found
#   tables, engine
#               the benchmarks
#
# SOK_LITE_PYTHON   the Python to use; else python3
# SOK_LITE_STAGE_S  the most seconds of a stage; else 540. What there is no time for is named
# SOK_LITE_TEST_S   the most seconds of a test; else 120, and 400 under compute-sanitizer
# SOK_LITE_JOBS     files of tests at a time; else one for every two cores, 8 at most
# SOK_LITE_BACKEND  cpu: the same without a GPU, to try this script
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${SOK_LITE_PYTHON:-python3}"
backend="${SOK_LITE_BACKEND:-cuda}"
export SOK_LITE_BACKEND="$backend" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

all=(compile tests faults memcheck synccheck racecheck initcheck tables engine)
fault_files=(tests/engine/test_{out_of_memory,interrupts,exclusive,snapshot}.py)
kernel_files=(tests/engine/test_{det,hkv,segments,pooling,initializer}.py
  tests/engine/{rows,optimizers}/test_*.py)

for name in SOK_LITE_STAGE_S SOK_LITE_TEST_S SOK_LITE_JOBS; do
  if [[ -n "${!name:-}" && ! "${!name}" =~ ^[1-9][0-9]{0,8}$ ]]; then
    what="a whole number of seconds"
    if [ "$name" = SOK_LITE_JOBS ]; then what="a whole number"; fi
    echo "error: $name must be $what, 1 or more. Received: '${!name}'." \
      "Unset it for its default." >&2
    exit 2
  fi
done

stages=()
files=()
for argument in "$@"; do
  case " ${all[*]} " in *" $argument "*) stages+=("$argument"); continue ;; esac
  if [ ! -f "$argument" ]; then
    echo "error: unknown argument '$argument'. Expected: files of tests, or of ${all[*]}." >&2
    exit 2
  fi
  files+=("$argument")
done
if [ ${#stages[@]} -eq 0 ]; then stages=("${all[@]}"); fi

if [ "$backend" != cpu ]; then
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
import cupy, numpy

runtime = cupy.cuda.runtime
try:
    count = runtime.getDeviceCount()
except runtime.CUDARuntimeError as error:
    sys.exit(f"error: CuPy finds no GPU: {error}")
if count == 0:
    sys.exit("error: CuPy finds no GPU.")
device = runtime.getDeviceProperties(0)
free, total = runtime.memGetInfo()
print(f"Python {sys.version.split()[0]}, NumPy {numpy.__version__}, CuPy {cupy.__version__}, "
      f"CUDA {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}, "
      f"NVRTC {cupy.cuda.nvrtc.getVersion()}")
print(f"{count} x {device['name'].decode()}, {free >> 30} of {total >> 30} GiB free")
PY
fi

failed=()
stage_s="${SOK_LITE_STAGE_S:-540}"

pytest=("$python" -m pytest -q -p no:cacheprovider)
# A kernel that never ends holds the thread that waits for it: only ending the process helps, and
# pytest can since version 9. Before, the file's limit does it, and the file's other tests are lost.
exits=()
if "$python" -c 'import pytest, sys; sys.exit(int(pytest.__version__.split(".")[0]) < 9)'; then
  exits=(-o faulthandler_exit_on_timeout=true)
fi

jobs="${SOK_LITE_JOBS:-$(($(nproc) / 2))}"
if [ "$jobs" -gt 8 ] && [ -z "${SOK_LITE_JOBS:-}" ]; then jobs=8; fi
if [ "$jobs" -lt 1 ]; then jobs=1; fi

# Runs a file of tests on this backend, and prints what it printed once it has ended.
# Only this backend's tests: the others say nothing new here, and some need a C++ compiler.
# `wrapper` is put before Python, `more` before the file.
wrapper=()
more=()
in_file() { # file, seconds a test, when the stage ends, folder for logs
  local file="$1" left=$(($3 - SECONDS)) code=0 log
  log="$(mktemp "$4/XXXXXX")"
  if [ "$left" -lt 5 ]; then
    echo "$file: left out, no time left" >"$log"
    code=1
  else
    echo "# $file" >"$log"
    timeout --kill-after=10 "$left" "${wrapper[@]}" "${pytest[@]}" -k "$backend" "${exits[@]}" \
      -o faulthandler_timeout="$2" "${more[@]}" "$file" </dev/null >>"$log" 2>&1 || code=$?
    # compute-sanitizer's word for 5, below.
    if grep -q "terminated before first instrumented API call" "$log"; then code=5; fi
    case "$code" in
      0) ;;
      5) code=0 ;; # it has no tests of this backend
      124 | 137) echo "$file: stopped, the $stage_s s of the stage are over" >>"$log" ;;
      *) echo "$file: exit code $code" >>"$log" ;;
    esac
  fi
  if [ "$code" -ne 0 ]; then echo "$file" >>"$4/not_passed"; fi
  { flock 9; cat "$log"; } 9>"$4/lock"
}

# Runs files of tests, a process for each: one that hangs or crashes costs no other.
in_files() { # seconds a test, files...
  local test_s="$1" file folder running=0 end=$((SECONDS + stage_s)) code=0
  shift
  folder="$(mktemp -d)"
  for file in "$@"; do
    if [ "$running" -ge "$jobs" ]; then
      wait -n || true
      running=$((running - 1))
    fi
    in_file "$file" "$test_s" "$end" "$folder" &
    running=$((running + 1))
  done
  wait
  if [ -f "$folder/not_passed" ]; then
    echo "not passed: $(sort "$folder/not_passed" | paste -sd ' ')"
    code=1
  fi
  rm -r "$folder"
  return "$code"
}

run_tests() {
  local file rest=()
  if [ ${#files[@]} -eq 0 ]; then
    for file in tests/engine/{,*/}test_*.py tests/{backend,comm}/test_*.py; do
      case " ${kernel_files[*]} ${fault_files[*]} " in *" $file "*) ;; *) rest+=("$file") ;; esac
    done
    files=("${kernel_files[@]}" "${rest[@]}")
  fi
  in_files "${SOK_LITE_TEST_S:-120}" "${files[@]}"
}

run_sanitizer() { # tool
  local folder found
  found="$(command -v compute-sanitizer || true)"
  for folder in "${CUDA_HOME:-/usr/local/cuda}"/bin "${CUDA_HOME:-/usr/local/cuda}"/compute-sanitizer; do
    if [ -z "$found" ] && [ -x "$folder/compute-sanitizer" ]; then found="$folder/compute-sanitizer"; fi
  done
  if [ -z "$found" ]; then
    echo "left out: no compute-sanitizer"
    return 0
  fi
  if [ ${#files[@]} -eq 0 ]; then files=("${kernel_files[@]}"); fi
  wrapper=("$found" --tool "$1" --error-exitcode 9)
  # The large sizes would take hours under it, and find nothing that the awkward small ones do not.
  more=(-p tests.support.no_memory_pool -k "$backend and not 100_003 and not 100003 and not million")
  in_files "${SOK_LITE_TEST_S:-400}" "${files[@]}"
}

bench() { timeout --kill-after=10 "$stage_s" "$python" -m scripts.bench "$@" </dev/null; }

run_stage() {
  case "$1" in
    compile) timeout --kill-after=10 "$stage_s" "$python" -m sok_lite compile </dev/null ;;
    tests) run_tests ;;
    faults) in_files "${SOK_LITE_TEST_S:-120}" "${fault_files[@]}" ;;
    memcheck | synccheck | racecheck | initcheck) run_sanitizer "$1" ;;
    tables) bench tables --backends "$backend" --dims 8 64 --capacity 4194304 ;;
    engine) bench engine --backends "$backend" ;;
  esac
}

for name in "${stages[@]}"; do
  start="$SECONDS" code=0
  printf '\n=== %s\n' "$name"
  (run_stage "$name") || code=$? # in a shell of its own: what it sets is for this stage alone
  [ "$code" -eq 0 ] || failed+=("$name")
  printf -- '--- %s: exit code %d, %d s\n' "$name" "$code" "$((SECONDS - start))"
done

printf '\n%d stages, failed: %s; %d s\n' "${#stages[@]}" "${failed[*]:-none}" "$SECONDS"
[ ${#failed[@]} -eq 0 ]
