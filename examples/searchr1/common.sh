# shellcheck shell=bash
# Functions that the scripts of this folder source. Sourcing this file only sets `root` and `called_from`.

root=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../.." && pwd)
called_from=$PWD

fail() {
    printf '%s\n' "$1" >&2
    exit 2
}

# Succeed if one of the arguments is -h or --help.
asks_for_help() {
    local word
    for word in "$@"; do
        if [[ $word == -h || $word == --help ]]; then return 0; fi
    done
    return 1
}

# Print path $1: absolute if it exists relative to the caller's directory, else unchanged, relative to the repository.
from_here() {
    if [[ $1 != /* && -e $called_from/$1 ]]; then
        printf '%s\n' "$called_from/$1"
    else
        printf '%s\n' "$1"
    fi
}

# Print path $1, which need not exist, as an absolute path relative to the caller's directory.
new_from_here() {
    if [[ $1 == /* ]]; then printf '%s\n' "$1"; else printf '%s\n' "$called_from/$1"; fi
}

# Print text $1 in quotes that both Hydra and YAML accept. Only Hydra can read both kinds of quotes together, and
# backslashes before a quote.
quoted() {
    if [[ $1 == *\'* && $1 != *[\"\\]* ]]; then
        printf '"%s"\n' "$1"
    else
        printf "'%s\n" "$(printf '%s' "$1'" | sed -E "s/(\\\\*)'/\\1\\1\\\\'/g; \$s/\\\\'\$/'/")"
    fi
}

# Print setting KEY=VALUE $1, with a path in it resolved from the caller's directory and quoted.
setting_from_here() {
    local key=${1%%=*} value=${1#*=} path
    path=$value
    case $key in
        # A list of one path counts as the path.
        *paths) if [[ $path == \[*\] && $path != *,* ]]; then path=${path#[} path=${path%]}; fi ;;
    esac
    if [[ $path =~ ^\'[^\'\\]*\'$ || $path =~ ^\"[^\"\\]*\"$ ]]; then path=${path:1:-1}; fi
    case $key in
        output_dir | runner.output_dir) path=$(new_from_here "$path") ;;
        *path | *paths | *_dir | *.index | *.pages | *.teacher.model | resume) path=$(from_here "$path") ;;
        *.family) if [[ $path == *.y*ml ]]; then path=$(from_here "$path"); fi ;;  # Others are names of families.
    esac
    if [[ $path == "$called_from"/* && $value != *"$path"* ]]; then value=$(quoted "$path"); fi
    printf '%s\n' "$key=$value"
}

# Sort the arguments into `settings`, `folder` (the flag --config-dir) and `flags` (all other flags); resolve paths from
# the caller's directory.
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

# Set PYTHON to an interpreter with rlsys and change to the repository; exit if there is none.
require_rlsys() {
    : "${PYTHON:=python3}"
    if [[ $PYTHON == */* ]]; then PYTHON=$(from_here "$PYTHON"); fi
    cd -- "$root" || exit
    "$PYTHON" -c 'import hydra, rich, typer, rlsys' 2>/dev/null ||
        fail "PYTHON=$PYTHON lacks what rlsys needs: activate its environment, or set PYTHON to its interpreter"
}

# Run `rlsys` with the arguments.
rlsys() {
    "$PYTHON" -m rlsys.apps.cli.main "$@"
}

# Print RLinf's config examples/searchr1/config/$2.yaml if its paths are filled in, else the project's config $1.
default_config() {
    local file=$root/examples/searchr1/config/$2.yaml
    if [[ -f $file ]] && ! grep -v '^[[:space:]]*#' -- "$file" | grep -q '/path/to/'; then
        printf '%s\n' "$file"
    else
        printf '%s\n' "$1"
    fi
}

# Print the value of --config-name for $1: a config of the project, an RLinf config by name, or a path.
find_config() {
    local beside=$root/examples/searchr1/config/$1.yaml file=${1%.yaml}.yaml
    if [[ $1 == *.yaml || $1 == */* ]]; then
        [[ -f $(new_from_here "$file") ]] ||
            fail "$file does not exist: give the name of a project config, or a path"
        new_from_here "$file"
    elif [[ ! -f $root/configs/$1.yaml && -f $beside ]]; then
        printf '%s\n' "$beside"
    else
        printf '%s\n' "$1"
    fi
}

# Train with config $1 and the settings and flags that follow, if `rlsys doctor` finds no problem. --dry-run skips the
# check, because it starts nothing.
train() {
    local config=$1 word settings flags folder planned="" status=0
    shift
    sort_words "$@"
    for word in ${flags[@]+"${flags[@]}"}; do
        if [[ $word == --dry-run ]]; then planned=yes; fi
    done
    if [[ -z $planned ]]; then
        rlsys doctor --for "$config" ${folder[@]+"${folder[@]}"} ${settings[@]+"${settings[@]}"} || status=$?
        if [[ $status == 2 ]]; then fail "Nothing was started: fix the problems above and run this again."; fi
        if [[ $status != 0 ]]; then exit "$status"; fi
    fi
    exec "$PYTHON" -m rlsys.apps.cli.main train --config-name "$config" ${folder[@]+"${folder[@]}"} \
        ${flags[@]+"${flags[@]}"} ${settings[@]+"${settings[@]}"}
}
