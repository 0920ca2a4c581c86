# shellcheck shell=bash
# Functions that train_ppo.sh, train_grpo.sh and train_grpo_ema_pg.sh source.

# shellcheck source=examples/searchr1/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

# Print the usage of a script: name $1, description $2, config $3, data folder $4, name of the run $5.
usage() {
    cat <<END
$2

    bash $1 [KEY=VALUE ...] [FLAG ...]

    KEY=VALUE    settings of rlsys, which override all others, such as search.url=http://127.0.0.1:8000
    FLAG         a flag of \`rlsys train\` (below): --dry-run, --json, --no-wandb

The config is $3. Settings from the environment, with the names of the published
script and their defaults:

    DATA_DIR                folder of train.parquet and test.parquet       $4
    TRAIN_DATA_DIR          folder of train.parquet                        \$DATA_DIR
    TEST_DATA_DIR           folder of test.parquet                         \$DATA_DIR
    BASE_MODEL              folder of the model                            Qwen2.5-3B
    EXPERIMENT_NAME         name of the run                                $5
    WAND_PROJECT            project of Weights & Biases                    Search-R1
    CUDA_VISIBLE_DEVICES    GPUs to use                                    all
    PYTHON                  interpreter with rlsys installed               python3

Relative paths start at the current directory, or at the repository if they do not exist there. Add compat=search_r1
to reproduce behaviour of the published code that no setting covers. The script first runs \`rlsys doctor --for\`, which lists every
problem, and starts nothing until all are fixed.

END
}

# Train like a published script: config $1, data folder $2, name of the run $3, then the command line's arguments.
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
