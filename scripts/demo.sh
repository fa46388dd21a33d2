#!/usr/bin/env bash
# Sets everything up and runs the main job: a click model on dynamic embeddings, trained over two
# ranks under horovodrun. The output ends in a sentence of what came out, and `RESULT {json}`.
#
#   bash scripts/demo.sh [--ranks N] [options of examples/train_ctr.py]
#   bash scripts/demo.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh >&2
venv="${SOK_LITE_VENV:-.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
export PATH="$venv/bin:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}" PYTHONUNBUFFERED=1

ranks=2
previous=
for argument in "$@"; do
  case "$argument" in
    -h | --help) exec python examples/train_ctr.py --help ;;
    --ranks=*) ranks="${argument#--ranks=}" ;;
  esac
  if [ "$previous" = --ranks ]; then ranks="$argument"; fi
  previous="$argument"
done

# horovodrun writes the rank before every line: `[0]<stdout>:` with Gloo, `[1,0]<stdout>:` with MPI.
# A progress bar ends its lines with a carriage return, which sed would hold back. TensorFlow's notes
# on this processor, which no setting of its own silences, are left out: every process prints them.
without_ranks() {
  python -c '
import os, re, sys
prefix = re.compile(rb"^\[[0-9,]+\]<std(?:out|err)>: ?")
noise = re.compile(rb"I0000 00:00:\d|WARNING: All log messages before absl::InitializeLog")
rest = b""
while chunk := os.read(0, 65536):
    *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
    lines = [prefix.sub(b"", line) for line in lines]
    sys.stdout.buffer.write(b"".join(line for line in lines if not noise.match(line)))
    sys.stdout.buffer.flush()
sys.stdout.buffer.write(prefix.sub(b"", rest))
'
}

# Two pipes, so that output and errors stay apart; 3 is the way around the inner one.
{
  horovodrun -np "$ranks" python examples/train_ctr.py "$@" 2>&1 >&3 3>&- | without_ranks >&2 3>&-
} 3>&1 | without_ranks
