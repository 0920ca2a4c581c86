#!/usr/bin/env bash
# Train like EMA-PG's script of the same name: GRPO with a moving reference on NQ and HotpotQA. See the usage below.
# Re-exec with bash if started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/published.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/published.sh"

settings=(ema_pg_published data/nq_hotpotqa_train nq_hotpotqa_train-search-r1-grpo-ema-pg-qwen2.5-3b-em)
if asks_for_help "$@"; then
    usage train_grpo_ema_pg.sh "Train like EMA-PG's script of the same name: GRPO with a moving reference on NQ and HotpotQA." "${settings[@]}"
    require_rlsys
    rlsys train --help
    exit
fi
train_published "${settings[@]}" "$@"
