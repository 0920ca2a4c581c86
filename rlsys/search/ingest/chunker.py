"""Text to chunks: where a text is cut, as a pure function of its words.

Invariants, for every text: read in order, the fresh parts of the chunks hold every word once; a chunk is
a slice of the text, so nothing is changed inside it; it starts and ends at a word and costs at most the
limit (a single word that costs more makes a chunk of its own).

A chunk ends at the best of these places that lies within the limit:

1. the last end of a paragraph in the second half of what fits,
2. the last end of a sentence in the second half,
3. the last end of a sentence at all, so that a sentence is cut only if it is longer than a chunk,
4. the last end of a line inside code,
5. the last word that fits.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}][、。，．！？；：」』）】》]*|[^\s{_CJK}]+")
"""Chinese and Japanese put no spaces between words: there each character counts as one."""
_CLOSERS = "\"'”’»)]}」』）】》*_"
_OPENERS = "\"'“‘«([{「『（【《*_¿¡"
_SENTENCE_END = tuple(".!?…。！？")
_ABBREVIATION = re.compile(
    r"(?:[A-Z]|\d{1,3}|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|No|Fig|cf|al|etc|[A-Za-z](?:\.[A-Za-z])+)\."
)
_LIST_MARK = re.compile(r"[-*+•]|\d{1,3}[.)]")


class Cut(IntEnum):
    """How good a place between two words is for a cut."""

    WORD = 0
    LINE = 1
    """The end of a line of code."""
    SENTENCE = 2
    PARAGRAPH = 3


@dataclass(frozen=True, slots=True)
class Word:
    """A run of characters that is never cut: `text[start:end]`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Words `first` to `end` - 1; those before `fresh` repeat the end of the chunk before."""

    first: int
    fresh: int
    end: int


def find_words(text: str) -> list[Word]:
    """The words of `text`, in order."""
    return [Word(*match.span()) for match in _WORD.finditer(text)]


def chunk_text(
    text: str,
    *,
    size: int,
    overlap: int = 0,
    code: Sequence[tuple[int, int]] = (),
    costs: Callable[[str, Sequence[Word]], Sequence[int]] | None = None,
) -> list[str]:
    """The chunks of `text`. See `cut` for `size` and `overlap`.

    `code` gives, in order, the character ranges that are kept whole where they fit. `costs` says what each
    word costs; without it a word costs 1. A text without a word has no chunks.
    """
    words = find_words(text)
    prices = [1] * len(words) if costs is None else costs(text, words)
    chunks = cut(prices, find_cuts(text, words, code), size=size, overlap=overlap)
    return [text[words[chunk.first].start : words[chunk.end - 1].end] for chunk in chunks]


def cut(costs: Sequence[int], cuts: Sequence[Cut], *, size: int, overlap: int) -> list[Chunk]:
    """Chunks that cost at most `size` and repeat words that cost at most `overlap` (less than `size`).

    `cuts[i]` says how good the place after word i is. What is repeated starts at the start of a sentence
    if one is in reach, and gives way to a sentence that would have to be cut otherwise.
    """
    spent = [0, *accumulate(costs)]
    count = len(costs)
    chunks: list[Chunk] = []
    fresh = 0
    while fresh < count:
        first = _repeat_from(spent, cuts, fresh, overlap, chunks[-1].first) if chunks and overlap else fresh
        end = _fitting(spent, first, size)
        if first < fresh and not _has_sentence_end(cuts, fresh, end):
            alone = _fitting(spent, fresh, size)
            starts_sentence = cuts[fresh - 1] >= Cut.SENTENCE
            if end <= fresh or (starts_sentence and _has_sentence_end(cuts, fresh, alone)):
                first, end = fresh, alone
        end = max(end, fresh + 1)
        if end < count:
            half = bisect_right(spent, spent[first] + size // 2)
            end = _best_end(cuts, max(fresh + 1, half), fresh + 1, end)
        chunks.append(Chunk(first, fresh, end))
        fresh = end
    return chunks


def _fitting(spent: Sequence[int], first: int, size: int) -> int:
    """The furthest end with which words from `first` on cost at most `size`."""
    return bisect_right(spent, spent[first] + size) - 1


def _has_sentence_end(cuts: Sequence[Cut], first: int, end: int) -> bool:
    return any(cuts[word] >= Cut.SENTENCE for word in range(first, end))


def _best_end(cuts: Sequence[Cut], half: int, least: int, most: int) -> int:
    """The best end from `least` to `most`; ends from `half` on are those in the second half."""
    for start, level in (
        (half, Cut.PARAGRAPH),
        (half, Cut.SENTENCE),
        (least, Cut.SENTENCE),
        (least, Cut.LINE),
    ):
        for end in range(most, start - 1, -1):
            if cuts[end - 1] >= level:
                return end
    return most


def _repeat_from(spent: Sequence[int], cuts: Sequence[Cut], fresh: int, overlap: int, before: int) -> int:
    """Where the repetition before word `fresh` starts: later than the chunk before, which starts at `before`."""
    earliest = fresh
    while earliest > before + 1 and spent[fresh] - spent[earliest - 1] <= overlap:
        earliest -= 1
    starts = (word for word in range(earliest, fresh) if cuts[word - 1] >= Cut.SENTENCE)
    return next(starts, earliest)


def find_cuts(text: str, words: Sequence[Word], code: Iterable[tuple[int, int]] = ()) -> list[Cut]:
    """How good the place after each word is; the place after the last word ends a paragraph."""
    cuts: list[Cut] = []
    ranges = iter(code)
    begin, stop = next(ranges, (len(text), len(text)))
    for word, following in pairwise(words):
        while stop <= word.start:
            begin, stop = next(ranges, (len(text) + 1, len(text) + 1))
        if begin <= word.start and following.start < stop:
            cuts.append(Cut.LINE if "\n" in text[word.end : following.start] else Cut.WORD)
        elif begin <= following.start and (word.start < begin or stop <= following.start):
            cuts.append(Cut.PARAGRAPH)
        else:
            gap = text[word.end : following.start]
            cuts.append(_prose_cut(text[word.start : word.end], gap, text[following.start : following.end]))
    return [*cuts, Cut.PARAGRAPH] if words else []


def _prose_cut(word: str, gap: str, following: str) -> Cut:
    if gap.count("\n") > 1:
        return Cut.PARAGRAPH
    if "\n" in gap and _LIST_MARK.fullmatch(following):
        return Cut.SENTENCE
    stem = word.rstrip(_CLOSERS)
    if not stem.endswith(_SENTENCE_END):
        return Cut.WORD
    if stem.endswith(tuple("。！？")):
        return Cut.SENTENCE
    goes_on = following.lstrip(_OPENERS)[:1].islower()
    if not gap or goes_on or _ABBREVIATION.fullmatch(stem.lstrip(_OPENERS)):
        return Cut.WORD
    return Cut.SENTENCE
