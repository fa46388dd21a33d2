#!/usr/bin/env bash
# Sets everything up and checks: the one command before a commit, and what CI runs.
#
#   bash scripts/test.sh            quick: every test function once, but for those that are marked
#                                   `full_only`, in ten minutes after set-up
#   bash scripts/test.sh --full     every test in every variant, long ones too: up to 60 minutes
#   bash scripts/test.sh PATH...    what pytest runs of these: paths, names of tests, its options
#
# tests/conftest.py says how quick chooses. The last line counts the tests of all stages.
#
# SOK_LITE_OLDEST=0  nothing with the oldest TensorFlow, which has an environment of its own:
#                    .venv-oldest
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh || exit 1
is_check=1
case "${1:-}" in '' | --full) ;; *) is_check= ;; esac
if [ -n "$is_check" ] && [ "${SOK_LITE_OLDEST:-1}" != 0 ]; then
  # pyproject.toml names the oldest release that is supported.
  oldest="$(sed -n 's/.*"tensorflow-cpu>=\([0-9.]*\),.*/\1/p' pyproject.toml)"
  # Where it fails, its stage fails, and the others run.
  SOK_LITE_VENV=.venv-oldest bash scripts/setup.sh --tensorflow "$oldest"
fi

venv="${SOK_LITE_VENV:-.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
export PATH="$venv/bin:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# Open MPI refuses root, which is who runs in most containers, and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1

[ -n "$is_check" ] || exec python -m pytest "$@"
printf 'set-up: %d s\n' "$SECONDS"
exec python3 scripts/check.py "$@"
