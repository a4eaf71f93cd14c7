"""Mirrors a run directory in a bucket as a local folder.

A run reads and writes local files in the temporary folder, where it can append, rename and lock.
`Mirror.sync` uploads the changes to the bucket.

An object can only be written as a whole, so a growing file is stored in parts: first the object
NAME, then objects ``NAME.part-OFFSET``. The last part is rewritten while it grows, until it has
`WHOLE` bytes. A part is valid only if its offset is the end of the part before it. So a reader
always sees a consistent earlier state of the file, and so does a run that resumes after a kill
between two writes.

Checkpoints are not mirrored, because Orbax writes them directly to the bucket.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from coa_jax.config.fields import seconds_of
from coa_jax.errors import UserError
from coa_jax.storage import lease as leases
from coa_jax.storage.copies import CHECKPOINTS, PART, joined, own_folder, stands_for
from coa_jax.storage.file_systems import check_writable, explain_store_errors, is_url, url_to_fs
from coa_jax.storage.periodic import Repeated

WHOLE = 8 << 20
"""Size in bytes at which a part of a growing file is complete and no longer rewritten."""
ENTRIES = "entries-"
"""Prefix of the names of objects of `coa_jax.storage.shared`, which are not mirrored."""
NAMES_ONLY = ("traces", "tensorboard", "profile", "model", "model-adapters")
"""Names of folders in which a resumed run reads only the names of the files."""


@dataclasses.dataclass
class _Chunk:
    """An object that contains a part of a file.

    Attributes:
        name: name of the object.
        offset: offset of the part in the file, in bytes.
        size: size of the part, in bytes.
        crc: CRC-32 of the part; 0 if the part was not read.
    """

    name: str
    offset: int
    size: int
    crc: int


@dataclasses.dataclass
class _File:
    """The state of a file in the bucket.

    Attributes:
        chunks: the objects of the file, in order.
        stamp: inode, size and modification time of the local file at the last upload; None if it
            was not uploaded.
    """

    chunks: list[_Chunk]
    stamp: tuple[int, int, int] | None = None


class Mirror:
    """The local mirror of a folder in a bucket.

    Attributes:
        url: URL of the folder in the bucket.
        path: path of the local folder.
        lease: exclusive right to write to the bucket, which the first process of a run has between
            `open` and `close`; None at other times and in other processes.
        uploads: thread that regularly uploads changes between `open` and `close`; otherwise None.
    """

    def __init__(self, url: str):
        """Creates an empty mirror, which is removed when the process ends."""
        self.url = url.rstrip("/")
        self._fs, self._root = url_to_fs(self.url)
        folder, self._lock_file = _new_folder()
        self.path = folder / self._root.rpartition("/")[2]
        self.path.mkdir()
        stands_for(self.path, self.url)
        self._files: dict[str, _File] = {}
        self._syncing = threading.Lock()
        self.lease: leases.Lease | None = None
        self.uploads: Repeated | None = None

    # --- from the bucket -------------------------------------------------------------------

    def fill(self, names_only: Iterable[str] = (), *, own: bool = False) -> None:
        """Downloads the state of the bucket to the local folder.

        Args:
            names_only: names of top-level folders of which only the names of the files are needed.
                These files are created empty instead of being downloaded.
            own: whether this process writes to the bucket. If True, the method removes objects that
                a killed run has left in the bucket and that are not a valid part of a file.

        Raises:
            UserError: the bucket cannot be read.
        """
        skipped = tuple(names_only)
        with self._syncing, explain_store_errors(self.url):
            files, stale = _files_of(self._objects())
            for relative, file in files.items():
                path = self.path / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                if relative.split("/")[0] in skipped:
                    path.touch()
                else:
                    self._download(file, path)
                file.stamp = _file_stamp(path)
                self._files[relative] = file
            if own and stale:
                self._fs.rm([f"{self._root}/{name}" for name in stale])

    def _objects(self) -> Iterator[tuple[str, int]]:
        below = self._fs.find(self._root, detail=True)
        for name, info in below.items():
            relative = name.removeprefix(self._root).lstrip("/")
            parts = relative.split("/")
            # `sync` uploads no name that begins with a dot, and would remove such an object. A name
            # that ends in "/" marks an empty folder.
            foreign = not parts[-1] or any(part.startswith(".") for part in parts)
            if foreign or relative == leases.NAME or CHECKPOINTS in parts:
                continue
            if not parts[-1].startswith(ENTRIES):
                yield relative, int(info.get("size") or 0)

    def _download(self, file: _File, path: Path) -> None:
        first, *rest = file.chunks
        self._fs.get_file(f"{self._root}/{first.name}", str(path))
        # The object may have been rewritten since it was listed.
        with open(path, "rb") as data:
            first.size, first.crc = path.stat().st_size, _checksum(data)
        for number, chunk in enumerate(rest, 1):
            if chunk.offset != path.stat().st_size:
                del file.chunks[number:]
                return
            data = self._fs.cat_file(f"{self._root}/{chunk.name}")
            chunk.size, chunk.crc = len(data), zlib.crc32(data)
            with open(path, "ab") as target:
                target.write(data)

    # --- to the bucket ---------------------------------------------------------------------

    def sync(self) -> None:
        """Uploads the state of the local folder to the bucket; returns when it is uploaded.

        Files whose names begin with a dot are left out, because they are unfinished files or locks.

        Raises:
            UserError: the bucket cannot be written, or another run has taken over the lease.
        """
        with self._syncing:
            if self.lease is not None:
                self.lease.check()
            with explain_store_errors(self.url):
                here = dict(self._local_files())
                for relative, path in here.items():
                    self._upload(relative, path)
                for relative in [name for name in self._files if name not in here]:
                    self._remove(self._files[relative].chunks)
                    del self._files[relative]  # only now, so that a failed removal is repeated

    def _local_files(self) -> Iterator[tuple[str, Path]]:
        for folder, folders, names in os.walk(self.path):
            folders[:] = [n for n in folders if n != CHECKPOINTS and not n.startswith(".")]
            # The config of a model goes first: if the upload is killed, `save_model` recognises the
            # folder as a model, which the resumed run may replace.
            for name in sorted(names, key=lambda name: name != "config.json"):
                path = Path(folder) / name
                if not name.startswith(".") and path.is_file():
                    yield path.relative_to(self.path).as_posix(), path

    def _upload(self, relative: str, path: Path) -> None:
        """Uploads a file from its first change on, which usually means only the new bytes."""
        file = self._files.get(relative, _File([]))
        try:
            stamp = _file_stamp(path)
            if file.stamp == stamp:
                return
            with open(path, "rb") as data:
                unchanged = _unchanged(data, file.chunks) if _has_grown(file.stamp, stamp) else []
                start = unchanged[-1].offset + unchanged[-1].size if unchanged else 0
                name = f"{relative}{PART}{start:015d}" if unchanged else relative
                # If the file grows during the upload, it is uploaded up to this size.
                chunk = self._put_chunk(data, _Chunk(name, start, stamp[1] - start, 0))
        except FileNotFoundError:
            if path.exists():
                raise
            return  # The file was removed during the upload. The next `sync` removes its objects.
        self._remove(old for old in file.chunks[len(unchanged) :] if old.name != name)
        self._files[relative] = _File([*unchanged, chunk], stamp)

    def _put_chunk(self, data: IO[bytes], chunk: _Chunk) -> _Chunk:
        """Uploads a part of a file; returns the part with its size and its checksum."""
        target = f"{self._root}/{chunk.name}"
        data.seek(chunk.offset)
        if chunk.offset or chunk.size <= WHOLE:
            block = data.read(chunk.size)
            self._fs.pipe_file(target, block)
            return dataclasses.replace(chunk, size=len(block), crc=zlib.crc32(block))
        self._fs.put_file(str(data.name), target)
        size = int(self._fs.info(target)["size"])
        return dataclasses.replace(chunk, size=size, crc=_checksum(data, size))

    def _remove(self, chunks: Iterable[_Chunk]) -> None:
        """Removes objects, the last part first, so that a kill leaves the beginning of the file."""
        for chunk in sorted(chunks, key=lambda chunk: -chunk.offset):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{chunk.name}")

    # --- the run ---------------------------------------------------------------------------

    def open(self, *, active: bool) -> None:
        """Begins a run: takes the lease, downloads the folder, and starts regular uploads.

        The number of seconds between two uploads is the value of ``$COA_JAX_SYNC_SECONDS``, by
        default 15. If the process is killed, data that was written since the last upload may be
        lost.

        Args:
            active: whether this process is the first process of the run. Only the first process
                takes the lease.

        Raises:
            UserError: another run holds the lease, or the bucket cannot be read or written.
        """
        seconds = seconds_of("COA_JAX_SYNC_SECONDS", 15.0)
        if active:
            # A bucket with a retention policy lets a run create objects, but not change them.
            check_writable(self.url)
            self.lease = leases.Lease(self.url)
        others = () if active else ("traces.jsonl",)
        self.fill((*NAMES_ONLY, *others), own=active)
        self.uploads = Repeated(self.sync, seconds, f"{self.url}: cannot upload changes now")

    def close(self) -> None:
        """Ends the run: uploads the last changes, and releases the lease.

        Raises:
            UserError: the bucket cannot be written, or another run has taken over the lease.
        """
        if self.uploads is not None:
            self.uploads.stop()
            self.uploads = None
        try:
            self.sync()
        finally:
            if self.lease is not None:
                self.lease.close()
                self.lease = None


def _files_of(objects: Iterable[tuple[str, int]]) -> tuple[dict[str, _File], list[str]]:
    """Groups objects, given as pairs (name, number of bytes), into files.

    Returns:
        The files by name, and the names of objects that are invalid parts.
    """
    sizes = dict(objects)
    files, used = {}, set[str]()
    for main in (name for name in sizes if PART not in name):
        chunks, end = [], 0
        for name in joined(main, sizes):
            chunks.append(_Chunk(name, end, sizes[name], 0))
            end += sizes[name]
        files[main] = _File(chunks)
        used |= {chunk.name for chunk in chunks}
    return files, [name for name in sizes if name not in used]


def _unchanged(data: IO[bytes], chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """Returns the parts before the first change of a file, without a part that may still grow.

    A file changes only at its end, so the last parts are compared first.
    """
    prefix = list(chunks)
    while prefix and _checksum(data, prefix[-1].size, prefix[-1].offset) != prefix[-1].crc:
        prefix.pop()
    return prefix[:-1] if prefix and prefix[-1].size < WHOLE else prefix


def _checksum(data: IO[bytes], size: int = sys.maxsize, offset: int = 0) -> int:
    """Returns the checksum of up to ``size`` bytes of a file."""
    data.seek(offset)
    crc = 0
    while size > 0 and (block := data.read(min(size, 1 << 20))):
        crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def _file_stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _has_grown(before: tuple[int, int, int] | None, now: tuple[int, int, int]) -> bool:
    return before is not None and before[0] == now[0] and before[1] > 0


# --- folders -------------------------------------------------------------------------------


def _new_folder() -> tuple[Path, int]:
    """Creates a folder for a mirror, and locks the folder.

    The lock ends with the process. A later process removes folders that are not locked.
    """
    root = own_folder() / "mirrors"
    root.mkdir(exist_ok=True)
    for old in root.iterdir():
        # An error means that the folder is locked, or that it is just being created.
        with contextlib.suppress(OSError), open(old / ".lock", "r+") as old_lock:
            fcntl.flock(old_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=root))
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    atexit.register(_remove_own, folder, os.getpid())
    return folder, lock


def _remove_own(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker removes nothing
        shutil.rmtree(folder, ignore_errors=True)


# --- the mirrors of this process -----------------------------------------------------------

_mirrors: dict[Path, Mirror] = {}


def run_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the local folder of a run directory.

    Args:
        path: a local path, which is returned, or a URL. For a URL, the returned folder is a
            mirror, which is empty until `RunDir` opens it.

    Raises:
        UserError: the scheme of the URL is not supported, or its store cannot be used.
    """
    if not is_url(path):
        return Path(path)
    url = os.fspath(path).rstrip("/")
    mirror = next((each for each in _mirrors.values() if each.url == url), None) or Mirror(url)
    _mirrors[mirror.path] = mirror
    return mirror.path


def mirror_of(path: str | os.PathLike[str]) -> Mirror | None:
    """Returns the mirror that contains a local path; None if there is none."""
    path = Path(path)
    return next((_mirrors[p] for p in (path, *path.parents) if p in _mirrors), None)


@contextlib.contextmanager
def visited(
    url_or_path: str | os.PathLike[str], names_only: Iterable[str] = NAMES_ONLY
) -> Iterator[Path]:
    """Yields the local folder of a run; at the end, uploads the files that have changed.

    The run may be in progress, because no lease is taken.

    Args:
        url_or_path: directory of the run, a local path or a URL.
        names_only: names of top-level folders whose files are created empty, see `Mirror.fill`.

    Raises:
        UserError: the directory does not exist, or cannot be read or written.
    """
    path = run_folder(url_or_path)
    mirror = mirror_of(path)
    if mirror is None:
        yield path
        return
    mirror.fill(names_only)
    if not any(path.iterdir()):
        raise UserError(f"{os.fspath(url_or_path)}: there is no run directory; correct the address")
    yield path
    mirror.sync()
