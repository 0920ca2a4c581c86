#!/bin/sh
# Familiar name for mg2hf.py; the model size comes from config.json.
set -eu
exec sh "$(dirname -- "$(readlink -f -- "$0")")/run_converter.sh" mg2hf.py "$@"
