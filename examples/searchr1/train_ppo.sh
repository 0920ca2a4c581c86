#!/usr/bin/env bash
# Train like Search-R1's script of the same name: PPO on Natural Questions. See the usage below.
# Re-exec with bash if started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/published.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/published.sh"

settings=(searchr1_published_ppo data/nq_search nq-search-r1-ppo-qwen2.5-3b-em)
if asks_for_help "$@"; then
    usage train_ppo.sh "Train like Search-R1's script of the same name: PPO on Natural Questions." "${settings[@]}"
    require_rlsys
    rlsys train --help
    exit
fi
train_published "${settings[@]}" "$@"
