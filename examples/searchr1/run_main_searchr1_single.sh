#!/usr/bin/env bash
# Train on one machine; see the usage below.
# Re-exec with bash if started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'END'
Train on one machine.

    bash run_main_searchr1_single.sh [CONFIG] [KEY=VALUE ...] [FLAG ...]

    CONFIG       name of a project config, or path of a yaml file          searchr1_qwen2.5_3b_1node
    KEY=VALUE    settings, which override the config's
    FLAG         a flag of `rlsys train` (below): --dry-run, --json, --no-wandb

The default becomes config/qwen2.5-3b-tool-1node.yaml beside this script once the paths in that file are filled in. It
has RLinf's keys; settings of such a config may use RLinf's keys or those of rlsys.

The script works from any directory: relative paths on the command line start at the current directory, those in a
config at the repository. It first runs `rlsys doctor --for CONFIG`, which checks devices, memory, disk, ports, model,
data, search server and versions, lists every problem with its fix, and starts nothing until all are fixed.

Settings from the environment:

    PYTHON                  interpreter with rlsys installed               python3
    CUDA_VISIBLE_DEVICES    GPUs to use                                    all

Examples:

    bash run_main_searchr1_single.sh searchr1_qwen2.5_3b_1node model.path=/models/Qwen2.5-3B-Instruct \
        task.train_path=train.parquet task.eval_path=test.parquet search.url=http://127.0.0.1:8000
    bash run_main_searchr1_single.sh searchr1_tiny_cpu trainer.steps=2

END
}

if asks_for_help "$@"; then
    usage
    require_rlsys
    rlsys train --help
    exit
fi
config=
if [[ $# -gt 0 && $1 != -* && $1 != *=* ]]; then
    config=$(find_config "$1")
    shift
fi
require_rlsys
: "${config:=$(default_config searchr1_qwen2.5_3b_1node qwen2.5-3b-tool-1node)}"
printf 'The config is %s.\n' "$config" >&2
train "$config" "$@"
