"""Reads and writes the origin of a model: the YAML header of the file ``README.md`` in its folder.

The header is that of the cards of the Hugging Face Hub. A folder holds a *copy* of a model of the
Hub if the header names this model as ``base_model``, with the ``base_model_relation`` ``quantized``
or ``copy``. The key ``base_weights``, which is not a key of the Hub, says how the weights of the
base model differ from the weights on the Hub. Adapters keep this key, so loading finds the copy.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files.untrusted import SMALL
from coa_jax.storage.hub import ID, hub_id, model_folder

FETCHED = Path("weights")
"""Folder in the working directory with the folders of models that ``coa-jax fetch`` writes."""

_ABOUT = ("license", "license_name", "license_link", "language")
_COPIES = ("quantized", "copy")


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a model says about where it comes from.

    Attributes:
        place: the model: a path, a URL, or an id of the Hugging Face Hub.
        name: id of the model on the Hub (``Org/Name``), also if ``place`` is a copy of this model;
            "" if the model is not known to be on the Hub.
        base: id of the model on the Hub from which the weights come: ``name``, or the base model of
            a model that was trained further; "" if unknown.
        weights: how the weights that this package uses for ``base`` differ from those on the Hub,
            for example "quantised"; "" if they do not differ.
        about: license and language of the model, as far as known, by their keys in model cards.
    """

    place: str
    name: str = ""
    base: str = ""
    weights: str = ""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def origin_of(source: str | os.PathLike[str]) -> Origin:
    """Returns the origin of a model, which its folder or its repository on the Hub states.

    Args:
        source: a local path, a URL, or an id of the Hub. The card of a model of the Hub is
            downloaded unless the cache has it.
    """
    text = os.fspath(source)
    # The commands of this package write models to these folders, which need not exist here.
    hub_name = None if text.startswith(("weights/", "runs/")) else hub_id(text)
    try:
        header = read_header(model_folder(text, weights=False) if text else Path())
    except UserError:  # an origin is not worth an error
        header = {}
    about = {key: header[key] for key in _ABOUT if key in header}
    if hub_name is not None:
        return Origin(text, hub_name[0], hub_name[0], "", about)
    base, relation = header.get("base_model"), header.get("base_model_relation")
    if not isinstance(base, str) or not ID.fullmatch(base):
        return Origin(text, about=about)
    weights = str(header.get("base_weights") or ("quantised" if relation == "quantized" else ""))
    return Origin(text, base if relation in _COPIES else "", base, weights, about)


def local_copy(name: str, weights: str, folder: Path) -> Path | None:
    """Finds a local copy of the base model of an adapter; returns its folder, or None.

    The folders in ``weights`` are searched first, and then the folder ``base`` beside the adapter.

    Args:
        name: id of the base model on the Hub.
        weights: how the weights of the copy differ from those on the Hub, as in `Origin`.
        folder: folder of the adapter.
    """
    for candidate in (*sorted(FETCHED.glob("*")), folder.parent / "base"):
        origin = origin_of(candidate)
        if (origin.name, origin.weights) == (name, weights):
            return candidate
    return None


def read_header(folder: Path) -> dict[str, Any]:
    """Reads the YAML header of the card of a model or a data set.

    Args:
        folder: folder that contains the card, ``README.md``, or a file in this folder.

    Returns:
        The header; {} if there is no card, or its header cannot be parsed.
    """
    card = (folder.parent if folder.is_file() else folder) / "README.md"
    if not card.is_file() or card.stat().st_size > SMALL:
        return {}
    from huggingface_hub import metadata_load

    try:
        return metadata_load(card) or {}
    except Exception:  # YAML of strangers raises errors of many classes
        return {}


def with_header(header: Mapping[str, Any], text: str) -> str:
    """Returns the content of a card: the header as YAML, without empty values, and the text."""
    from huggingface_hub import CardData

    values = {key: value for key, value in header.items() if value not in ("", None, [], {})}
    return f"---\n{CardData(**values).to_yaml()}\n---\n\n{text}"
