#!/bin/sh
# Build the search index of a corpus; see the usage below.
set -eu

usage() {
    cat <<'END'
Build the search index of a corpus.

    sh build_index.sh [FLAG ...]

Settings from the environment, with their defaults; flags (below) take precedence:

    DATA_DIR         folder of corpus and index            data/wiki18 of the repository
    CORPUS_PATH      jsonl of passages                     $DATA_DIR/wiki-18.jsonl
    SAVE_DIR         folder for the index                  $DATA_DIR/$RETRIEVER_NAME-$FAISS_TYPE; $DATA_DIR/bm25
    RETRIEVER_NAME   e5, bge, ..., or bm25                 e5
    RETRIEVER_MODEL  encoder                               intfloat/e5-base-v2
    FAISS_TYPE       Flat, HNSW64, ...                     Flat
    MAX_LENGTH       maximum tokens of a passage           256
    DEVICE           cpu, cuda (with --workers), cuda:N    cpu
    PYTHON           interpreter with rlsys installed      python3

END
}

require_packages() {
    "$PYTHON" -c 'import faiss, rich' 2>/dev/null && return
    echo "PYTHON=$PYTHON lacks what rlsys needs: activate its environment, or set PYTHON to its interpreter" >&2
    exit 2
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
: "${PYTHON:=python3}"
for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            require_packages
            exec "$PYTHON" "$here/index_builder.py" --help
            ;;
    esac
done
require_packages

: "${DATA_DIR:=$here/../../data/wiki18}"
: "${CORPUS_PATH:=$DATA_DIR/wiki-18.jsonl}"
: "${RETRIEVER_NAME:=e5}"
: "${RETRIEVER_MODEL:=intfloat/e5-base-v2}"
: "${FAISS_TYPE:=Flat}"
: "${MAX_LENGTH:=256}"
: "${DEVICE:=cpu}"
# Flags take precedence in the folder's name too.
flag=
for word in "$@"; do
    case $word in
        --*=*) flag=${word%%=*} word=${word#*=} ;;
    esac
    case $flag in
        --retrieval_method) RETRIEVER_NAME=$word ;;
        --faiss_type) FAISS_TYPE=$word ;;
    esac
    flag=$word
done
if [ "$RETRIEVER_NAME" = bm25 ]; then
    : "${SAVE_DIR:=$DATA_DIR/bm25}"
else
    : "${SAVE_DIR:=$DATA_DIR/$RETRIEVER_NAME-$FAISS_TYPE}"
fi

exec "$PYTHON" "$here/index_builder.py" \
    --retrieval_method "$RETRIEVER_NAME" \
    --model_path "$RETRIEVER_MODEL" \
    --corpus_path "$CORPUS_PATH" \
    --save_dir "$SAVE_DIR" \
    --faiss_type "$FAISS_TYPE" \
    --max_length "$MAX_LENGTH" \
    --device "$DEVICE" \
    --save_embedding \
    "$@"
