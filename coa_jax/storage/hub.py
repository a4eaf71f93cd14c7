"""Downloads and uploads models of the Hugging Face Hub, by id (``Org/Name[@revision]``).

If a repository has several GGUF files, ``Org/Name[@revision]:FILE.gguf`` names one of these files.

The package huggingface_hub does the transfers, with its cache, tokens, ``HF_ENDPOINT`` and offline
mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files.untrusted import made_by
from coa_jax.storage.copies import local, stands_for
from coa_jax.storage.file_systems import explain_store_errors, is_url, url_to_fs

ID = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?"
    r"(:(?P<file>[\w./-]+\.gguf))?"
)
_DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "*.md")
_WEIGHTS = ("*.safetensors",)
_PATIENCE = 5.0  # seconds to wait for the Hub if a command can continue without it


def hub_id(source: str | os.PathLike[str]) -> tuple[str, str | None, str | None] | None:
    """Parses the id of a model on the Hub.

    Returns:
        The name ``Org/Name``, the revision and the name of a GGUF file (None if the id has no
        revision or names no file). The whole result is None if ``source`` is not an id or is an
        existing local path.
    """
    text = os.fspath(source)
    match = ID.fullmatch(text)
    if match is None or os.path.exists(text):
        return None
    return match["name"], match["revision"], match["file"]


def model_folder(source: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """Returns the local folder, or the GGUF file, of a model; downloads the model if necessary.

    A model of the Hub is downloaded to the cache of huggingface_hub, which lets only one process
    download at a time. If the model is in a bucket, its safetensors files are not copied;
    `weights_apart` reads them. Several processes that load a model of the Hub together use
    `weights_on_hub`.

    Args:
        source: a local path, a URL, or the id of a model on the Hub. If a repository on the Hub has
            a single GGUF file and no safetensors, the model is the GGUF file.
        weights: whether the weights are needed. If False, only the config and the tokenizer are
            downloaded.

    Raises:
        UserError: the model does not exist, access is refused, or the repository has several GGUF
            files and the id names none of them.
    """
    text = os.fspath(source)
    if is_url(text):
        return Path(local(text, leave_out="*.safetensors"))
    if (repository := hub_id(text)) is None:
        return Path(text)
    name, revision, file = repository
    if file is None:
        # Subfolders are not needed: they contain the same weights in other formats.
        patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
        folder = _download(text, name, revision, patterns, ["*/*"])
        if any(folder.glob("*.safetensors")):
            return folder
        file = _only_gguf(text, name, revision, folder)
        if file is None:
            return folder
    path = _download(text, name, revision, [file, "*.md"], []) / file
    if not path.exists():
        raise UserError(f"{text}: the repository has no file {file}; correct the name of the file")
    return path


def hub_cache(source: str | os.PathLike[str]) -> Path | None:
    """Returns the cache folder of huggingface_hub if loading a model may download files to it.

    The result is None if ``source`` is not an id of the Hub. It is also None in offline mode, in
    which nothing is downloaded.
    """
    from huggingface_hub import constants

    if hub_id(source) is None or constants.HF_HUB_OFFLINE:
        return None
    return Path(constants.HF_HUB_CACHE).expanduser().resolve()  # as huggingface_hub does


def snapshot_of(source: str | os.PathLike[str], model: Path) -> Path:
    """Returns the folder of a downloaded model in the Hub cache; the folder's name is the commit.

    Args:
        source: id of the model, for which `hub_cache` is not None.
        model: result of `model_folder`.
    """
    cache = hub_cache(source)
    assert cache is not None
    return cache.joinpath(*model.relative_to(cache).parts[:3])  # REPOSITORY/snapshots/COMMIT


def cached_files(source: str | os.PathLike[str], *, weights: bool) -> list[Path]:
    """Downloads a model of the Hub as `model_folder` does; returns the files in the cache.

    ``source`` must name a model on the Hub, not a local folder. See `model_folder` for the
    arguments and errors.
    """
    model = model_folder(source, weights=weights)
    snapshot = snapshot_of(source, model)
    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    there = {path for pattern in patterns for path in snapshot.glob(pattern) if path.is_file()}
    return sorted(there | ({model} if model.is_file() else set()))


def _download(
    text: str, name: str, revision: str | None, patterns: list[str], ignored: list[str]
) -> Path:
    """Downloads the files of a repository that match patterns; returns the folder of the files."""
    from huggingface_hub import snapshot_download

    with _telling(text):
        folder = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored
        )
    stands_for(Path(folder), name if revision is None else f"{name}@{revision}")
    return Path(folder)


def _only_gguf(text: str, name: str, revision: str | None, folder: Path) -> str | None:
    """Returns the name of the only GGUF file of a repository.

    The result is None if the repository has no GGUF file, or has safetensors.

    Args:
        text: id of the model, which messages name.
        name, revision: repository and revision.
        folder: local folder of the repository. Its files count if the Hub cannot be reached.

    Raises:
        UserError: the repository has several GGUF files.
    """
    from huggingface_hub import HfApi, constants, errors

    names = [file.name for file in folder.iterdir()]
    if not constants.HF_HUB_OFFLINE:
        with _telling(text):
            try:
                names = HfApi().list_repo_files(name, revision=revision)
            except errors.HfHubHTTPError:
                raise
            except errors.HTTPError:
                pass  # the Hub cannot be reached, so the files in the cache count
    if any(fnmatch.fnmatch(file, *_WEIGHTS) for file in names):
        return None
    gguf_files = sorted(file for file in names if file.endswith(".gguf"))
    if len(gguf_files) > 1:
        shown = ", ".join(gguf_files[:30]) + (", ..." if len(gguf_files) > 30 else "")
        raise UserError(
            f"{text}: the repository has {len(gguf_files)} GGUF files; name one of them, as in "
            f"{text}:{gguf_files[0]} ({shown})"
        )
    return gguf_files[0] if gguf_files else None


@dataclasses.dataclass(frozen=True)
class RemoteFiles:
    """Files in a folder of a bucket or of the Hub, from which ranges of bytes can be read.

    Attributes:
        where: URL of the folder, or id of the model on the Hub, used in messages.
        names: names of the files in the folder.
        root: path of the folder in ``fs``.
        fs: file system of fsspec.
        telling: function that takes the name of a file for error messages, and returns a context
            manager, in which read errors become `UserError`.
        options: further arguments of ``fs.cat_file``.
    """

    where: str
    names: tuple[str, ...]
    root: str = dataclasses.field(repr=False)
    fs: Any = dataclasses.field(repr=False)
    telling: Callable[[str], contextlib.AbstractContextManager[None]] = explain_store_errors
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Reads the bytes ``[start, stop)`` of a file by one request.

        Args:
            name: name of the file in the folder.
            start: position of the first byte.
            stop: position one past the last byte.

        Raises:
            UserError: there is no such file, or the store refuses access or cannot be reached.
        """
        if stop <= start:
            return b""
        with self.telling(f"{self.where}/{name}"):
            data = self.fs.cat_file(f"{self.root}/{name}", start=start, end=stop, **self.options)
        return bytes(data)


def weights_apart(source: str | os.PathLike[str]) -> RemoteFiles | None:
    """Returns the safetensors files of a model in a bucket; None if the model is not in a bucket.

    Args:
        source: path, URL or id of the model, as for `model_folder`.

    Raises:
        UserError: the bucket cannot be read.
    """
    text = os.fspath(source)
    if not is_url(text):
        return None
    fs, root = url_to_fs(text)
    with explain_store_errors(text):
        names = sorted(name.rpartition("/")[2] for name in fs.glob(f"{root}/*.safetensors"))
    url = text.rstrip("/")
    return RemoteFiles(url, tuple(names), url, fs)


def weights_on_hub(source: str | os.PathLike[str]) -> bool:
    """Returns whether ranges of a model's safetensors files can be requested from the Hub.

    The result is False if ``source`` is not an id of the Hub or names a GGUF file, and in offline
    mode.
    """
    from huggingface_hub import constants

    repository = hub_id(source)
    return repository is not None and repository[2] is None and not constants.HF_HUB_OFFLINE


def hub_files(source: str | os.PathLike[str], commit: str, names: Sequence[str]) -> RemoteFiles:
    """Returns files of a model on the Hub, without a download.

    Args:
        source: id of the model, for which `weights_on_hub` is True.
        commit: commit of the repository.
        names: names of the files.
    """
    from huggingface_hub import HfFileSystem

    repository = hub_id(source)
    assert repository is not None
    root = f"{repository[0]}@{commit}"
    # Without this option, HfFileSystem reads more than the requested bytes.
    options = {"cache_type": "none"}
    return RemoteFiles(
        os.fspath(source), tuple(names), root, HfFileSystem(), _telling_file, options
    )


@contextlib.contextmanager
def _telling_file(text: str) -> Iterator[None]:
    """Converts errors of reading a file of the Hub to `UserError`."""
    with _telling(text):
        try:
            yield
        except FileNotFoundError as error:
            raise UserError(f"{text}: the repository has no such file") from error


def hub_description(source: str | os.PathLike[str]) -> Path | None:
    """Downloads the file of a model on the Hub that describes the architecture, and no other file.

    The file is ``config.json`` or, in a repository without it, ``adapter_config.json``.

    Returns:
        The folder of the file; None if ``source`` is not an id of the Hub or names a GGUF file, or
        if the repository has neither file.

    Raises:
        UserError: the Hub refuses the request; or it does not answer within seconds, and the cache
            has neither file.
    """
    from huggingface_hub import HfApi, constants, errors, hf_hub_download

    if (repository := hub_id(source)) is None or repository[2] is not None:
        return None
    name, revision, _ = repository
    reached, missing = not constants.HF_HUB_OFFLINE, errors.EntryNotFoundError()
    with _telling(os.fspath(source)):
        if reached:
            # `hf_hub_download` repeats its requests for minutes.
            try:
                HfApi().model_info(name, revision=revision, timeout=_PATIENCE)
            except errors.HfHubHTTPError:
                raise
            except errors.HTTPError:
                reached = False
        for file in ("config.json", "adapter_config.json"):
            try:
                path = hf_hub_download(name, file, revision=revision, local_files_only=not reached)
                return Path(path).parent
            except errors.EntryNotFoundError as error:
                missing = error
        if isinstance(missing, errors.LocalEntryNotFoundError):
            raise missing
    return None


@contextlib.contextmanager
def _telling(text: str) -> Iterator[None]:
    """Converts errors of huggingface_hub to `UserError`."""
    from huggingface_hub import errors

    nothing = f"{text}: there is no such folder here{made_by(text)}, and "
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{text}: its authors give access on request; ask for it on the page of the model, "
            "then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{text}: the model has no such revision on the Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            nothing + "the Hub has no such model, or the model is private; correct the name, or "
            "set HF_TOKEN"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise UserError(
            nothing + "its files are not in the cache of the Hub, and the Hub cannot be reached; "
            "check the path, the network and HF_HUB_OFFLINE"
        ) from error
    except errors.HTTPError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{text}: the Hub refuses the request ({reason})") from error
    except errors.HFValidationError as error:
        raise UserError(f"{text}: the Hub has no such model ({error})") from error


def push_model(folder: Path, name: str, message: str) -> str:
    """Uploads a folder as a model to the Hub; creates the model if it does not exist.

    Args:
        folder: folder with the files of the model.
        name: id of the model, ``Org/Name``.
        message: message of the commit.

    Returns:
        The URL of the commit.

    Raises:
        UserError: the name is not a Hub id, or the Hub refuses the upload.
    """
    from huggingface_hub import HfApi

    check_push(name)
    api: Any = HfApi()
    with _telling(name):
        api.create_repo(name, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return str(done.commit_url)


def check_push(name: str) -> None:
    """Checks, without a request to the Hub, that an upload of a model is possible.

    Raises:
        UserError: the name is not a Hub id, huggingface_hub is in offline mode, or there is no
            token.
    """
    match = ID.fullmatch(name)
    if match is None or match["revision"] or match["file"]:
        raise UserError(f"--push={name}: give a Hub id, Org/Name")
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push={name}: HF_HUB_OFFLINE is set; unset it to upload")
    if not get_token():
        raise UserError(f"--push={name}: no token for the Hub; run `hf auth login` or set HF_TOKEN")
