#!/bin/sh
# Serve a search index over HTTP; see the usage below.
set -eu

usage() {
    cat <<'END'
Serve a search index over HTTP.

    sh launch_local_server.sh [FLAG ...]

Settings from the environment, with their defaults; flags (below) take precedence:

    INDEX_PATH       FAISS file, or folder from build_index.sh
    CORPUS_PATH      jsonl of passages, for a FAISS file
    DATA_DIR         without INDEX_PATH: folder of e5_Flat.index and wiki-18.jsonl, which are
                     then served                           data/wiki18 of the repository
    PAGES_PATH       jsonl of pages, for /access
    RETRIEVER_NAME   family of the encoder: e5, bge, ...
    RETRIEVER_MODEL  encoder
    RERANKER_MODEL   cross-encoder, for /rerank
    TOPK             passages per query                    3
    DEVICE           cpu, cuda, cuda:N                     cpu
    HOST             address to listen on                  127.0.0.1
    PORT             port to listen on                     8000
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
index_given=${INDEX_PATH:+yes}
for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            require_packages
            exec "$PYTHON" "$here/local_retrieval_server.py" --help
            ;;
        --index_path | --index_path=*) index_given=yes ;;
    esac
done
require_packages

if [ -z "$index_given" ]; then
    : "${DATA_DIR:=$here/../../data/wiki18}"
    INDEX_PATH=$DATA_DIR/e5_Flat.index
    : "${CORPUS_PATH:=$DATA_DIR/wiki-18.jsonl}"
fi

exec "$PYTHON" "$here/local_retrieval_server.py" \
    ${INDEX_PATH:+--index_path "$INDEX_PATH"} \
    ${CORPUS_PATH:+--corpus_path "$CORPUS_PATH"} \
    ${PAGES_PATH:+--pages_path "$PAGES_PATH"} \
    ${RETRIEVER_NAME:+--retriever_name "$RETRIEVER_NAME"} \
    ${RETRIEVER_MODEL:+--retriever_model "$RETRIEVER_MODEL"} \
    ${RERANKER_MODEL:+--reranker_model "$RERANKER_MODEL"} \
    --topk "${TOPK:-3}" \
    --device "${DEVICE:-cpu}" \
    --host "${HOST:-127.0.0.1}" \
    --port "${PORT:-8000}" \
    "$@"
