"""The seven public sets of questions that search policies are compared on, as FlashRAG publishes them."""

from __future__ import annotations

from dataclasses import dataclass

REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
"""On the Hugging Face Hub; a set's split is `<name>/<split>.jsonl`."""
SPLITS = ("test", "dev", "train")
"""In the order in which papers evaluate: the first that a set has."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """One of them."""

    name: str
    splits: tuple[str, ...]
    """That are published."""
    hops: str
    """What answering takes: one search or several."""

    @property
    def evaluated(self) -> str:
        """The split that papers report."""
        return next(split for split in SPLITS if split in self.splits)


SETS = {
    one.name: one
    for one in (
        QuestionSet("nq", ("train", "dev", "test"), "one"),
        QuestionSet("triviaqa", ("train", "dev", "test"), "one"),
        QuestionSet("popqa", ("test",), "one"),
        QuestionSet("hotpotqa", ("train", "dev"), "several"),
        QuestionSet("2wikimultihopqa", ("train", "dev"), "several"),
        QuestionSet("musique", ("train", "dev"), "several"),
        QuestionSet("bamboogle", ("test",), "several"),
    )
}
"""In the order of the papers' tables."""
