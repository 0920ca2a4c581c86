#!/bin/sh
# The size is in the model's config.json; the name is kept for those who are used to it.
set -eu
exec sh "$(dirname -- "$(readlink -f -- "$0")")/run_converter.sh" mg2hf.py "$@"
