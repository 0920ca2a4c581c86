#!/bin/sh
# The size is in the model's config.json; the name is kept for those who are used to it.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec sh "$here/run_converter.sh" hf2mg.py "$@"
