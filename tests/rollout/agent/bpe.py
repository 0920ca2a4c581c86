"""The tokenizers of `tests.support.bpe`, for other rooms until they import them from there."""

from tests.support.bpe import EOS as EOS
from tests.support.bpe import build_tokenizer as build_tokenizer
