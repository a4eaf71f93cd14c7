"""Keys are used, but never shown."""

from __future__ import annotations

import copy
import json

import pytest

from coa_jax.errors import UserError
from coa_jax.tools.net.secrets import HIDDEN, Secret

KEY = "sk-very-secret-0123456789"


def test_a_secret_is_revealed_only_on_purpose(monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    secret = Secret("SOME_KEY")
    assert secret and secret.reveal() == KEY
    for view in (repr(secret), str(secret), f"{secret}", repr({"k": secret}), repr([secret])):
        assert KEY not in view
    assert KEY not in repr(copy.copy(secret))
    with pytest.raises(TypeError):
        json.dumps(secret)


def test_a_key_that_a_server_repeats_is_hidden_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    value = {"error": f"bad key {KEY}!", KEY: [f"x{KEY}y", 3, None, {"a": (KEY,)}]}
    shown = Secret("SOME_KEY").redact(value)
    assert shown == {
        "error": f"bad key {HIDDEN}!",
        HIDDEN: [f"x{HIDDEN}y", 3, None, {"a": [HIDDEN]}],
    }


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_key_is_explained(monkeypatch, value):
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    secret = Secret("SOME_KEY")
    assert not secret
    assert secret.redact("text") == "text"
    with pytest.raises(UserError, match="SOME_KEY is not set"):
        secret.reveal()


def test_without_a_name_there_is_no_secret():
    assert not Secret("")
    assert Secret("").redact("text") == "text"
