#!/usr/bin/env bash
# Evaluate a model; see the usage below.
# Also where it is started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

usage() {
    cat <<'END'
Evaluate a model on the seven sets of Search-R1, or on files of your own.

    bash run_main_searchr1_single_eval.sh [CONFIG] [KEY=VALUE ...] [FLAG ...]

    CONFIG       a config of the project, or the path of one's own yaml    searchr1_qwen2.5_3b_1node
    KEY=VALUE    settings that go before the config's
    FLAG         of `rlsys eval` (below): --model, --data, --baseline, ...

It works from any directory: relative paths on the command line are of the directory it is called from, those in the
config of the repository. What is missing is said at once: model, questions and search server.

Settings from the environment:

    PYTHON       interpreter that has rlsys                                python3

Examples:

    bash run_main_searchr1_single_eval.sh searchr1_tiny_cpu
    bash run_main_searchr1_single_eval.sh searchr1_qwen2.5_3b_1node --data all \
        --model outputs/RUN/checkpoints/global_step_100/actor search.url=http://127.0.0.1:8000

END
}

fail() {
    echo "$1" >&2
    exit 2
}

# The path $1 as it is named from here: what is not there by that name is left to the repository.
from_here() {
    if [[ $1 != /* && -e $1 ]]; then
        printf '%s\n' "$PWD/$1"
    else
        printf '%s\n' "$1"
    fi
}

# The same for a file alone: of a set, such as nq, only the name counts, whatever folder is called so.
file_from_here() {
    if [[ -f $1 ]]; then from_here "$1"; else printf '%s\n' "$1"; fi
}

helps=
for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then helps=yes; fi
done
if [[ -n $helps ]]; then usage; fi

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
: "${PYTHON:=python3}"
if [[ $PYTHON == */* ]]; then
    PYTHON=$(from_here "$PYTHON")
fi
(cd -- "$root" && "$PYTHON" -c 'import hydra, rich, typer, rlsys' 2>/dev/null) ||
    fail "PYTHON=$PYTHON lacks what rlsys needs: activate its environment, or set PYTHON to its interpreter"

if [[ -n $helps ]]; then
    cd -- "$root"
    exec "$PYTHON" -m rlsys.cli.main eval --help
fi

config=searchr1_qwen2.5_3b_1node
if [[ $# -gt 0 && $1 != -* && $1 != *=* ]]; then
    config=$1
    shift
fi
chosen=(--config-name "$config")
if [[ $config == *.yaml || $config == */* ]]; then
    [[ -f ${config%.yaml}.yaml ]] || fail "${config%.yaml}.yaml does not exist: give a config of the project, or the path of one"
    folder=$(cd -- "$(dirname -- "$config")" && pwd)
    name=$(basename -- "$config")
    chosen=(--config-name "${name%.yaml}" --config-dir "$folder")
fi

arguments=()
flag=
for word in "$@"; do
    case $flag in
        --out) [[ $word == /* ]] || word=$PWD/$word ;;
        --data) word=$(file_from_here "$word") ;;
        --data-dir | --model | --hf | --config-dir) word=$(from_here "$word") ;;
    esac
    # A setting that names a path, or a flag with its value behind an equals sign.
    case $word in
        --out=*) [[ ${word#*=} == /* ]] || word=--out=$PWD/${word#*=} ;;
        --data=*) word=--data=$(file_from_here "${word#*=}") ;;
        --data-dir=* | --model=* | --hf=* | --config-dir=* | *path=* | *.index=* | output_dir=*)
            word=${word%%=*}=$(from_here "${word#*=}")
            ;;
    esac
    # Names that follow --data are sets or files too.
    if [[ $word == -* ]]; then
        flag=$word
    elif [[ $flag != --data ]]; then
        flag=
    fi
    arguments+=("$word")
done

cd -- "$root"
exec "$PYTHON" -m rlsys.cli.main eval "${chosen[@]}" ${arguments[@]+"${arguments[@]}"}
