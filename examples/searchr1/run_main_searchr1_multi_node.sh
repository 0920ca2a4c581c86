#!/usr/bin/env bash
# Train on several machines; see the usage below.
# Re-exec with bash if started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'END'
Train on several machines: run this script on each of them, with the same arguments except --rank.

    bash run_main_searchr1_multi_node.sh [CONFIG] [KEY=VALUE ...] [FLAG ...]

    CONFIG       name of a project config, or path of a yaml file          searchr1_qwen2.5_7b_2node
    KEY=VALUE    settings, which override the config's
    FLAG         flags of `rlsys launch` (below): --nodes, --rank, --head, --wait, ...; override the environment

The machine of rank 0 starts Ray, waits for the others, runs `rlsys doctor --for CONFIG` on every machine, starts the
search servers of cluster.search.nodes, trains, and stops all processes on all machines at the end. The script works from
any directory: relative paths on the command line start at the current directory, those in a config at the repository,
which must be at the same path on all machines.

Settings from the environment:

    PYTHON                  interpreter with rlsys installed               python3
    RANK                    rank of this machine, from 0; also NODE_RANK, GROUP_RANK, SLURM_NODEID
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
