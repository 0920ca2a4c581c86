#!/usr/bin/env bash
# Train on several machines; see the usage below.
# Also where it is started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'END'
Train on several machines: run this on every one of them, with the same words.

    bash run_main_searchr1_multi_node.sh [CONFIG] [KEY=VALUE ...] [FLAG ...]

    CONFIG       a config of the project or the path of one's own yaml     searchr1_qwen2.5_7b_2node
    KEY=VALUE    settings that go before the config's
    FLAG         of `rlsys launch` (below): --nodes, --rank, --head, --wait, ...; without them the environment says it

The machine of rank 0 starts Ray, waits for the others, starts the search servers of cluster.search.nodes, has `rlsys
doctor --for CONFIG` look at everything, trains, and ends everything everywhere. It works from any directory: relative
paths on the command line are of the directory it is called from, those in a config of the repository, which all machines
must have at the same place.

Settings from the environment:

    PYTHON                  interpreter that has rlsys                     python3
    RANK                    this machine's number, from 0; also NODE_RANK, GROUP_RANK, SLURM_NODEID
    MASTER_ADDR             address of the machine of rank 0
    NNODES                  how many machines; also WORLD_SIZE, SLURM_NNODES

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
