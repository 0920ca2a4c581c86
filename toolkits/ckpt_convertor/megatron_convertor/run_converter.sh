#!/bin/sh
# Runs a converter of this folder with a Python interpreter that can import rlsys: run_converter.sh SCRIPT [ARGUMENT...]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
converter=$1
shift
: "${PYTHON:=python3}"
# Only locate torch: importing it takes seconds.
"$PYTHON" -c 'import rich, typer, sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' \
    2>/dev/null || {
    echo "PYTHON=$PYTHON lacks what rlsys needs: activate its environment, or set PYTHON to its interpreter" >&2
    exit 2
}
exec "$PYTHON" "$here/$converter" "$@"
