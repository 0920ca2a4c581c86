# shellcheck shell=bash
# What the scripts beside it share; they read it, nobody runs it. It runs nothing by itself but finds the repository.

root=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../.." && pwd)
called_from=$PWD

fail() {
    printf '%s\n' "$1" >&2
    exit 2
}

# Whether one of the words asks for help.
asks_for_help() {
    local word
    for word in "$@"; do
        if [[ $word == -h || $word == --help ]]; then return 0; fi
    done
    return 1
}

# The path $1 as it is named from here: what is not there by that name is left to the repository.
from_here() {
    if [[ $1 != /* && -e $called_from/$1 ]]; then
        printf '%s\n' "$called_from/$1"
    else
        printf '%s\n' "$1"
    fi
}

# The path $1, which need not be there yet, as it is named from here.
new_from_here() {
    if [[ $1 == /* ]]; then printf '%s\n' "$1"; else printf '%s\n' "$called_from/$1"; fi
}

# The text $1 in quotes, as a value that both Hydra and YAML read as it stands. Quotes of both kinds together, and
# backslashes before a quote, are only Hydra's to read.
quoted() {
    if [[ $1 == *\'* && $1 != *[\"\\]* ]]; then
        printf '"%s"\n' "$1"
    else
        printf "'%s\n" "$(printf '%s' "$1'" | sed -E "s/(\\\\*)'/\\1\\1\\\\'/g; \$s/\\\\'\$/'/")"
    fi
}

# The setting KEY=VALUE $1, a path in it as it is named from here, and then in quotes, whatever its characters.
setting_from_here() {
    local key=${1%%=*} value=${1#*=} path
    path=$value
    case $key in
        # A list of one is the path in it.
        *paths) if [[ $path == \[*\] && $path != *,* ]]; then path=${path#[} path=${path%]}; fi ;;
    esac
    if [[ $path =~ ^\'[^\'\\]*\'$ || $path =~ ^\"[^\"\\]*\"$ ]]; then path=${path:1:-1}; fi
    case $key in
        output_dir | runner.output_dir) path=$(new_from_here "$path") ;;
        *path | *paths | *_dir | *.index | resume) path=$(from_here "$path") ;;
    esac
    if [[ $path == "$called_from"/* && $value != *"$path"* ]]; then value=$(quoted "$path"); fi
    printf '%s\n' "$key=$value"
}

# Sort the words that follow, paths in them as they are named from here, into `settings`, `folder` (the flag
# --config-dir) and `flags` (all others).
sort_words() {
    local word before=""
    settings=() folder=() flags=()
    for word in "$@"; do
        case $before in
            --config-dir) folder=(--config-dir "$(from_here "$word")") ;;
            --folder-to) flags+=(--folder-to "$(new_from_here "$word")") ;;
            --nodes | --rank | --head | --wait | --cluster) flags+=("$before" "$word") ;;
            *)
                case $word in
                    --config-dir | --folder-to | --nodes | --rank | --head | --wait | --cluster)
                        before=$word
                        continue
                        ;;
                    --config-dir=*) folder=("--config-dir=$(from_here "${word#*=}")") ;;
                    --folder-to=*) flags+=("--folder-to=$(new_from_here "${word#*=}")") ;;
                    -*) flags+=("$word") ;;
                    *=*) settings+=("$(setting_from_here "$word")") ;;
                    *) fail "\"$word\" is not a setting: write KEY=VALUE, such as trainer.steps=5" ;;
                esac
                ;;
        esac
        before=""
    done
    if [[ -n $before ]]; then fail "$before needs a value: give one"; fi
}

# Set PYTHON to an interpreter that has rlsys, go to the repository, or end.
require_rlsys() {
    : "${PYTHON:=python3}"
    if [[ $PYTHON == */* ]]; then PYTHON=$(from_here "$PYTHON"); fi
    cd -- "$root" || exit
    "$PYTHON" -c 'import hydra, rich, typer, rlsys' 2>/dev/null ||
        fail "PYTHON=$PYTHON lacks what rlsys needs: activate its environment, or set PYTHON to its interpreter"
}

# `rlsys` with the words that are given.
rlsys() {
    "$PYTHON" -m rlsys.apps.cli.main "$@"
}

# Of RLinf's config examples/searchr1/config/$2.yaml and the project's config $1 the first, once its paths are filled in.
default_config() {
    local file=$root/examples/searchr1/config/$2.yaml
    if [[ -f $file ]] && ! grep -v '^[[:space:]]*#' -- "$file" | grep -q '/path/to/'; then
        printf '%s\n' "$file"
    else
        printf '%s\n' "$1"
    fi
}

# What `rlsys --config-name` takes for $1: a config of the project, one of RLinf's by its name, or a path.
find_config() {
    local beside=$root/examples/searchr1/config/$1.yaml file=${1%.yaml}.yaml
    if [[ $1 == *.yaml || $1 == */* ]]; then
        [[ -f $(new_from_here "$file") ]] ||
            fail "$file does not exist: give a config of the project, or the path of one"
        new_from_here "$file"
    elif [[ ! -f $root/configs/$1.yaml && -f $beside ]]; then
        printf '%s\n' "$beside"
    else
        printf '%s\n' "$1"
    fi
}

# Train by config $1 with the words that follow, settings and flags of `rlsys train`, once `rlsys doctor` has no objection.
# --dry-run starts nothing, so that nothing need be there.
train() {
    local config=$1 word settings flags folder planned="" status=0
    shift
    sort_words "$@"
    for word in ${flags[@]+"${flags[@]}"}; do
        if [[ $word == --dry-run ]]; then planned=yes; fi
    done
    if [[ -z $planned ]]; then
        rlsys doctor --for "$config" ${folder[@]+"${folder[@]}"} ${settings[@]+"${settings[@]}"} || status=$?
        if [[ $status == 2 ]]; then fail "Nothing was started: fix the problems above, and run this again."; fi
        if [[ $status != 0 ]]; then exit "$status"; fi
    fi
    exec "$PYTHON" -m rlsys.apps.cli.main train --config-name "$config" ${folder[@]+"${folder[@]}"} \
        ${flags[@]+"${flags[@]}"} ${settings[@]+"${settings[@]}"}
}
