r"""Distils Factbook questions from a language model behind an OpenAI-compatible endpoint.

    coa-jax distill --config=configs/distill/endpoint.py --workdir=runs/endpoint

Needs: the extra ``endpoint`` and a server with ``/v1/chat/completions``, such as vLLM or a cloud
service. Name the server by ``--config.endpoint.url=... --config.endpoint.model=...``. The API key
is read from the environment variable that ``endpoint.key_env`` names.
Takes: ten to thirty calls of the model per task; ``teacher.concurrency`` tasks run at the same
time.
Gives: the files of configs/distill/factbook.py and ``calls/SPLIT.jsonl`` with every prompt and
reply. The run stops before a call that would exceed ``endpoint.max_calls``, ``max_total_tokens`` or
``max_money``. ``max_money`` needs ``endpoint.prices``; the price below is an example. If the
command is started again, it continues, and no recorded reply is paid twice.

The variant ``endpoint.py:smolagents`` lets smolagents solve the tasks, a CodeAgent that manages a
search agent, with the extra ``distill``. It writes their memory to ``smolagents/SPLIT.jsonl``, and
then the files of configs/distill/traces.py.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.distillation.endpoint import EndpointConfig
from coa_jax.distillation.smolagents_runs import SmolConfig
from coa_jax.run.variants import parse_variants

_MODEL = "Qwen/Qwen2.5-72B-Instruct"


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration of the team, or of ``smolagents``."""
    (system,) = parse_variants(arg, ("", "smolagents"))
    config = load_config("configs/distill/factbook.py").unlock()
    config.tasks.update(train=200, validation=50)
    server = {"url": "http://localhost:8000/v1", "model": _MODEL, "prices": ((_MODEL, 0.0, 0.0),)}
    config.endpoint = complete_config(EndpointConfig, {**server, "max_calls": 20_000})
    if system:
        config.smolagents = complete_config(SmolConfig, {})
        config.traces = load_config("configs/distill/traces.py").traces
        config.traces.update(format="smolagents", protocol="generalist")
        # The protocol demands thoughts and a double check, which smolagents does not write. They
        # are invented, and marked in the records.
        config.traces.completion.update(thoughts=True, verification=True)
    return config
