"""Opens stores by URL, as file systems of fsspec, and explains their errors in one line.

Orbax uses the same file systems through etils.epath. This module does not use etils.epath, because
it cannot read ranges of bytes, and cannot create an object only if it does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
from collections.abc import Iterator
from typing import Any

from coa_jax.config.installed import missing
from coa_jax.errors import Outage, UserError, causes_of

SCHEMES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""Maps the scheme of a bucket to (package, extra of setup.py that installs the package)."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OUT_OF_REACH, _REFUSED = "the store cannot be reached", "the store refuses the request"
_CREDENTIALS = {
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
}
# Parts of the names of exceptions of aiohttp, botocore and google-auth.
_UNKNOWN = re.compile(r"CredentialsError|RefreshError|ProfileNotFound|Token\w*Error")
_UNREACHED = re.compile(r"Connect\w*Error|Timeout\w*Error|TransportError|ServerDisconnectedError")
# Answers that a store gives for a while: too many requests, or a fault of the store.
_BUSY = re.compile(
    r"\b(429|50[0234])\b|SlowDown|ServiceUnavailable|InternalError|Too ?Many ?Requests|backendError"
    r"|reduce your request rate",
    re.IGNORECASE,
)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a place is the URL of a bucket instead of a local path.

    Raises:
        UserError: the place is a URL whose scheme is not supported.
    """
    match = _URL.match(os.fspath(path))
    if match is None:
        return False
    if match[1] not in SCHEMES:
        raise UserError(
            f"{os.fspath(path)}: {match[0]} is not supported; give a local path, or an address "
            f"that begins with {' or '.join(f'{name}://' for name in SCHEMES)}"
        )
    return True


def scheme_of(url: str) -> str:
    """Returns the scheme of a URL, such as ``gs``."""
    return url.partition("://")[0]


def join(url: str, *names: str) -> str:
    """Appends names to a URL or path, with slashes between them."""
    return "/".join([url.rstrip("/"), *names])


@functools.cache
def file_system(scheme: str) -> Any:
    """Returns fsspec's file system for a scheme.

    Raises:
        UserError: the package of the file system is not installed, or there are no credentials.
    """
    package, extra = SCHEMES[scheme]
    # Listings are not cached, because other hosts write, too. This setting also applies to
    # etils.epath.
    import fsspec

    for name in (scheme, "gcs") if scheme == "gs" else (scheme,):
        fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        with explain_store_errors(f"{scheme}://"):
            fs = fsspec.filesystem(scheme)
    except ImportError:
        raise missing(f"a place that begins with {scheme}://", package, extra) from None
    # These packages log a traceback for each failed request, in addition to the exception.
    for name in ("gcsfs", "gcsfs.retry", "s3fs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return fs


def url_to_fs(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path of the URL in this file system."""
    scheme, _, path = url.partition("://")
    return file_system(scheme), path.rstrip("/")


@contextlib.contextmanager
def explain_store_errors(url: str) -> Iterator[None]:
    """Converts errors of a store to `UserError`; other exceptions pass unchanged.

    Args:
        url: URL that the error message names.

    Raises:
        UserError: the bucket or object does not exist, access is forbidden, or there are no
            credentials.
        Outage: the store cannot be reached, or has refused the request for about a minute because
            of a fault of its own or too many requests.
    """
    try:
        yield
    except (UserError, ImportError):
        raise
    except Exception as error:
        if (reason := _reason(url, error)) is None:
            raise
        passes = reason.startswith((_OUT_OF_REACH, _REFUSED)) and _is_outage(error)
        raise (Outage if passes else UserError)(f"{url}: {reason}") from error


def _is_outage(error: Exception) -> bool:
    """Returns whether the error of a request shows an outage of the store."""
    causes = list(causes_of(error))
    names = " ".join(kind.__name__ for cause in causes for kind in type(cause).__mro__)
    codes = [str(getattr(cause, name, "")) for cause in causes for name in ("code", "status")]
    return bool(_UNREACHED.search(names) or _BUSY.search(" ".join([str(error), *codes])))


def _reason(url: str, error: Exception) -> str | None:
    """Explains an error and its remedy; returns None if a store did not cause the error."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or (isinstance(error, OSError) and error.filename is not None):
        return None  # an error of a local file; errors of `write` have no name
    kinds = {kind.__name__ for cause in causes_of(error) for kind in type(cause).__mro__}
    names = " ".join(kinds)
    text = " ".join(str(error).split())[:200]
    credentials = _CREDENTIALS.get(scheme_of(url), "check the credentials")
    if _UNKNOWN.search(names) or re.search(r"\b401\b|Anonymous caller|InvalidAccessKeyId", text):
        return f"no valid credentials ({text}); {credentials}"
    if "PermissionError" in kinds or re.search(r"\b403\b|Forbidden|AccessDenied", text):
        return f"permission denied ({text}); ask for permission to read, write, list and delete"
    if "FileNotFoundError" in kinds or re.search(r"\b404\b|NoSuchBucket", text):
        return "there is no such bucket or object; correct the address, or create the bucket"
    if _UNREACHED.search(names):
        return f"{_OUT_OF_REACH} ({text}); check the network, and run the command again"
    if isinstance(error, OSError) or kinds & {"HttpError", "ClientError", "BotoCoreError"}:
        return f"{_REFUSED} ({type(error).__name__}: {text})"
    return None


def check_reachable(url: str) -> None:
    """Sends a request for a URL, so that a command can report errors of the store at its start.

    Args:
        url: a URL; its object need not exist. A local path is not checked.

    Raises:
        UserError: the bucket does not exist, cannot be reached, or refuses access.
    """
    if not is_url(url):
        return
    fs, path = url_to_fs(url)
    # If the URL is a pattern, the folder before the first wildcard is checked.
    fixed = re.split(r"[*?\[]", path)[0]
    path = path if fixed == path else fixed.rpartition("/")[0]
    bucket = path.partition("/")[0]
    if not bucket:
        raise UserError(f"{url}: the bucket is missing; give {scheme_of(url)}://BUCKET/FOLDER")
    with explain_store_errors(url):
        try:
            fs.ls(path, detail=False)
        except FileNotFoundError:
            if not fs.exists(bucket):
                raise UserError(
                    f"{url}: there is no bucket {bucket!r}, or these credentials have no access to "
                    "it; create the bucket, or correct the address"
                ) from None


def check_writable(url: str) -> None:
    """Checks that objects can be written below a URL, by writing and removing an object.

    Raises:
        UserError: the bucket does not exist, cannot be reached, or refuses access.
    """
    check_reachable(url)
    fs, probe = url_to_fs(join(url, f".writable-{secrets.token_hex(4)}"))
    with explain_store_errors(url):
        fs.pipe_file(probe, b"?")
        fs.rm_file(probe)
