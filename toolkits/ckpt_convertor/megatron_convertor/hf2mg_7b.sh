#!/bin/sh
# Familiar name for hf2mg.py; the model size comes from config.json.
set -eu
exec sh "$(dirname -- "$(readlink -f -- "$0")")/run_converter.sh" hf2mg.py "$@"
