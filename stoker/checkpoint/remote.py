"""Headers of a model on the Hub, by range requests: config, index, and the first bytes of each weight file. No weights.

Goes through huggingface_hub's session, so HF_ENDPOINT, HF_TOKEN, proxies and HF_HUB_OFFLINE hold. What is in the local
Hub cache as a whole is used from there. Owns the network; parsing is safetensors_file's and gguf_header's.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.gguf_header import as_checkpoint, read_gguf
from stoker.checkpoint.safetensors_file import MAX_HEADER_BYTES, TensorEntry, parse_header
from stoker.checkpoint.source import INDEX, SINGLE, Checkpoint, open_checkpoint
from stoker.errors import CheckpointError

FIRST_BYTES = 1 << 18
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")
OFFLINE_REMEDY = "unset HF_HUB_OFFLINE, or name a local directory, a store or a GGUF file"


@dataclass(frozen=True)
class HubName:
    """OWNER/NAME, optionally /FILE.gguf, optionally @REVISION."""

    repo: str
    file: str | None
    revision: str | None


def hub_name(text: str) -> HubName | None:
    """The parts of a Hub id; None for what is none."""
    match = HUB_ID.fullmatch(text)
    return HubName(match["repo"], match["file"], match["revision"]) if match else None


@dataclass
class RemoteHeaders:
    """What was found. `fetched_bytes`: what it took; `published_bytes`: all weight files together."""

    checkpoint: Checkpoint
    kind: str  # "safetensors" or "gguf"
    published_bytes: int
    fetched_bytes: int


def open_remote(name: HubName) -> RemoteHeaders:
    """Headers of a model on the Hub. Raises CheckpointError where it is not there, or not reachable."""
    local = _cached_snapshot(name)
    if local is not None and name.file is None:
        checkpoint = open_checkpoint(local)
        return RemoteHeaders(checkpoint, "safetensors", checkpoint.nbytes, 0)
    hub = _Hub(name)
    if name.file is not None:
        return _gguf(hub, name.file)
    index = hub.json(INDEX)
    config = hub.json("config.json")
    if index is None and (config is None or hub.size(SINGLE) is None):
        return _only_gguf(hub)
    if config is None:
        raise CheckpointError("the repository has no config.json", where=name.repo)
    files = sorted(set(index["weight_map"].values())) if index else [SINGLE]
    tensors: dict[str, TensorEntry] = {}
    total = 0
    for file in files:
        size = hub.size(file)
        if size is None:
            raise CheckpointError("the index names a file that is not there", where=name.repo, expected=file)
        tensors.update(_safetensors(hub, file, size))
        total += size
    return RemoteHeaders(Checkpoint(Path(name.repo), config, tensors), "safetensors", total, hub.fetched_bytes)


def _safetensors(hub: "_Hub", file: str, size: int) -> dict[str, TensorEntry]:
    raw = hub.range(file, 0, min(FIRST_BYTES, size))
    length = int.from_bytes(raw[:8], "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError("not a whole safetensors file", where=f"{hub.name.repo}: {file}", got=f"{size} bytes")
    if len(raw) < 8 + length:
        raw += hub.range(file, len(raw), 8 + length)
    return parse_header(raw[8 : 8 + length], Path(file), 8 + length, size)


def _only_gguf(hub: "_Hub") -> RemoteHeaders:
    files = [file for file in hub.files() if file.endswith(".gguf")]
    first = [file for file in files if "-of-" not in file or re.search(r"-0*1-of-", file)]
    if len(first) != 1:
        raise CheckpointError(
            "the repository holds neither safetensors with a config.json nor a single GGUF",
            where=hub.name.repo,
            got=", ".join(first[:8]) or "no weights",
            remedy=f"name one: {hub.name.repo}/{first[0]}" if first else None,
        )
    return _gguf(hub, first[0])


def _gguf(hub: "_Hub", file: str) -> RemoteHeaders:
    size = hub.size(file)
    if size is None:
        raise CheckpointError("there is no such file", where=f"{hub.name.repo}/{file}")
    parts = [file]
    split = re.search(r"-(\d+)-of-(\d+)\.gguf$", file)
    if split:
        parts = [file[: split.start()] + f"-{i + 1:05d}-of-{split[2]}.gguf" for i in range(int(split[2]))]
    headers, total = [], 0
    for part in parts:
        part_size = hub.size(part)
        if part_size is None:
            raise CheckpointError("a part of the GGUF is missing", where=hub.name.repo, expected=part)
        headers.append(read_gguf(hub.reader(part), part_size, f"{hub.name.repo}/{part}"))
        total += part_size
    checkpoint = as_checkpoint(headers, f"{hub.name.repo}/{file}")
    return RemoteHeaders(checkpoint, "gguf", total, hub.fetched_bytes)


def _cached_snapshot(name: HubName) -> Path | None:
    """The local Hub cache's snapshot, when its config and every weight file that its index names are there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    if (directory / INDEX).exists():
        wanted = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
        return directory if all((directory / file).exists() for file in wanted) else None
    return directory if (directory / SINGLE).exists() else None


class _Hub:
    """One repository. `fetched_bytes` counts every body."""

    def __init__(self, name: HubName) -> None:
        from huggingface_hub import constants

        if constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                "not in the local Hub cache, and HF_HUB_OFFLINE forbids to ask the Hub",
                where=name.repo,
                remedy=OFFLINE_REMEDY,
            )
        self.name = name
        self.fetched_bytes = 0
        self._sizes: dict[str, int | None] = {}

    def size(self, file: str) -> int | None:
        """Bytes of a file; None where there is none."""
        if file not in self._sizes:
            found = self._get(file, "bytes=0-0")
            self._sizes[file] = None if found is None else _total_bytes(found, f"{self.name.repo}: {file}")
        return self._sizes[file]

    def json(self, file: str) -> dict[str, Any] | None:
        found = self._get(file, None)
        if found is None:
            return None
        try:
            body = found.json()
        except ValueError as error:
            raise CheckpointError("not valid JSON", where=f"{self.name.repo}: {file}", got=str(error)) from error
        return body if isinstance(body, dict) else None

    def range(self, file: str, start: int, end: int) -> bytes:
        """Bytes start .. end - 1."""
        found = self._get(file, f"bytes={start}-{end - 1}")
        if found is None or found.status_code != 206 or len(found.content) != end - start:
            got = "nothing" if found is None else f"status {found.status_code}, {len(found.content)} bytes"
            where = f"{self.name.repo}: {file}"
            raise CheckpointError("the server does not answer range requests", where=where, got=got)
        return bytes(found.content)

    def reader(self, file: str) -> Callable[[int, int], bytes]:
        return lambda start, end: self.range(file, start, end)

    def files(self) -> list[str]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return list(HfApi().list_repo_files(self.name.repo, revision=self.name.revision))
        except HfHubHTTPError as error:
            raise CheckpointError("no such model on the Hub", where=self.name.repo, got=str(error)) from error

    def _get(self, file: str, byte_range: str | None) -> Any:
        """The response, None where there is no such file. A server that ignores the range is not read to its end."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session

        url = hf_hub_url(self.name.repo, file, revision=self.name.revision)
        headers = build_hf_headers() | ({"Range": byte_range, "Accept-Encoding": "identity"} if byte_range else {})
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=30) as response:
                if response.status_code in (401, 403, 404):
                    return self._refused(response, file)
                if response.status_code >= 400:
                    raise CheckpointError("the Hub refuses", where=url, got=f"status {response.status_code}")
                if byte_range and response.status_code != 206:
                    raise CheckpointError(
                        "the server does not answer range requests", where=url, got=f"status {response.status_code}"
                    )
                response.read()
        except CheckpointError:
            raise
        except Exception as error:  # the HTTP library behind the session is huggingface_hub's choice
            raise CheckpointError(
                "the Hub cannot be reached", where=url, got=f"{type(error).__name__}: {error}",
                remedy="check the network, HF_ENDPOINT and proxies; a local checkpoint needs neither",
            ) from error  # fmt: skip
        self.fetched_bytes += len(response.content)
        return response

    def _refused(self, response: Any, file: str) -> None:
        """None for a file that is not there; an error for a repository that is not there, or gated."""
        reason = response.headers.get("X-Error-Code", "")
        if response.status_code == 404 and reason in ("", "EntryNotFound"):
            return
        raise CheckpointError(
            "no such model on the Hub, or it is private or gated",
            where=f"{self.name.repo}: {file}",
            got=f"status {response.status_code} {reason}".strip(),
            remedy="check the name; for a gated model accept its terms and set HF_TOKEN",
        )


def _total_bytes(response: Any, where: str) -> int:
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if not total.isdigit():
        raise CheckpointError("the server does not tell a file's size", where=where, got=f"Content-Range {total!r}")
    return int(total)
