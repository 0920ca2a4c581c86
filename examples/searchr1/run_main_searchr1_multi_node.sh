#!/usr/bin/env bash
# Train on several machines; see the usage below.
# Also where it is started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'END'
Train on several machines: run the same command on each of them.

    bash run_main_searchr1_multi_node.sh [CONFIG] [KEY=VALUE ...] [FLAG ...]

    CONFIG       name of a project config, or path of a yaml file          searchr1_qwen2.5_7b_2node
    KEY=VALUE    settings, which override the config's
    FLAG         of `rlsys launch` (below): --nodes, --rank, --head, --wait, ...; by default from the environment

The machine of rank 0 starts Ray, waits for the others, starts the search servers of cluster.search.nodes, checks all
machines with `rlsys doctor --for CONFIG`, trains, and at the end stops everything on all machines. The script works
from any directory. Relative paths on the command line are resolved from the current directory, those in a config from
the repository, which must be at the same path on all machines.

Settings from the environment:

    PYTHON                  interpreter that has rlsys                     python3
    RANK                    this machine's number, from 0; also NODE_RANK, GROUP_RANK, SLURM_NODEID
    MASTER_ADDR             address of the machine of rank 0
    NNODES                  number of machines; also WORLD_SIZE, SLURM_NNODES

Example, on the second of two machines:

    bash run_main_searchr1_multi_node.sh searchr1_qwen2.5_7b_2node --nodes 2 --rank 1 --head 10.0.0.1

END
}

if asks_for_help "$@"; then
    usage
    require_rlsys
    rlsys launch --help
    exit
fi
config=searchr1_qwen2.5_7b_2node
if [[ $# -gt 0 && $1 != -* && $1 != *=* ]]; then
    config=$(find_config "$1")
    shift
fi
sort_words "$@"
require_rlsys
exec "$PYTHON" -m rlsys.apps.cli.main launch ${flags[@]+"${flags[@]}"} --config-name "$config" \
    ${folder[@]+"${folder[@]}"} ${settings[@]+"${settings[@]}"}
