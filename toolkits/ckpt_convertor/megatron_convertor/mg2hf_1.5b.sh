#!/bin/sh
# Another name for mg2hf.py. The size in the name has no effect: config.json gives the model's size.
set -eu
exec sh "$(dirname -- "$(readlink -f -- "$0")")/run_converter.sh" mg2hf.py "$@"
