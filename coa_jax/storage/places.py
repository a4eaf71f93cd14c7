"""Places by URL: which store a URL names, its file system, and one line for what goes wrong there.

The file systems are those of fsspec.  Orbax reaches buckets through them too (by etils.epath); they
add ranges of bytes and creation of objects that must not exist, which etils.epath lacks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
from collections.abc import Iterator
from typing import Any

from coa_jax.errors import UserError
from coa_jax.installed import missing

SCHEMES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""Scheme of a bucket -> its package, and the extra of setup.py that brings the package."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CREDENTIALS = {
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
}
_UNKNOWN = (
    *("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"),
    *("RefreshError", "ProfileNotFound", "TokenRetrievalError", "UnauthorizedSSOTokenError"),
)
_UNREACHED = (
    *("ClientConnectorError", "EndpointConnectionError", "ConnectTimeoutError", "TransportError"),
    *("ClientConnectorDNSError", "ServerDisconnectedError", "ConnectionError", "ConnectError"),
    *("ServerTimeoutError", "ConnectionTimeoutError", "ReadTimeoutError", "TimeoutError"),
)


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a place is in a bucket.

    Raises:
        UserError: the URL has a scheme that is not supported.
    """
    found = _URL.match(os.fspath(place))
    if found is None:
        return False
    if found[1] not in SCHEMES:
        raise UserError(
            f"{os.fspath(place)}: {found[0]} is not supported; give a local path, or an address "
            f"that begins with {' or '.join(f'{name}://' for name in SCHEMES)}"
        )
    return True


def scheme_of(url: str) -> str:
    """The scheme of a URL, such as ``gs``."""
    return url.partition("://")[0]


def join(url: str, *names: str) -> str:
    """A URL below another one."""
    return "/".join([url.rstrip("/"), *names])


@functools.cache
def file_system(scheme: str) -> Any:
    """The fsspec file system of a scheme.

    Raises:
        UserError: its package is not installed, or it finds no credentials.
    """
    package, extra = SCHEMES[scheme]
    # Other hosts write too.  The instances that etils.epath makes obey this as well.
    import fsspec

    for name in (scheme, "gcs") if scheme == "gs" else (scheme,):
        fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        with telling(f"{scheme}://"):
            found = fsspec.filesystem(scheme)
    except ImportError:
        raise missing(f"a place that begins with {scheme}://", package, extra) from None
    # They print a traceback for each request that fails at last, which is raised as well.
    for name in ("gcsfs", "gcsfs.retry", "s3fs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return found


@contextlib.contextmanager
def telling(url: str) -> Iterator[None]:
    """Turns what a store answers into a `UserError` about a URL; other errors pass.

    Raises:
        UserError: there is no such bucket or object, it is forbidden, there are no credentials, or
            the store is out of reach.
    """
    try:
        yield
    except (UserError, ImportError):
        raise
    except Exception as error:
        if (reason := _reason(url, error)) is None:
            raise
        raise UserError(f"{url}: {reason}") from error


def _reason(url: str, error: Exception) -> str | None:
    """What is wrong and what to do about it; None for an error that is none of a store."""
    if isinstance(error, OSError) and error.filename is not None:
        return None  # of a local file: a full disk, for example
    scheme, causes = scheme_of(url), list(_chain(error))
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    text = " ".join(str(error).split())[:200]
    credentials = _CREDENTIALS.get(scheme, "check the credentials")
    if names & set(_UNKNOWN) or re.search(r"\b401\b|Anonymous caller|InvalidAccessKeyId", text):
        return f"no valid credentials ({text}); {credentials}"
    if "PermissionError" in names or re.search(r"\b403\b|Forbidden|AccessDenied", text):
        return f"permission denied ({text}); ask for the right to read, write, list and delete"
    if "FileNotFoundError" in names or re.search(r"\b404\b|NoSuchBucket", text):
        return "there is no such bucket or object; mend the address, or make the bucket"
    if names & set(_UNREACHED):
        return f"the store is out of reach ({text}); check the network, then run the command again"
    if isinstance(error, OSError) or names & {"HttpError", "ClientError", "BotoCoreError"}:
        return f"the store refuses ({type(error).__name__}: {text})"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check(url: str) -> None:
    """Asks the store for a URL, which need not be there, so that faults show at the start.

    Raises:
        UserError: see `telling`.
    """
    if not is_url(url):
        return
    # The folder before the first part that is a pattern.
    fixed = re.split(r"[*?\[]", url.partition("://")[2])[0]
    place = fixed.rpartition("/")[0] if fixed != url.partition("://")[2] else fixed.rstrip("/")
    bucket = place.partition("/")[0]
    if not bucket:
        raise UserError(f"{url}: no bucket is named; give {scheme_of(url)}://BUCKET/FOLDER")
    fs = file_system(scheme_of(url))
    with telling(url):
        try:
            fs.ls(place, detail=False)
        except FileNotFoundError:
            _check_bucket(fs, url, bucket)


def check_writable(url: str) -> None:
    """Writes an object below a URL and removes it.

    Raises:
        UserError: see `telling`.
    """
    check(url)
    fs = file_system(scheme_of(url))
    probe = join(url, f".writable-{secrets.token_hex(4)}").partition("://")[2]
    with telling(url):
        fs.pipe_file(probe, b"?")
        fs.rm_file(probe)


def _check_bucket(fs: Any, url: str, bucket: str) -> None:
    if not fs.exists(bucket):
        raise UserError(
            f"{url}: there is no bucket {bucket!r}, or these credentials may not see it; make it "
            "or mend the address"
        )


def seconds_of(variable: str, default: float) -> float:
    """Reads a number of seconds from an environment variable.

    Raises:
        UserError: the value is not a number above 0 and below a day.
    """
    text = os.environ.get(variable, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86400:
        raise UserError(f"{variable} is {text!r}; give seconds above 0")
    return value
