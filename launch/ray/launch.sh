#!/usr/bin/env bash
# Run rlsys on several machines; see the usage below.
# Re-exec with bash if started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

usage() {
    cat <<'END'
Run rlsys on several machines: run this script on every one of them, with the same arguments.

    bash launch.sh --config-name CONFIG [--nodes N] [--rank R] [--head HOST[:PORT]] [--wait S] [KEY=VALUE ...]

The machine of rank 0 runs Ray's head and the driver; the others join it and leave with it. The script works from any
directory. Relative paths start at the repository, which must be at the same path on all machines.

Settings from the environment; flags take precedence:

    PYTHON                         interpreter with rlsys installed                                      python3
    NODE_RANK, GROUP_RANK, RANK    rank of this machine, from 0
    NNODES, WORLD_SIZE             number of machines; default: cluster.nodes of the config
    MASTER_ADDR, MASTER_PORT       address of the machine of rank 0, and Ray's port there

Example, on the second of two machines:

    NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash launch.sh --config-name searchr1_qwen2.5_7b_2node

END
}

for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then
        usage
        exit
    fi
done
if [[ $# == 0 ]]; then
    usage >&2
    exit 2
fi
: "${PYTHON:=python3}"
if [[ $PYTHON == */* && $PYTHON != /* ]]; then PYTHON=$PWD/$PYTHON; fi
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../.."
if ! "$PYTHON" -c 'import hydra, ray, typer, rlsys' 2>/dev/null; then
    printf '%s\n' "PYTHON=$PYTHON lacks what rlsys needs: activate its environment, or set PYTHON to its interpreter" >&2
    exit 2
fi
exec "$PYTHON" -m rlsys.apps.cli.main launch "$@"
