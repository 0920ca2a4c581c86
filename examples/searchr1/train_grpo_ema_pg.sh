#!/usr/bin/env bash
# Train as EMA-PG's script of this name does: GRPO with a moving reference on NQ and HotpotQA. See the usage below.
# Also where it is started by a plain sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/searchr1/published.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/published.sh"

settings=(ema_pg_published data/nq_hotpotqa_train nq_hotpotqa_train-search-r1-grpo-ema-pg-qwen2.5-3b-em)
if asks_for_help "$@"; then
    usage train_grpo_ema_pg.sh "Train as EMA-PG's script of this name does: GRPO with a moving reference on NQ and HotpotQA." "${settings[@]}"
    require_rlsys
    rlsys train --help
    exit
fi
train_published "${settings[@]}" "$@"
