"""Buckets without a cloud: servers that speak the protocols of Google Cloud Storage and of S3."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

BUCKET = "bucket"
SCHEMES = ("gs", "s3")


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _conditional(handler: Callable[..., None]) -> Callable[..., None]:
    """A route of the emulator that obeys and tells generations, as the real store does.

    The emulator has generations but ignores the conditions ``ifGenerationMatch`` and
    ``ifGenerationNotMatch``, and answers reads without the header ``x-goog-generation``.
    """

    def generation(request: Any, storage: Any) -> str:
        name = request.params.get("object_id") or request.query.get("name", [""])[0]
        if not name:
            name = request.data["meta"]["name"]
        found = storage.objects.get(request.params["bucket_name"], {}).get(name, {})
        return str(found.get("generation", "0"))

    def handle(request: Any, response: Any, storage: Any, *rest: Any) -> None:
        wanted, unwanted = (
            request.query.get(name, [None])[0]
            for name in ("ifGenerationMatch", "ifGenerationNotMatch")
        )
        here = generation(request, storage)
        if wanted not in (None, here):
            response.status = HTTPStatus.PRECONDITION_FAILED
            response.json({"error": {"code": 412, "message": "conditionNotMet"}})
        elif unwanted == here:
            response.status = HTTPStatus.NOT_MODIFIED
        else:
            handler(request, response, storage, *rest)
            response["x-goog-generation"] = generation(request, storage)

    return handle


@functools.cache
def _teach_conditions() -> None:
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers import objects

    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            if handler in (objects.insert, objects.get, objects.download, objects.delete):
                handlers[method] = _conditional(handler)


@contextlib.contextmanager
def emulators() -> Iterator[dict[str, str]]:
    """Starts both servers with an empty bucket each; the environment that leads to them."""
    import boto3
    from gcp_storage_emulator.server import create_server
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    _teach_conditions()
    google_port = free_port()
    google = create_server("127.0.0.1", google_port, in_memory=True, default_bucket=BUCKET)
    amazon = ThreadedMotoServer("127.0.0.1", free_port(), verbose=False)
    google.start()
    amazon.start()
    google_url = f"http://127.0.0.1:{google_port}"
    amazon_url = "http://{}:{}".format(*amazon.get_host_and_port())
    client = boto3.client(
        "s3",
        endpoint_url=amazon_url,
        aws_access_key_id="x",
        aws_secret_access_key="x",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield {
            "STORAGE_EMULATOR_HOST": google_url,
            "TENSORSTORE_GCS_HTTP_URL": google_url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            # Or gcsfs asks over gRPC for the kind of the bucket, and waits for a minute.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "AWS_ENDPOINT_URL": amazon_url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        google.stop()
        amazon.stop()
