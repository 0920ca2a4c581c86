#!/usr/bin/env bash
# Train like Search-R1's script of the same name: GRPO on Natural Questions. See the usage below.
# Re-exec with bash if started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/published.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/published.sh"

settings=(searchr1_published_grpo data/nq_search nq-search-r1-grpo-qwen2.5-3b-em)
if asks_for_help "$@"; then
    usage train_grpo.sh "Train like Search-R1's script of the same name: GRPO on Natural Questions." "${settings[@]}"
    require_rlsys
    rlsys train --help
    exit
fi
train_published "${settings[@]}" "$@"
