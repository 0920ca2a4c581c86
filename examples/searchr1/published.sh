# shellcheck shell=bash
# What train_ppo.sh, train_grpo.sh and train_grpo_ema_pg.sh share; they read it, nobody runs it.

# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

# The usage of a script: its name $1, what it does $2, its config $3, its data $4, its name of a run $5.
usage() {
    cat <<END
$2

    bash $1 [KEY=VALUE ...] [FLAG ...]

    KEY=VALUE    settings of rlsys that go before all others, such as search.url=http://127.0.0.1:8000
    FLAG         of \`rlsys train\` (below): --dry-run, --json, --no-wandb

Its settings are those of the config $3. From the environment, under the names of the
published script:

    DATA_DIR                folder of train.parquet and test.parquet       $4
    TRAIN_DATA_DIR          folder of train.parquet                        \$DATA_DIR
    TEST_DATA_DIR           folder of test.parquet                         \$DATA_DIR
    BASE_MODEL              folder of the model                            Qwen2.5-3B
    EXPERIMENT_NAME         name of the run                                $5
    WAND_PROJECT            project of Weights & Biases                    Search-R1
    CUDA_VISIBLE_DEVICES    GPUs to use                                    all
    PYTHON                  interpreter that has rlsys                     python3

Relative paths are of the directory it is called from; what is not there, of the repository. What the published code does
besides its settings is added by compat=search_r1. First \`rlsys doctor --for\` looks at everything, and nothing is started
until it is right.

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
