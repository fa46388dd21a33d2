#!/usr/bin/env bash
# Makes the environment of the system we measure ourselves against: TensorFlow Recommenders-Addons
# (TFRA) 0.8.1, which needs TensorFlow 2.16 and tf_keras and so cannot share ours.
# Benchmarks that compare with TFRA (lookup, many_tables, dynamic_embedding) use it when it is there.
#
#   bash scripts/bench/peers.sh [FOLDER]     FOLDER: else $SOK_LITE_PEERS, else .venv-peers
#
# SOK_LITE_PYTHON  a Python 3.10 or 3.11 (TFRA has no wheel for newer ones); else python3.11
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder="${1:-${SOK_LITE_PEERS:-.venv-peers}}"
wanted=(tensorflow==2.16.2 tf_keras==2.16.0 tensorflow-recommenders-addons==0.8.1 numpy==1.26.4)
check='import os; os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow_recommenders_addons as tfra; print("TFRA", tfra.__version__)'

if [ "$(cat "$folder/ready.txt" 2>/dev/null)" = "${wanted[*]}" ]; then
  echo "$folder is ready"
  exit 0
fi
python="${SOK_LITE_PYTHON:-python3.11}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))'; then
  echo "error: TFRA 0.8.1 needs Python 3.10 or 3.11: set SOK_LITE_PYTHON to one." >&2
  exit 1
fi

rm -rf "$folder"
"$python" -m venv "$folder"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES="${PIP_RETRIES:-10}"
"$folder/bin/python" -m pip install -qq --upgrade pip "setuptools<81" wheel
# The full TensorFlow: TFRA's libraries look for CUDA symbols that tensorflow-cpu does not have.
"$folder/bin/python" -m pip install -qq "${wanted[@]}"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/bin/python" -W ignore -c "$check" 2>"$folder/check.log" ||
  { cat "$folder/check.log" >&2; exit 1; }
echo "${wanted[*]}" >"$folder/ready.txt"
