# shellcheck shell=bash
# What train_ppo.sh, train_grpo.sh and train_grpo_ema_pg.sh share; they read it, nobody runs it.

# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

# The usage of a script: its name $1, what it does $2, its config $3, its data $4, its name of a run $5.
usage() {
    cat <<END
$2

    bash $1 [KEY=VALUE ...] [FLAG ...]

    KEY=VALUE    settings of rlsys, which override all others, such as search.url=http://127.0.0.1:8000
    FLAG         of \`rlsys train\` (below): --dry-run, --json, --no-wandb

The script takes its settings from the config $3, and from these variables of the
environment, which have the names of the published script:

    DATA_DIR                folder of train.parquet and test.parquet       $4
    TRAIN_DATA_DIR          folder of train.parquet                        \$DATA_DIR
    TEST_DATA_DIR           folder of test.parquet                         \$DATA_DIR
    BASE_MODEL              folder of the model                            Qwen2.5-3B
    EXPERIMENT_NAME         name of the run                                $5
    WAND_PROJECT            project of Weights & Biases                    Search-R1
    CUDA_VISIBLE_DEVICES    GPUs to use                                    all
    PYTHON                  interpreter that has rlsys                     python3

Relative paths are resolved from the current directory, or from the repository if they do not exist there.
compat=search_r1 adds what the published code does besides its settings. First the script runs \`rlsys doctor --for\`,
which lists all problems with their fixes. Training starts only if there are none.

END
}

# Train as a published script does: its config $1, its data $2, its name of a run $3, then the words of the command line.
train_published() {
    local config=$1 name=$3 data=${DATA_DIR:-$2}
    shift 3
    require_rlsys
    train "$config" \
        "task.train_path=$(quoted "$(from_here "${TRAIN_DATA_DIR:-$data}/train.parquet")")" \
        "task.eval_path=$(quoted "$(from_here "${TEST_DATA_DIR:-$data}/test.parquet")")" \
        "model.path=$(quoted "$(from_here "${BASE_MODEL:-Qwen2.5-3B}")")" \
        "name=$(quoted "${EXPERIMENT_NAME:-$name}")" \
        "tracking.project=$(quoted "${WAND_PROJECT:-Search-R1}")" \
        "$@"
}
