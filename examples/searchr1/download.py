"""Download Search-R1's and ASearcher's corpora and indexes from the Hugging Face Hub.

    python examples/searchr1/download.py --save_path data/wiki18 --what wiki18-corpus wiki18-e5-hnsw64

You can interrupt it at any time; the next start continues. Every file is compared with the Hub's checksum, index parts
are joined and the corpus is unpacked, so that the files can be served. HF_TOKEN and HF_ENDPOINT (a mirror) are
respected.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.searchr1.unpack import unpack
from rlsys.apps.cli.main import run_command
from rlsys.apps.data.download import Downloader, Hub, Target, require_space

_PACKED = ".gz"
_UNPACKED_RATIO = 3
"""Unpacked size over packed size, rounded up from 2.8 (wiki-18: 5.1 GB to 14.4 GB)."""


@dataclass(frozen=True, slots=True)
class Item:
    """A value of `--what`."""

    dataset: str
    files: tuple[str, ...]
    """Names or globs in the data set."""
    joined: str = ""
    """File into which the parts are joined, in order; "" keeps the parts separate."""
    about: str = ""


ITEMS = {
    "wiki18-corpus": Item(
        "PeterJinGo/wiki-18-corpus", ("wiki-18.jsonl.gz",), about="21 million passages, for --corpus_path"
    ),
    "wiki18-e5-flat": Item(
        "PeterJinGo/wiki-18-e5-index",
        ("part_*",),
        "e5_Flat.index",
        "exact e5-base-v2 index, for --index_path",
    ),
    "wiki18-e5-hnsw64": Item(
        "PeterJinGo/wiki-18-e5-index-HNSW64", ("part_*",), "e5_HNSW64.index", "fast e5-base-v2 index on CPUs"
    ),
    "wiki18-bm25": Item(
        "PeterJinGo/wiki-18-bm25-index",
        ("bm25/*",),
        about="Lucene index, for Search-R1's own server (rlsys builds its own: rlsys search index --kind bm25)",
    ),
    "asearcher-corpus": Item(
        "inclusionAI/ASearcher-Local-Knowledge",
        ("wiki_corpus.jsonl", "wiki_webpages.jsonl"),
        about="passages with urls, for --corpus_path, and pages, for --pages_path",
    ),
}
DEFAULT = ("wiki18-corpus", "wiki18-e5-flat")


def targets(item: Item, hub: Hub, revision: str) -> list[Target]:
    """Return the files of `item`, as the Hub describes them now."""
    pieces = hub.find(item.dataset, item.files, revision)
    return [Target(item.joined, pieces)] if item.joined else [Target(piece.name, [piece]) for piece in pieces]


def final_path(folder: Path, target: Target) -> Path:
    """Return the path of `target` after the download; packed files are unpacked and deleted."""
    return folder / target.name.removesuffix(_PACKED)


def is_done(folder: Path, target: Target) -> bool:
    """True if a packed file is already unpacked; other targets are checked by their checksums instead."""
    return target.name.endswith(_PACKED) and final_path(folder, target).is_file()


def space_needed(folder: Path, downloader: Downloader, target: Target) -> int:
    """Return the bytes of free disk that `target` needs."""
    if is_done(folder, target):
        return 0
    unpacked = target.size * _UNPACKED_RATIO if target.name.endswith(_PACKED) else 0
    return downloader.missing(target) + unpacked


def plan(folder: Path, downloader: Downloader, wanted: list[Target]) -> Table:
    """Return a table of the files to download and unpack."""
    table = Table("file", "from", "size", "to download", "then")
    for target in wanted:
        done = is_done(folder, target)
        table.add_row(
            str(final_path(folder, target)),
            ", ".join(piece.name for piece in target.pieces),
            f"{target.size / 1e9:,.3f} GB",
            "nothing" if done else f"{downloader.missing(target) / 1e9:,.3f} GB",
            "unpack" if target.name.endswith(_PACKED) and not done else "",
        )
    return table


def obtain(folder: Path, downloader: Downloader, target: Target, progress: Progress) -> Path:
    """Download, check and unpack one target."""
    path = final_path(folder, target)
    if is_done(folder, target):
        return path
    task = progress.add_task(target.name, total=target.size)
    archive = downloader.fetch(target, lambda count: progress.advance(task, count))
    if archive != path:
        task = progress.add_task(f"unpack {target.name}", total=archive.stat().st_size)
        unpack(archive, path, lambda count: progress.advance(task, count))
        archive.unlink()
    return path


def download(folder: Path, names: list[str], revision: str, dry_run: bool, console: Console) -> None:
    """Download the items called `names` to `folder`; `dry_run` only prints the table."""
    hub = Hub()
    downloader = Downloader(folder, hub)
    wanted = [target for name in dict.fromkeys(names) for target in targets(ITEMS[name], hub, revision)]
    console.print(plan(folder, downloader, wanted))
    if dry_run:
        return
    require_space(folder, sum(space_needed(folder, downloader, target) for target in wanted))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        paths = [obtain(folder, downloader, target, progress) for target in wanted]
    for path in paths:
        console.print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True, highlight=False)


def main() -> None:
    """Parse the command line and download."""
    listing = "\n".join(f"  {name:17} {item.dataset}: {item.about}" for name, item in ITEMS.items())
    parser = argparse.ArgumentParser(
        description="Download and verify corpora and indexes of Search-R1 and ASearcher; continues after interruption.",
        epilog=f"names:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--save_path", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--what",
        nargs="+",
        choices=tuple(ITEMS),
        default=list(DEFAULT),
        metavar="NAME",
        help=f"one or more of the names below (default: {' '.join(DEFAULT)})",
    )
    parser.add_argument("--revision", default="main", help="branch, tag or commit of the data sets (default: main)")
    parser.add_argument("--dry_run", action="store_true", help="only print what would be downloaded")
    given = parser.parse_args()
    download(given.save_path, given.what, given.revision, given.dry_run, Console())


if __name__ == "__main__":
    run_command(main)
