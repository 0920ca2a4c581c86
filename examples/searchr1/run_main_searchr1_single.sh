#!/usr/bin/env bash
# Train on one machine; see the usage below.
# Also where it is started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'END'
Train on one machine, once nothing that the run needs is missing.

    bash run_main_searchr1_single.sh [CONFIG] [KEY=VALUE ...] [FLAG ...]

    CONFIG       a config of the project or the path of one's own yaml     searchr1_qwen2.5_3b_1node
    KEY=VALUE    settings that go before the config's
    FLAG         of `rlsys train` (below): --dry-run, --json, --no-wandb

Without CONFIG it is config/qwen2.5-3b-tool-1node.yaml beside this script, which has RLinf's keys, once its paths are
filled in. Settings of such a config may be in RLinf's keys or in those of rlsys.

It works from any directory: relative paths on the command line are of the directory it is called from, those in a
config of the repository. First `rlsys doctor --for CONFIG` looks at devices, memory, disk, ports, model, data, search
server and versions, says all that is wrong at once, each with what to do, and nothing is started until it is right.

Settings from the environment:

    PYTHON                  interpreter that has rlsys                     python3
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
