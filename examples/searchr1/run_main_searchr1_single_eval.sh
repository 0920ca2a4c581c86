#!/usr/bin/env bash
# Evaluate a model; see the usage below.
# Re-exec with bash if started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'END'
Evaluate a model on the seven sets of Search-R1, or on your own files.

    bash run_main_searchr1_single_eval.sh [CONFIG] [KEY=VALUE ...] [FLAG ...]

    CONFIG       name of a project config, or path of a yaml file          searchr1_qwen2.5_3b_1node
    KEY=VALUE    settings, which override the config's
    FLAG         a flag of `rlsys eval` (below): --model, --data, --baseline, ...

The default becomes config/qwen2.5-3b-tool-1node-eval.yaml beside this script once the paths in that file are filled in.
It has RLinf's keys; settings of such a config may use RLinf's keys or those of rlsys.

The script works from any directory: relative paths on the command line start at the current directory, those in a
config at the repository. A missing model, question file or search server is reported before anything starts.

Settings from the environment:

    PYTHON       interpreter with rlsys installed                          python3

Examples:

    bash run_main_searchr1_single_eval.sh searchr1_tiny_cpu
    bash run_main_searchr1_single_eval.sh searchr1_qwen2.5_3b_1node --data all \
        --model outputs/RUN/checkpoints/global_step_100 search.url=http://127.0.0.1:8000

END
}

# Resolve a file only: the name of a set, such as nq, stays a name even if a folder has the same name.
file_from_here() {
    if [[ -f $called_from/$1 ]]; then from_here "$1"; else printf '%s\n' "$1"; fi
}

if asks_for_help "$@"; then
    usage
    require_rlsys
    rlsys eval --help
    exit
fi
config=
if [[ $# -gt 0 && $1 != -* && $1 != *=* ]]; then
    config=$(find_config "$1")
    shift
fi

arguments=()
flag=
for word in "$@"; do
    case $flag in
        --out) word=$(new_from_here "$word") ;;
        --data) word=$(file_from_here "$word") ;;
        --data-dir | --model | --hf | --config-dir) word=$(from_here "$word") ;;
    esac
    # A flag with its value after an equals sign, or a setting.
    case $word in
        --out=*) word=--out=$(new_from_here "${word#*=}") ;;
        --data=*) word=--data=$(file_from_here "${word#*=}") ;;
        --data-dir=* | --model=* | --hf=* | --config-dir=*) word=${word%%=*}=$(from_here "${word#*=}") ;;
        [!-]*=*) word=$(setting_from_here "$word") ;;
    esac
    # All words after --data up to the next flag are sets or files.
    if [[ $word == -* ]]; then
        flag=$word
    elif [[ $flag != --data ]]; then
        flag=
    fi
    arguments+=("$word")
done

require_rlsys
: "${config:=$(default_config searchr1_qwen2.5_3b_1node qwen2.5-3b-tool-1node-eval)}"
exec "$PYTHON" -m rlsys.apps.cli.main eval --config-name "$config" ${arguments[@]+"${arguments[@]}"}
