#!/usr/bin/env bash
# Sets everything up and runs every check: the one command before a commit, and what CI runs.
# All stages run even when one fails. The last line counts the tests of all of them.
#
#   bash scripts/test.sh                      everything but the long tests
#   SOK_LITE_LONG=1 bash scripts/test.sh      everything
#   SOK_LITE_OLDEST=0 bash scripts/test.sh    nothing with the oldest TensorFlow, which has an
#                                             environment of its own: .venv-oldest
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh || exit 1
venv="${SOK_LITE_VENV:-.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
export PATH="$venv/bin:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# Open MPI refuses root, which is who runs in most containers, and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1

logs="$(mktemp -d)"
# Of what runs beside, the shell and the `timeout` below it, which ends what it runs.
end() {
  for job in $(jobs -p); do kill "$job" $(pgrep -P "$job") 2>/dev/null; done
  rm -rf "$logs"
}
trap end EXIT
pytest=(python -m pytest -q --durations=10 --durations-min=5)
more=1 # times as many seconds
# pyproject.toml leaves the long ones out; the last -m wins.
case "${SOK_LITE_LONG:-0}" in 0 | '') ;; *) pytest+=(-m '') more=6 ;; esac

# Some launchers give a rank a terminal, and pytest then colours what is counted here.
ranks=("${pytest[@]}" --color=no -p no:cacheprovider tests/ranks)

passed=0 failed=0 skipped=0
broken=() # names of the stages that failed

# Adds the counts of a stage: those of pytest's closing line, else the stage itself is one test.
# Under a launcher every rank prints the same line; a count is the largest of them.
count() { # name, exit code
  local log="$logs/$1" ok bad skip
  tally() {
    grep -aE '(^|>:)=* ?([0-9]+ [a-z]+,? ?)+ in [0-9.]+s' "$log" |
      grep -aoE "[0-9]+ ($1)" | sort -rn | head -n 1 | cut -d' ' -f1
  }
  ok="$(tally passed)" bad="$(tally 'failed|errors?')" skip="$(tally skipped)"
  if [ "$2" -ne 0 ] && [ -z "$bad" ]; then bad=1; fi
  if [ "$2" -eq 0 ] && [ -z "$ok$skip" ]; then ok=1; fi
  passed=$((passed + ${ok:-0})) failed=$((failed + ${bad:-0})) skipped=$((skipped + ${skip:-0}))
}

# Runs one stage, with a time limit: a hang must not hold up whoever waits for the result.
stage() { # name, seconds, command...
  printf '\n=== %s\n' "$1"
  run "$@" | tee "$logs/$1"
  close "$1"
}

run() { # name, seconds, command...
  local name="$1" limit="$2" start="$SECONDS" code=0
  shift 2
  timeout --kill-after=20 "$limit" "$@" </dev/null 2>&1 || code=$?
  if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then echo "stopped after its limit of $limit s"; fi
  echo "$code $((SECONDS - start))" >"$logs/$name.end"
}

close() { # name
  local code seconds
  read -r code seconds <"$logs/$1.end"
  count "$1" "$code"
  if [ "$code" -eq 0 ]; then code=ok; else code="FAILED, exit code $code" broken+=("$1"); fi
  printf -- '--- %s: %s, %d s\n' "$1" "$code" "$seconds"
}

stage 'ruff format' 60 ruff format --check .
stage 'ruff check' 60 ruff check .
stage mypy 300 mypy
mapfile -t sources < <(find kernels scripts tests -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' | sort)
stage clang-format 60 clang-format --dry-run -Werror "${sources[@]}"
# Most tests use one core, so two lanes of stages share two cores: beside the others run the tests of
# the engine, on each backend, then those of the oldest TensorFlow and the sanitizers. Their limits
# hold on a slow machine; a test that hangs says so long before (pyproject.toml).
engine='tests, engine' sanitizers='tests, sanitizers'
# pyproject.toml names the oldest release that is supported.
oldest="$(sed -n 's/.*"tensorflow-cpu>=\([0-9.]*\),.*/\1/p' pyproject.toml)"
beside=("$engine" "$sanitizers")
if [ "${SOK_LITE_OLDEST:-1}" != 0 ]; then
  beside=("$engine" "set-up of TensorFlow $oldest" "tests, TensorFlow $oldest" "$sanitizers")
fi
run_beside() {
  run "$engine" $((4200 * more)) "${pytest[@]}" tests/engine tests/backend tests/comm \
    tests/support --ignore=tests/backend/test_sanitizers.py >"$logs/$engine"
  if [ "${#beside[@]}" -gt 2 ]; then
    run "${beside[1]}" 1200 \
      env SOK_LITE_VENV="$PWD/.venv-oldest" bash scripts/setup.sh --tensorflow "$oldest" \
      >"$logs/${beside[1]}"
    run "${beside[2]}" $((3600 * more)) \
      env PATH="$PWD/.venv-oldest/bin:$PATH" "${pytest[@]}" -p no:cacheprovider \
      tests/bridge tests/sok tests/dynamic_embedding tests/kv_variable tests/keras >"$logs/${beside[2]}"
  fi
  run "$sanitizers" $((900 * more)) "${pytest[@]}" tests/backend/test_sanitizers.py >"$logs/$sanitizers"
}
run_beside &
stage 'tests' $((3600 * more)) "${pytest[@]}" tests --ignore=tests/engine --ignore=tests/backend \
  --ignore=tests/comm --ignore=tests/support --ignore=tests/ranks \
  tests/ranks/test_{elastic,hosts,launch,rank_failures}.py # these start ranks themselves
stage 'tests, 2 ranks, horovodrun' $((1200 * more)) horovodrun -np 2 "${ranks[@]}"
if command -v mpirun >/dev/null && python -c 'from mpi4py import MPI' 2>/dev/null; then
  stage 'tests, 2 ranks, mpirun' $((1200 * more)) mpirun -np 2 "${ranks[@]}"
else
  printf '\n=== tests, 2 ranks, mpirun: left out, no mpirun or no mpi4py\n'
fi
if [ "${#beside[@]}" -eq 2 ]; then
  printf '\n=== tests, TensorFlow %s: left out by SOK_LITE_OLDEST\n' "$oldest"
fi
wait
for name in "${beside[@]}"; do
  printf '\n=== %s\n' "$name"
  cat "$logs/$name"
  close "$name"
done

# What failed comes once more at the end: whoever sees only the last lines must see it.
for name in ${broken[@]+"${broken[@]}"}; do
  printf '\n=== what failed of %s\n' "$name"
  grep -aqE '(^|>:)=+ (FAILURES|ERRORS) =' "$logs/$name" &&
    sed -nE '/(^|>:)=+ (FAILURES|ERRORS) =/,/(^|>:)=+ (warnings|short test) summary/p' "$logs/$name" |
    head -n 150
  grep -aE '(^|>:)(FAILED|ERROR) ' "$logs/$name" || tail -n 40 "$logs/$name"
done

printf '\n%d passed, %d failed, %d skipped in %d s\n' "$passed" "$failed" "$skipped" "$SECONDS"
[ "$failed" -eq 0 ]
