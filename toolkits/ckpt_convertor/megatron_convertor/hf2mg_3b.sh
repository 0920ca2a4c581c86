#!/bin/sh
# Another name for hf2mg.py. The size in the name has no effect: config.json gives the model's size.
set -eu
exec sh "$(dirname -- "$(readlink -f -- "$0")")/run_converter.sh" hf2mg.py "$@"
