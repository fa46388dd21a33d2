#!/usr/bin/env bash
# Builds the wheel for other machines, and tests it in an environment that has NumPy and nothing else.
#
#   bash tools/build_wheel.sh [FOLDER]     dist, unless another folder is named
#
# auditwheel names it after the oldest glibc with which it loads (manylinux_2_17 and so on). That
# depends on the machine: build a release on the oldest one that it is for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
folder="${1:-dist}"
new="$(mktemp -d)"
trap 'rm -rf "$new"' EXIT
python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$new" .
# TensorFlow has loaded that library when it loads ours.
python -m auditwheel repair --exclude libtensorflow_framework.so.2 --wheel-dir "$new/repaired" "$new"/sok_lite-*.whl
wheel="$(basename "$new"/repaired/*.whl)"
SOK_LITE_WHEEL="$new/repaired/$wheel" python -m pytest -q tests/test_packaging.py -k "wheel or installed"
mkdir -p "$folder"
mv "$new/repaired/$wheel" "$folder/"
echo "$folder/$wheel"
