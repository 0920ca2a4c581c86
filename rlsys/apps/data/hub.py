"""What the Hugging Face Hub says of a file: where it is, how long, and what it must hash to.

`HF_ENDPOINT` (a mirror) and `HF_TOKEN` are respected, as huggingface_hub does. Every file is addressed by
the commit that `revision` meant when it was asked for, so that a download that is resumed weeks later
goes on with the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import httpx
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers

from rlsys.errors import RunError, UserError

_CHECKSUM = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of one commit of a data set."""

    name: str
    """Its path in the repository."""
    url: str
    size: int
    """Bytes."""
    checksum: str
    """In hex: SHA-256 of the content (64 digits) for a large file, git's SHA-1 of the blob (40) for another."""


@dataclass(frozen=True, slots=True)
class Hub:
    """Asks about data sets; None takes the endpoint and the token of the environment."""

    endpoint: str | None = None
    token: str | None = None

    def headers(self) -> dict[str, str]:
        """What a request for a file needs, the token among it."""
        return build_hf_headers(token=self.token)

    def find(self, dataset: str, patterns: Iterable[str], revision: str = "main") -> list[RemoteFile]:
        """The files of `dataset` by name or by glob (a glob takes all that match, in order of names).

        Raises UserError for what does not exist or may not be read, RunError if the Hub cannot be reached.
        """
        with _explained(dataset, revision):
            files: list[RemoteFile] = []
            for pattern in patterns:
                names = [pattern]
                if "*" in pattern:
                    listed = HfApi(endpoint=self.endpoint, token=self.token).list_repo_files(
                        dataset, repo_type="dataset", revision=revision
                    )
                    names = sorted(name for name in listed if fnmatchcase(name, pattern))
                    if not names:
                        raise UserError(f"data set {dataset} has no file {pattern} at {revision}: see its page")
                for name in names:
                    revision, file = self._describe(dataset, name, revision)
                    files.append(file)
            return files

    def _describe(self, dataset: str, name: str, revision: str) -> tuple[str, RemoteFile]:
        """The commit that `revision` means, and the file at it."""
        url = hf_hub_url(dataset, name, repo_type="dataset", revision=revision, endpoint=self.endpoint)
        found = get_hf_file_metadata(url, token=self.token, endpoint=self.endpoint, retry_on_errors=True)
        if found.commit_hash is None or found.size is None or not _CHECKSUM.fullmatch(found.etag or ""):
            raise UserError(
                f"{url} comes without commit, size or checksum, so it could not be verified: "
                "check HF_ENDPOINT, or unset it"
            )
        pinned = hf_hub_url(dataset, name, repo_type="dataset", revision=found.commit_hash, endpoint=self.endpoint)
        return found.commit_hash, RemoteFile(name, pinned, found.size, str(found.etag))


@contextmanager
def _explained(dataset: str, revision: str) -> Iterator[None]:
    try:
        yield
    except OfflineModeIsEnabled as problem:
        raise UserError("HF_HUB_OFFLINE forbids downloads: unset it") from problem
    except GatedRepoError as problem:
        raise UserError(f"data set {dataset} is gated: ask for access on its page, then set HF_TOKEN") from problem
    except RepositoryNotFoundError as problem:
        raise UserError(
            f"data set {dataset} does not exist or is private: check the name, or set HF_TOKEN"
        ) from problem
    except RevisionNotFoundError as problem:
        raise UserError(f"data set {dataset} has no revision {revision!r}: give another") from problem
    except EntryNotFoundError as problem:
        raise UserError(f"a file of data set {dataset} is gone ({_first_line(problem)})") from problem
    except (HFValidationError, FileMetadataError) as problem:
        raise UserError(_first_line(problem)) from problem
    except HfHubHTTPError as problem:
        if problem.response.status_code in (401, 403):
            raise UserError(f"data set {dataset} may not be read: check HF_TOKEN ({_first_line(problem)})") from problem
        raise RunError(f"the Hub does not answer for {dataset}: {_first_line(problem)}; try later") from problem
    except httpx.HTTPError as problem:
        raise RunError(
            f"the Hub cannot be reached for {dataset} ({_first_line(problem) or type(problem).__name__}): "
            "check the network, or set HF_ENDPOINT to a mirror"
        ) from problem


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).strip().splitlines()), "")
