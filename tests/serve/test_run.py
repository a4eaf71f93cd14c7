"""Construction of a server."""

from __future__ import annotations

import dataclasses

import pytest

from coa_jax.protocol import spec
from coa_jax.serve.run import make_services
from coa_jax.tools.make import ToolsConfig
from tests import tiny_policy
from tests.serve.live import CONFIG


@pytest.mark.parametrize("name", ["seaside", "seaside:paper"])
def test_a_server_speaks_the_protocol_that_its_tools_make(tmp_path, monkeypatch, name):
    monkeypatch.setattr(spec, "_PROTOCOLS", dict(spec._PROTOCOLS))
    model = tiny_policy.write_untrained(tmp_path / "model", tiny_policy.records())
    config = dataclasses.replace(CONFIG, model=str(model), protocol=name)
    (service,) = make_services(config, ToolsConfig(("code",), protocol="seaside"))
    assert service.config.protocol == name
    assert [tool.name for tool in service.tools] == ["code"]
