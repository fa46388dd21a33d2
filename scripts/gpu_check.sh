#!/usr/bin/env bash
# Checks sok_lite on a machine with a GPU. Needs python3 with numpy, cupy, pytest and hypothesis: no
# TensorFlow, no Horovod, no pip, no network.
#
#   bash scripts/gpu_check.sh                     what decides, in less than 9 minutes
#   bash scripts/gpu_check.sh tensorflow FOLDER   the same through TensorFlow, from the pieces that
#                                                 tools/slim_tensorflow.py made
#   bash scripts/gpu_check.sh all                 every stage below but the last six, for an hour
#   bash scripts/gpu_check.sh tests memcheck      these stages, each in less than 10 minutes
#   bash scripts/gpu_check.sh tests FILE...       these files of tests, by their paths
#
#   compile     every kernel compiled for this GPU
#   quick       a variant of each test below TensorFlow
#   cases       the steps, finds and insertions that docs/performance.md has
#   sample      compute-sanitizer's memcheck over a variant of tests of kernels
#   hkv         HierarchicalKV's workload, and its own program beside it where HKV_SOURCE is given
#   tests       all tests below TensorFlow on the GPU, a process for each file
#   faults      the tests that fail, interrupt or hold up a table at every step
#   memcheck, synccheck, racecheck, initcheck
#               compute-sanitizer over the kernels' tests at small sizes, where it is found
#   tables, engine
#               the benchmarks
#   unpack, device, stream, step, steps, times
#               of `tensorflow`: see scripts/gpu_tensorflow.py
#
# Without names of stages each has a share of the 9 minutes, and what those before it left over.
# After every stage $OUT/gpu_check.json has its numbers, and $OUT/gpu_check.log what it printed.
#
# OUT               the folder for these; else gpu_check
# HKV_SOURCE        a checkout of HierarchicalKV: nvcc builds its benchmark
# SOK_LITE_COMMIT   the commit, where this is no checkout of git
# SOK_LITE_PYTHON   the Python to use; else python3
# SOK_LITE_STAGE_S  the most seconds of a stage; else 540. What there is no time for is named
# SOK_LITE_TEST_S   the most seconds of a test; else 120, and 400 under compute-sanitizer
# SOK_LITE_JOBS     files of tests at a time; else one for every two cores, 8 at most
# SOK_LITE_BACKEND  cpu: the same without a GPU and at small sizes, to try this script
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${SOK_LITE_PYTHON:-python3}"
backend="${SOK_LITE_BACKEND:-cuda}"
export SOK_LITE_BACKEND="$backend" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# What decides, most first, with seconds of 9 minutes: a little is left for what is between stages.
decide=(compile:80 quick:170 cases:120 sample:70 hkv:85)
through_tensorflow=(unpack:60 compile:70 device:50 stream:50 step:60 steps:110 times:125)

all=(compile quick cases sample hkv tests faults memcheck synccheck racecheck initcheck tables engine)
of_tensorflow=(unpack device stream step steps times)
fault_files=(tests/engine/test_{out_of_memory,interrupts,exclusive,snapshot}.py)
kernel_files=(tests/engine/test_{det,hkv,segments,pooling,initializer}.py
  tests/engine/{rows,optimizers}/test_*.py)
# What a training step is made of; then the others.
step_files=(tests/engine/test_{lookup,update,update_new_keys,step,tables,growth,dedup,record,clock}.py)
sample_files=(tests/engine/test_{det,hkv,segments,pooling,lookup,update}.py)

for name in SOK_LITE_STAGE_S SOK_LITE_TEST_S SOK_LITE_JOBS; do
  if [[ -n "${!name:-}" && ! "${!name}" =~ ^[1-9][0-9]{0,8}$ ]]; then
    what="a whole number of seconds"
    if [ "$name" = SOK_LITE_JOBS ]; then what="a whole number"; fi
    echo "error: $name must be $what, 1 or more. Received: '${!name}'." \
      "Unset it for its default." >&2
    exit 2
  fi
done

plan=()
files=()
pieces=""
arguments=("$@")
if [ "${1:-}" = tensorflow ]; then
  pieces="${2:-}"
  if [ ! -f "$pieces/pieces.json" ]; then
    echo "error: expected a folder of pieces, by tools/slim_tensorflow.py, with a pieces.json." \
      "Received: '$pieces'." >&2
    exit 2
  fi
  shift 2
  # What they unpack to. TensorFlow's own folder is found before what the machine has.
  PYTHONPATH="$PWD:$(cd "$pieces" && pwd)/unpacked${PYTHONPATH#"$PWD"}"
  if [ $# -eq 0 ]; then plan=("${through_tensorflow[@]}"); fi
elif [ $# -eq 0 ]; then
  plan=("${decide[@]}")
fi
known=("${all[@]}")
if [ -n "$pieces" ]; then known=(compile "${of_tensorflow[@]}"); fi
for argument in "$@"; do
  if [ "$argument" = all ] && [ -z "$pieces" ]; then plan+=("${all[@]}"); continue; fi
  case " ${known[*]} " in *" $argument "*) plan+=("$argument"); continue ;; esac
  if [ ! -f "$argument" ]; then
    echo "error: unknown argument '$argument'. Expected: files of tests, or of all ${known[*]}." >&2
    exit 2
  fi
  files+=("$argument")
done
if [ ${#plan[@]} -eq 0 ]; then plan=(tests); fi

out="${OUT:-gpu_check}"
mkdir -p "$out" || exit 1
json="$out/gpu_check.json" log="$out/gpu_check.log"
: >"$log"
"$python" -m scripts.gpu_record start "$json" "${arguments[@]}" || exit 1

failed=()
most_s="${SOK_LITE_STAGE_S:-540}"

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
      case " ${kernel_files[*]} ${step_files[*]} ${fault_files[*]} " in
        *" $file "*) ;;
        *) rest+=("$file") ;;
      esac
    done
    files=("${kernel_files[@]}" "${step_files[@]}" "${rest[@]}")
  fi
  in_files "${SOK_LITE_TEST_S:-120}" "${files[@]}"
}

run_sanitizer() { # tool, files where none are given...
  local tool="$1" folder found
  shift
  found="$(command -v compute-sanitizer || true)"
  for folder in "${CUDA_HOME:-/usr/local/cuda}"/bin "${CUDA_HOME:-/usr/local/cuda}"/compute-sanitizer; do
    if [ -z "$found" ] && [ -x "$folder/compute-sanitizer" ]; then found="$folder/compute-sanitizer"; fi
  done
  if [ -z "$found" ]; then
    echo "left out: no compute-sanitizer"
    return 0
  fi
  if [ ${#files[@]} -eq 0 ]; then files=("$@"); fi
  wrapper=("$found" --tool "$tool" --error-exitcode 9)
  # The large sizes would take hours under it, and find nothing that the awkward small ones do not.
  more+=(-p tests.support.no_memory_pool -k "$backend and not 100_003 and not 100003 and not million")
  in_files "${SOK_LITE_TEST_S:-400}" "${files[@]}"
}

# A program ends with the stage, at the latest.
run_program() { # module, its arguments...
  local left=$((stage_end - SECONDS))
  if [ "$left" -lt 1 ]; then
    echo "left out: $*, no time left"
    return 1
  fi
  timeout --kill-after=10 "$left" "$python" -m "$@" </dev/null
}
bench() { run_program scripts.bench "$@" --backends "$backend"; }

hkv_workload() { # what else
  local capacity=134217728 batch=1048576
  if [ "$backend" = cpu ]; then capacity=65536 batch=4096; fi
  bench tables --workload hkv --dims 8 --capacity "$capacity" --batch "$batch" "$@"
}

run_cases() {
  local keys=1000000 of_ten=1677721 batches=(8192 65536 104857) code=0
  if [ "$backend" = cpu ]; then keys=2000 of_ten=3000 batches=(64 128 256); fi
  bench engine --tables 26 --dim 16 --batch "${batches[0]}" --keys "$keys" || code=$?
  bench engine --tables 26 --dim 128 --batch "${batches[1]}" --keys "$keys" || code=$?
  bench engine --tables 10 --dim 128 --batch "${batches[2]}" --keys "$of_ten" || code=$?
  hkv_workload --tables hybrid --loads 0.5 1.0 --hkv-ops find find_or_insert || code=$?
  bench optimizers --rules Adam SGD --dims 16 128 --dtypes float32 --orders random --items 1 4 \
    --rows "$keys" || code=$?
  return "$code"
}

run_hkv() {
  local beside=()
  if [ -n "${HKV_SOURCE:-}" ]; then beside=(--hkv-source "$HKV_SOURCE"); fi
  hkv_workload --tables hybrid --loads 0.5 1.0 "${beside[@]}" \
    --hkv-ops find 'find*' find_or_insert 'find_or_insert*' insert_or_assign
}

run_stage() {
  stage_end=$((SECONDS + stage_s))
  case "$1" in
    compile) run_program sok_lite compile ;;
    quick) more=(--quick --unchanged); run_tests ;;
    cases) run_cases ;;
    sample) more=(--quick --unchanged); run_sanitizer memcheck "${sample_files[@]}" ;;
    hkv) run_hkv ;;
    tests) run_tests ;;
    faults) in_files "${SOK_LITE_TEST_S:-120}" "${fault_files[@]}" ;;
    memcheck | synccheck | racecheck | initcheck) run_sanitizer "$1" "${kernel_files[@]}" ;;
    tables) bench tables --dims 8 64 --capacity 4194304 ;;
    engine) bench engine ;;
    *) run_program scripts.gpu_tensorflow "$1" "$pieces" ;;
  esac
}

# HKV's benchmark takes nvcc more than a minute: it is built while the tests run.
building=""
case " ${plan[*]}" in
  *" hkv"*)
    if [ -n "${HKV_SOURCE:-}" ] && [ "$backend" != cpu ]; then
      "$python" -m scripts.bench.common.hkv_peer "$HKV_SOURCE" >"$out/hkv_build.log" 2>&1 &
      building=$!
    fi
    ;;
esac

end=0
for each in "${plan[@]}"; do
  name="${each%:*}" start="$SECONDS" code=0 stage_s="$most_s"
  if [ "$name" != "$each" ]; then
    end=$((end + ${each#*:}))
    if [ $((end - SECONDS)) -lt "$stage_s" ]; then stage_s=$((end - SECONDS)); fi
    if [ "$stage_s" -lt 1 ]; then stage_s=1; fi
  fi
  if [ "$name" = hkv ] && [ -n "$building" ]; then wait "$building"; fi
  first_byte="$(stat -c %s "$log")"
  printf '\n=== %s\n' "$name" | tee -a "$log"
  # In a shell of its own: what it sets is for this stage alone.
  (run_stage "$name") 2>&1 | tee -a "$log"
  code="${PIPESTATUS[0]}"
  [ "$code" -eq 0 ] || failed+=("$name")
  printf -- '--- %s: exit code %d, %d s\n' "$name" "$code" "$((SECONDS - start))" | tee -a "$log"
  "$python" -m scripts.gpu_record stage \
    "$json" "$name" "$code" "$((SECONDS - start))" "$log" "$first_byte"
done

printf '\n%d stages, failed: %s; %d s; %s\n' \
  "${#plan[@]}" "${failed[*]:-none}" "$SECONDS" "$json" | tee -a "$log"
[ ${#failed[@]} -eq 0 ]
