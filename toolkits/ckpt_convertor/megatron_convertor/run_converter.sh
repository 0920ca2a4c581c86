#!/bin/sh
# What the scripts beside it share: run one of the converters with an interpreter that has rlsys.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
converter=$1
shift
: "${PYTHON:=python3}"
# Looked for, not loaded: that takes seconds.
"$PYTHON" -c 'import rich, typer, sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' \
    2>/dev/null || {
    echo "PYTHON=$PYTHON lacks what rlsys needs: activate its environment, or set PYTHON to its interpreter" >&2
    exit 2
}
exec "$PYTHON" "$here/$converter" "$@"
