"""Copies files between buckets and this host.

The temporary folder holds copies of inputs, and caches of results that are computed from inputs.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.storage.file_systems import explain_store_errors, is_url, join, scheme_of, url_to_fs

PART = ".part-"
"""In names of objects, separates the name of a file from the offset of a later part of it."""

SIDECARS = ("protocols.json", "dataset_info.json")
"""Files that say how to read the other files in their folder."""

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a work directory."""

_shown: dict[str, str] = {}
"""Maps each local folder of a copy or mirror to the URL that messages show instead."""


def with_urls(text: str | os.PathLike[str]) -> str:
    """Replaces the paths of local copies and mirrors in a text by their URLs, for messages."""
    text = os.fspath(text)
    for folder, url in _shown.items():
        text = text.replace(folder, url)
    return text


def stands_for(folder: Path, url: str) -> None:
    """Registers that a local folder is a copy of ``url``, so that `with_urls` replaces its path."""
    _shown[str(folder)] = url.rstrip("/")


def own_folder() -> Path:
    """Creates and returns the user's private folder in the temporary folder (``TMPDIR``).

    Raises:
        UserError: another user owns the folder.
    """
    path = Path(tempfile.gettempdir()) / f"coa_jax-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"{path}: belongs to another user; set TMPDIR to a folder of your own")
    return path


def cache_folder(name: str, source: str) -> Path:
    """Returns the folder of a cache of results that are computed from an input.

    For an input in a bucket, the folder is in the temporary folder, like the local copy of the
    input. So a run whose inputs and outputs are all in buckets writes only to the temporary folder
    of this machine. For other inputs, the result is `durable.cache_folder`.

    Args:
        name: name of the cache.
        source: path or URL of the input, or several of them, separated by commas; "" for no file.
    """
    in_bucket = "://" in with_urls(source)
    return own_folder() / "caches" / name if in_bucket else durable.cache_folder(name)


def local(source: str, leave_out: str = "") -> str:
    """Returns the local path of an input; an input in a bucket is first copied to this host.

    An object that was copied before is copied again only if it has changed. If the object no longer
    exists, its copy is removed.

    Args:
        source: local path or URL of a file or a folder, or a pattern with ``*``. A folder is copied
            with everything in it except checkpoints. ``protocols.json`` and ``dataset_info.json``,
            which say how to read a data file, are copied too if they are beside ``source``.
        leave_out: pattern of names of files that are not copied; "" to copy all files.

    Raises:
        UserError: the input cannot be read, or contains no file.
    """
    if not is_url(source):
        return source
    fs, inside = url_to_fs(source)
    root = inside.partition("*")[0].rpartition("/")[0]
    with explain_store_errors(source):
        below = _objects(fs, inside)
        objects = {n: info for n, info in below.items() if not fnmatch.fnmatch(n, leave_out)}
        if not objects:
            raise UserError(f"{source}: there is no such file or folder; correct the address")
        sides = {name: _optional(fs, name) for name in (join(root, name) for name in SIDECARS)}
        objects |= {name: info for name, info in sides.items() if info is not None}
        gone = functools.partial(_is_gone, inside, {**below, **objects}, sides)
        folder = _copy(fs, objects, root, f"{scheme_of(source)}://{root}", gone)
    return str(folder / inside.removeprefix(root).lstrip("/"))


def _objects(fs: Any, inside: str) -> dict[str, Any]:
    """Returns the objects of a file with its parts, of a folder or of a pattern: info by name."""
    if "*" in inside:
        matching = fs.glob(inside, detail=True)
        return {name: info for name, info in matching.items() if info["type"] == "file"}
    with contextlib.suppress(FileNotFoundError):
        info = fs.info(inside)
        if info["type"] == "file":
            return {inside: info, **fs.glob(f"{inside}{PART}*", detail=True)}
    below = fs.find(inside, detail=True)
    return {
        name: info
        for name, info in below.items()
        if not name.endswith("/") and CHECKPOINTS not in name.removeprefix(inside).split("/")
    }


def _optional(fs: Any, name: str) -> Any:
    """Returns the info of an object; None if there is no such object, or no right to read it."""
    try:
        return fs.info(name)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as error:
        if "Forbidden" in str(error):  # a plain `OSError` of gcsfs
            return None
        raise


def _is_gone(inside: str, below: Collection[str], sides: Collection[str], name: str) -> bool:
    """Returns whether an object that was copied earlier for an input no longer exists.

    Args:
        inside: the input, a path in the bucket, or a pattern.
        below: names of the objects of the input and of its sidecars.
        sides: names that sidecars of the input would have.
        name: name of the object.
    """
    if name in sides:
        meant = True
    elif "*" in inside:
        meant = fnmatch.fnmatchcase(name, inside) and name.count("/") == inside.count("/")
    else:
        meant = f"{name}/".startswith(f"{inside}/")
    return meant and name not in below


def _copy(
    fs: Any, objects: Mapping[str, Any], root: str, url: str, gone: Callable[[str], bool]
) -> Path:
    """Copies new and changed objects of the bucket folder ``root`` (its URL is ``url``).

    Args:
        fs: file system of the bucket.
        objects: the objects to copy, info by name.
        root, url: the folder, and its URL.
        gone: function that returns whether an object that was copied earlier no longer exists.

    Returns:
        The local folder. A lock prevents two processes from copying to this folder.
    """
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    folder = own_folder() / "copies" / digest
    folder.mkdir(parents=True, exist_ok=True)
    stands_for(folder, url)
    sizes = {name: int(info["size"] or 0) for name, info in objects.items()}
    with locked(folder / ".lock"):
        marks_file = folder / ".marks"
        marks = durable.read_json_object(marks_file, None) if marks_file.exists() else {}
        for relative in [name for name in marks if gone(f"{root}/{name}")]:
            (folder / relative).unlink(missing_ok=True)
            del marks[relative]
            durable.write_json(marks_file, marks)
        for name_of_object in (name for name in objects if PART not in name):
            pieces = joined(name_of_object, sizes)
            relative = name_of_object.removeprefix(root).lstrip("/")
            path, mark = folder / relative, " ".join(_mark(objects[name]) for name in pieces)
            if marks.get(relative) == mark and path.is_file():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}.fresh")
            fs.get_file(name_of_object, str(fresh))
            with open(fresh, "ab") as file:
                for name in pieces[1:]:
                    file.write(fs.cat_file(name))
            os.replace(fresh, path)
            marks[relative] = mark
            durable.write_json(marks_file, marks)
    return folder


def joined(whole: str, sizes: Mapping[str, int]) -> list[str]:
    """Returns the names of the objects in a bucket that contain the parts of a file, in order.

    A growing file is stored in parts, because no object can grow, see `coa_jax.storage.mirror`.

    Args:
        whole: name of the file, which is also the name of its first object.
        sizes: maps the name of each object to its size in bytes, which determines the offset in the
            name of the next part.
    """
    pieces, end = [whole], sizes[whole]
    while (name := f"{whole}{PART}{end:015d}") in sizes and sizes[name]:
        pieces.append(name)
        end += sizes[name]
    return pieces


def _mark(info: Mapping[str, Any]) -> str:
    """Returns a text that changes when the content of an object changes."""
    return f"{info.get('size')} {info.get('generation') or info.get('ETag') or info.get('mtime')}"


def version(path: str) -> str:
    """Returns a text that changes when a file's content changes; does not read the file.

    Args:
        path: local path or URL of the file.

    Raises:
        UserError: the object at the URL does not exist or cannot be read.
        OSError: the local file does not exist.
    """
    if not is_url(path):
        file = Path(path).expanduser().resolve()
        return f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"
    fs, inside = url_to_fs(path)
    with explain_store_errors(path):
        return f"{path} {_mark(fs.info(inside))}"


def exists(url: str) -> bool:
    """Returns whether an object or a folder exists at a URL.

    Raises:
        UserError: the bucket cannot be read.
    """
    fs, inside = url_to_fs(url)
    with explain_store_errors(url):
        return bool(fs.exists(inside))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a local file during a ``with`` block; if the process ends, the lock ends too."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def output(target: str) -> Iterator[Path]:
    """Yields a local path for an output file or folder, which is uploaded at the end of the block.

    Args:
        target: a local path, which is yielded unchanged; or a URL, at which the upload replaces
            existing objects.

    Raises:
        UserError: the upload fails. The local files are then lost.
    """
    if not is_url(target):
        yield Path(target)
        return
    url = target.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="output-", dir=own_folder()) as folder:
        stands_for(Path(folder), url.rpartition("/")[0])
        path = Path(folder) / url.rpartition("/")[2]
        yield path
        upload(path, url)


def upload(path: Path, url: str) -> None:
    """Uploads a file or a folder to a URL.

    After the upload of a folder, objects at the URL that do not belong to the folder are removed.
    """
    fs, inside = url_to_fs(url)
    with explain_store_errors(url):
        if path.is_file():
            fs.put_file(str(path), inside)
            return
        old = set(fs.find(inside))
        for file in sorted(path.rglob("*")):
            if file.is_file():
                name = join(inside, file.relative_to(path).as_posix())
                fs.put_file(str(file), name)
                old.discard(name)
        if old:
            fs.rm(sorted(old))
