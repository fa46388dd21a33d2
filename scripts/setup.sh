#!/usr/bin/env bash
# Sets up the project in .venv: TensorFlow, the test tools, Horovod, sok_lite itself, editable, and
# its CPU kernels. Run it as often as you like: it takes no time when nothing changed.
#
#   bash scripts/setup.sh          TensorFlow for the CPU, Horovod with Gloo (and MPI if mpicc is found)
#   bash scripts/setup.sh --gpu    TensorFlow with CUDA, CuPy, Horovod with NCCL
#   bash scripts/setup.sh --tensorflow 2.16      that release, for the CPU, without Horovod: to test on
#
# An environment made with --gpu stays one when a later call, such as demo.sh's, does not say so.
#
# SOK_LITE_PYTHON  the Python to use (3.10 to 3.13); else that of .venv, or the first one on PATH
# SOK_LITE_VENV    where the environment goes; else .venv in the project
# SOK_LITE_CACHE   where the Horovod wheel and compiled kernels are kept; else ~/.cache/sok_lite
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'error: ' >&2
  printf '%s\n' "$@" >&2
  exit 1
}

gpu=
release=
while [ $# -gt 0 ]; do
  case "$1" in
    --gpu) gpu=1 ;;
    --tensorflow)
      release="${2:-}"
      case "$release" in
        [0-9]*.[0-9]*) shift ;;
        *) die "--tensorflow needs a release such as 2.16. Received: '$release'." ;;
      esac
      ;;
    -h | --help)
      sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) die "unknown argument '$1'. Expected: --gpu, --tensorflow RELEASE or nothing." ;;
  esac
  shift
done
if [ -n "$gpu" ] && [ -n "$release" ]; then
  die "--tensorflow makes an environment for the CPU. Leave --gpu out."
fi

venv="${SOK_LITE_VENV:-.venv}"
# In a shell where .venv is activated its own python3 and mpicc must not be taken for the system's.
case "$venv" in /*) own="$venv/bin" ;; *) own="$PWD/$venv/bin" ;; esac
PATH=":$PATH:"
PATH="${PATH//":$own:"/:}"
PATH="${PATH#:}"
PATH="${PATH%:}"

# ---------------------------------------------------------------- what pip cannot install
suits='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
python=
found=
# An environment keeps the Python that it was made with, whatever comes first on PATH today. Where its
# making was killed, that may be no environment but a link to that Python, which must not make itself.
mine=
if [ -x "$venv/bin/python" ]; then
  mine="$("$venv/bin/python" -c '
import os, sys
print(sys._base_executable if sys.prefix != sys.base_prefix else os.path.realpath(sys.executable))
' 2>/dev/null || true)"
fi
for candidate in ${SOK_LITE_PYTHON:-$mine python3 python3.13 python3.12 python3.11 python3.10}; do
  command -v "$candidate" >/dev/null 2>&1 || continue
  # A pyenv shim is on PATH whether or not there is a Python behind it: then --version fails.
  found="$found $("$candidate" --version 2>&1 | tail -n 1 || true) ($candidate)"
  if "$candidate" -c "$suits" >/dev/null 2>&1; then
    python="$(command -v "$candidate")"
    break
  fi
done
if [ -z "$python" ]; then
  die "sok_lite needs Python 3.10, 3.11, 3.12 or 3.13 (what TensorFlow supports). Found:${found:- none}." \
    "  Debian, Ubuntu:  sudo apt-get install python3 python3-venv" \
    "  Fedora, RHEL:    sudo dnf install python3.12" \
    "  any system:      https://docs.astral.sh/uv/  then: uv python install 3.12" \
    "and, if it is not the first python3 on PATH, name it: SOK_LITE_PYTHON=/path/to/python3.12 bash scripts/setup.sh"
fi
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  die "$python has no venv module (Debian and Ubuntu ship it apart)." \
    "  Debian, Ubuntu:  sudo apt-get install python$version-venv"
fi
if ! command -v "${CXX:-g++}" >/dev/null 2>&1; then
  die "no C++ compiler: '${CXX:-g++}' is not on PATH. The kernels and Horovod are compiled here." \
    "  Debian, Ubuntu:  sudo apt-get install g++" \
    "  Fedora, RHEL:    sudo dnf install gcc-c++ libstdc++-static" \
    "  conda:           conda install -c conda-forge gxx   (and CXX set to its name)"
fi

step() { printf '[setup %4ds] %s\n' "$SECONDS" "$1"; }

# ---------------------------------------------------------------- is there anything to do?
stamp="$venv/sok_lite-setup.txt"
running="$venv/sok_lite-setup.running"

# They are kept in the cache and not in the environment, so an edited kernel is compiled here, and
# the first table need not wait for it.
build_kernels() {
  "$venv/bin/python" -c '
from sok_lite.backend.build import find_library as kernels
from sok_lite.native.library import find_library as operations
kernels(), operations()' || die "the CPU kernels could not be compiled. The reason is above."
}

exit_if_done() {
  case "$(cat "$stamp" 2>/dev/null)" in 'gpu '*) gpu=1 ;; esac
  extra=cpu
  horovod_flags=()
  if [ -n "$gpu" ]; then
    extra=gpu
    horovod_flags=(--gpu)
  fi
  # All that decides what is installed. A project that moved has another path in its editable install.
  wanted="$(
    "$python" - "$extra$release" pyproject.toml scripts/setup.sh scripts/build_horovod.py <<'PY'
import hashlib, os, shutil, sys
digest = hashlib.sha256()
for path in sys.argv[2:]:
    digest.update(open(path, "rb").read())
print(sys.argv[1], os.path.realpath(sys.executable), sys.version.split()[0], os.getcwd(),
      "mpicc" if shutil.which("mpicc") else "no-mpicc", digest.hexdigest())
PY
  )"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
    build_kernels
    exit 0
  fi
}
exit_if_done

# ---------------------------------------------------------------- one set-up at a time
# Python asks, as not every system has the command flock. The lock belongs to the open file: it lasts
# until this script and what it started have ended, however they end.
mkdir -p "$(dirname "$venv")"
exec 9>>"$venv.lock"
lock() { "$python" -c "import fcntl; fcntl.flock(9, fcntl.LOCK_EX $*)" 2>/dev/null; }
if ! lock '| fcntl.LOCK_NB'; then
  step "another set-up of $venv is under way: waiting for it"
  lock || die "$venv.lock cannot be locked. Set SOK_LITE_VENV to a folder on a disk of this machine."
fi
exit_if_done  # another one may have done it

# ---------------------------------------------------------------- do it
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export PIP_RETRIES="${PIP_RETRIES:-10}" PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}"

# pip's own retries do not cover a download that breaks off.
pip_install() {
  local try
  for try in 1 2 3; do
    if "$venv/bin/python" -m pip install -qq "$@"; then return 0; fi
    echo "pip failed (try $try of 3): pip install $*" >&2
    sleep $((try * 3))
  done
  die "pip could not install: $*" "Its reason is above. What is installed stays; run this again to go on."
}

clear=()
if [ -e "$running" ]; then
  step "the last set-up was killed midway: starting over"
  clear=(--clear)
elif [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  clear=(--clear)
elif [ -e "$venv" ] &&
  [ "$("$venv/bin/python" -c 'import sys; print(sys.version_info[:2])')" != "$("$python" -c 'import sys; print(sys.version_info[:2])')" ]; then
  clear=(--clear)
fi
if [ ! -e "$venv" ] || [ ${#clear[@]} -gt 0 ]; then
  step "making $venv with $("$python" --version)"
  "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" || die "could not make $venv."
fi
rm -f "$stamp"
: >"$running"
# pip undoes a step that fails or is interrupted; when we are killed the marker stays.
killed=
trap 'killed=1; exit 143' TERM HUP
trap '[ -n "$killed" ] || rm -f "$running"' EXIT

step "pip"
pip_install --upgrade pip "setuptools>=65" wheel
step "TensorFlow${release:+ $release} ($extra), the test tools and sok_lite (editable)"
wanted_release=()
if [ -n "$release" ]; then
  name="$(uname -m)"
  [ "$name" = x86_64 ] && name=tensorflow-cpu || name=tensorflow
  wanted_release=("$name==$release.*")
fi
extras="$extra,test"
# The whole check builds the site, in the main environment.
[ -n "$gpu$release" ] || extras="$extras,docs"
pip_install --editable ".[$extras]" ${wanted_release[@]+"${wanted_release[@]}"}
# It is released in step with TensorFlow, and its metadata would pull the full `tensorflow` in.
installed="$("$venv/bin/python" - <<'PY'
from importlib.metadata import PackageNotFoundError, version
try:
    found = version("tensorflow-cpu")
except PackageNotFoundError:
    found = version("tensorflow")
print(".".join(found.split(".")[:2]))
PY
)"
step "tf_keras $installed"
pip_install --no-deps "tf_keras==$installed.*"
if [ -z "$release" ]; then
  step "Horovod"
  "$venv/bin/python" scripts/build_horovod.py ${horovod_flags[@]+"${horovod_flags[@]}"}
fi
step "CPU kernels"
build_kernels
printf '%s\n' "$wanted" >"$stamp"
step "ready: $venv"
