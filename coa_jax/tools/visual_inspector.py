"""Implements the tool ``visual_inspector``, which asks a vision model to describe an image.

The body of a call is a JSON object with ``file_path`` (a file in the allowed folder, or a URL) and
optionally ``question``. With a question, the vision model describes the details of the image that
are relevant to the question. It is told not to answer the question, because this is the task of the
policy.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import json
import os
import stat
import time
from pathlib import Path
from typing import Annotated, Any

from coa_jax.config.fields import Bounded, Place, Sparse
from coa_jax.config.preflight import Needs, declares
from coa_jax.errors import UserError
from coa_jax.protocol import parse_inspection
from coa_jax.storage import local
from coa_jax.tools.base import Observation, Outcome, Tool, ToolContext, observe, time_for
from coa_jax.tools.net.address import AddressGuard
from coa_jax.tools.net.chat import ChatConfig, chat, check_client
from coa_jax.tools.net.errors import FaultDetector, FetchError
from coa_jax.tools.net.http import HttpRequest, RequestLimits, fetch
from coa_jax.tools.net.text import clip_text

_BAD_CALL = (
    'The call could not be read. Write a JSON object such as {"file_path": "picture.png",'
    ' "question": "What is written on the sign?"}.'
)
_NOT_CONFIGURED = (
    "No model that can look at images is configured, so images cannot be inspected here. Go on"
    " without this tool."
)
_NO_IMAGE = "The file is no image of a known type (PNG, JPEG, GIF, WebP, BMP)."
_DESCRIBE = "Describe this image: what it shows, all text and figures on it, and how they relate."
_WITH_QUESTION = (
    "Describe what in this image bears on the question below: objects, text, figures, positions,"
    " colours. Do not answer the question, and say so where the image does not show what it asks"
    " for. The question: "
)

_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"BM": "image/bmp",
}
"""First bytes of an image file -> media type. The first bytes of WebP are not consecutive."""


_MAX_BYTES = 10 << 20
"""Maximum size of an image file in bytes."""
_MAX_CHARS = 6000
"""Maximum number of characters of an observation."""


@dataclasses.dataclass(frozen=True)
class VisualConfig(Bounded):
    """The settings of ``visual_inspector``: the vision model, and the images that may be opened.

    Attributes:
        chat: chat endpoint of the vision model. If its url is empty, every call fails with an
            explanation.
        folder: folder whose image files may be opened; "" allows no files.
        allow_hosts: hosts and networks that may be opened although they are not public, see
            `AddressGuard.allow`.
    """

    chat: Annotated[ChatConfig, Sparse()] = dataclasses.field(
        default_factory=lambda: ChatConfig(max_tokens=1000, timeout_s=60.0)
    )
    folder: Place = ""
    allow_hosts: tuple[Place, ...] = ()


class VisualInspector:
    """The tool ``visual_inspector``, which describes images with a vision model.

    Attributes:
        name: "visual_inspector".
        deadline: time limit of a call in seconds.
        settings: settings on which the answer to a call depends.
    """

    name = "visual_inspector"

    def __init__(self, config: VisualConfig):
        """Creates the tool.

        Raises:
            UserError: the folder does not exist, or openai is not installed.
        """
        if config.chat:
            check_client()
        self._folder = Path(local(config.folder)).expanduser().resolve() if config.folder else None
        if self._folder is not None and not self._folder.is_dir():
            raise UserError(f"visual_inspector.folder: {config.folder} is not a folder")
        self._config, self._blame = config, FaultDetector()
        self._limits = RequestLimits(total_s=min(30.0, config.chat.timeout_s), max_bytes=_MAX_BYTES)
        self.deadline = config.chat.timeout_s + 1.0
        model, places = config.chat, (str(self._folder), config.allow_hosts)
        request = (model.url, model.model, model.temperature, model.max_tokens)
        self.settings = json.dumps([*request, _MAX_CHARS, _MAX_BYTES, *places])

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Describes the image that the policy named between the tags."""
        start = time.monotonic()
        seen = functools.partial(observe, start)
        parsed = parse_inspection(arguments)
        if parsed is None:
            return seen(_BAD_CALL, "bad_call")
        if not self._config.chat:
            return seen(_NOT_CONFIGURED, "error")
        seconds = time_for(self._config.chat.timeout_s, context)
        path, question = parsed
        try:
            image = await self._image(path.strip(), seconds)
            kind = image_type(image)
            if kind is None:
                return seen(_NO_IMAGE, "error")
        except FetchError as error:
            failed: Outcome = "timeout" if error.kind == "timeout" else "error"
            return seen(f"The image cannot be opened: {error.message}.", failed)
        prompt = _DESCRIBE if not (question or "").strip() else f"{_WITH_QUESTION}{question}"
        data = f"data:{kind};base64,{base64.b64encode(image).decode()}"
        picture = {"type": "image_url", "image_url": {"url": data}}
        content = [{"type": "text", "text": prompt}, picture]
        left_s = max(seconds - (time.monotonic() - start), 0.001)
        try:
            text = await chat(self._config.chat, [{"role": "user", "content": content}], left_s)
        except FetchError as error:
            text = f"The image could not be looked at: {error.message}. Go on without it."
            return seen(text, self._blame.outcome(error))
        self._blame.answered()
        return seen(clip_text(text, _MAX_CHARS), "ok")

    async def _image(self, path: str, seconds: float) -> bytes:
        if path.lower().startswith(("http://", "https://")):
            request = HttpRequest(path, types=("image/", "application/octet-stream"))
            guard = AddressGuard(self._config.allow_hosts)
            return (await fetch(request, self._limits.within(seconds), guard)).body
        return await asyncio.to_thread(self._read, path)

    def _read(self, name: str) -> bytes:
        """Reads a file in the allowed folder. Symbolic links and ``..`` cannot leave the folder.

        Raises:
            FetchError: the file is outside, missing, too large, or not a regular file.
        """
        nowhere = FetchError("refused", "there is no such file where files may be read")
        if self._folder is None or "\0" in name or "://" in name:
            raise nowhere
        try:
            path = (self._folder / name).resolve(strict=True)
            if not path.is_relative_to(self._folder):
                raise nowhere
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, RuntimeError, ValueError) as error:  # invalid names raise ValueError
            raise nowhere from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise nowhere
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise FetchError("too_large", "the file is too large")
        return content


def image_type(content: bytes) -> str | None:
    """Returns the media type of an image, which its first bytes determine.

    The result is None if the content is not an image of a supported type.
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _IMAGES.items() if content.startswith(start)), None)


def needs(config: Any) -> Needs:
    """Returns the package, server and key of the vision model."""
    return config.visual_inspector.chat.needs().under("visual_inspector.chat")


async def probe(config: Any, seconds: float) -> tuple[bool, str]:
    """Checks whether the tool can be called, see `config.preflight`."""
    visual = config.visual_inspector
    if not visual.chat:
        return False, "no model is configured: give tools.visual_inspector.chat.url and .model"
    ok, text = await visual.chat.probe(seconds)
    return ok, f"{text}; files: {visual.folder or 'none'}"


@declares(needs, probe)
def make_tool(config: Any) -> Tool:
    """Creates ``visual_inspector``, which asks a vision model about images."""
    return VisualInspector(config.visual_inspector)
