"""Models of the Hugging Face Hub by their id, ``Org/Name`` or ``Org/Name@revision``.

huggingface_hub does the work: its cache, tokens, ``HF_ENDPOINT`` and offline mode hold here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.storage.copies import local, stands_for
from coa_jax.storage.places import file_system, is_url, scheme_of, telling

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "*.md")
_WEIGHTS = ("*.safetensors",)


def hub_id(place: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """(``Org/Name``, revision or None) of a Hub id; None for a URL or what exists locally."""
    text = os.fspath(place)
    found = _ID.fullmatch(text)
    if found is None or os.path.exists(text):
        return None
    return found["name"], found["revision"]


def model_folder(place: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The local folder, or GGUF file, of a model.

    A model of the Hub is downloaded to the cache of huggingface_hub, whose locks let one of several
    processes do it.  The safetensors of a bucket stay there, see `weights_apart`.

    Args:
        place: a local path, a URL, or an id of the Hub.
        weights: whether the tensors are needed; if not, only what describes the model is there.

    Raises:
        UserError: there is no such model, or it may not be read.
    """
    text = os.fspath(place)
    if is_url(text):
        return Path(local(text, leave_out="*.safetensors"))
    if (found := hub_id(text)) is None:
        return Path(text)
    name, revision = found
    from huggingface_hub import snapshot_download

    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    with _telling(text):
        # In a subfolder are other formats of the same weights.
        folder = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    stands_for(Path(folder), text)
    return Path(folder)


@dataclasses.dataclass(frozen=True)
class RemoteFiles:
    """Files elsewhere, of which ranges of bytes are read.

    Attributes:
        url: the folder that they are in, for messages.
        root: the folder, as the file system names it.
        names: names of the files in it.
        fs: the fsspec file system.
    """

    url: str
    root: str
    names: tuple[str, ...]
    fs: Any = dataclasses.field(repr=False)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes of a file.

        Raises:
            UserError: see `places.telling`.
        """
        if stop <= start:
            return b""
        with telling(f"{self.url}/{name}"):
            found = self.fs.cat_file(f"{self.root}/{name}", start=start, end=stop)
        return bytes(found)


def weights_apart(place: str | os.PathLike[str], folder: Path) -> RemoteFiles | None:
    """The safetensors of a model whose weights are not in its local folder; None if they are.

    Args:
        place: the model, see `model_folder`.
        folder: its local folder.

    Raises:
        UserError: the place cannot be read.
    """
    text = os.fspath(place)
    if not is_url(text):
        return None
    fs, root = file_system(scheme_of(text)), text.partition("://")[2].rstrip("/")
    with telling(text):
        found = sorted(name.rpartition("/")[2] for name in fs.glob(f"{root}/*.safetensors"))
    return RemoteFiles(text.rstrip("/"), root, tuple(found), fs)


@contextlib.contextmanager
def _telling(text: str) -> Iterator[None]:
    """Turns what the Hub answers into a `UserError`."""
    from huggingface_hub import errors

    nothing = f"{text}: there is no such folder here, and "
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
            nothing + "the Hub has no such model, or shows it only to others; mend the name, or "
            "set HF_TOKEN"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise UserError(
            nothing + "its files are not in the cache of the Hub, which cannot be reached now; "
            "check the path, the network and HF_HUB_OFFLINE"
        ) from error
    except errors.HTTPError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{text}: the Hub refuses ({reason})") from error


def push_model(folder: Path, name: str, message: str) -> str:
    """Uploads a folder as a model of the Hub, which is made if need be.

    Args:
        folder: with the files of the model.
        name: ``Org/Name``.
        message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        UserError: the name is no id, or the Hub refuses.
    """
    from huggingface_hub import HfApi

    check_push(name)
    api: Any = HfApi()
    with _telling(name):
        api.create_repo(name, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return str(done.commit_url)


def check_push(name: str) -> None:
    """Refuses what is no id of the Hub, and a Hub that nobody is known to.

    Raises:
        UserError: says what to change.
    """
    found = _ID.fullmatch(name)
    if found is None or found["revision"]:
        raise UserError(f"--push={name}: give an id of the Hub, Org/Name")
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push={name}: HF_HUB_OFFLINE is set; unset it to upload")
    if not get_token():
        raise UserError(f"--push={name}: no token for the Hub; run `hf auth login` or set HF_TOKEN")
