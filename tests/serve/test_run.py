"""Construction of a server."""

from __future__ import annotations

import dataclasses

import pytest

from coa_jax.engine.memory import engine_memory
from coa_jax.protocol import spec
from coa_jax.serve import run
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


def test_slots_share_the_pages_that_memory_holds(tmp_path, monkeypatch):
    path = str(tiny_policy.write_untrained(tmp_path / "model", tiny_policy.records()))
    shapes = dataclasses.replace(CONFIG.engine, slots=0)
    config = dataclasses.replace(CONFIG, model=path, engine=shapes)
    (service,) = make_services(config, ToolsConfig())
    ample = service.engines[0].config
    assert (sum(engine.config.slots for engine in service.engines), ample.pages) == (64, 0)
    few = dataclasses.replace(shapes, slots=8, pages=24)  # each slot could take 2 pages
    needed = engine_memory(service.model.config, few).total
    monkeypatch.setattr(run, "free_memory", lambda device: needed)
    (service,) = make_services(config, ToolsConfig())
    (engine,) = service.engines
    assert engine.config.pages
    assert engine_memory(service.model.config, engine.config).total <= needed
