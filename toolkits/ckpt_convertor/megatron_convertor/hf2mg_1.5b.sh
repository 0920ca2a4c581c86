#!/bin/sh
# The size is in the model's config.json; the name is kept for those who are used to it.
set -eu
script=$0
while [ -L "$script" ]; do
    target=$(readlink -- "$script")
    case $target in
        /*) script=$target ;;
        *) script=$(dirname -- "$script")/$target ;;
    esac
done
here=$(CDPATH='' cd -- "$(dirname -- "$script")" && pwd)
exec sh "$here/run_converter.sh" hf2mg.py "$@"
