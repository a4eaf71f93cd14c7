r"""Generates questions with checked answers from any corpus, with a language model.

    coa-jax synthesize --config=configs/synthesize/endpoint.py --workdir=runs/questions

Needs: the extra ``endpoint``, an OpenAI-compatible endpoint (``endpoint.url``, ``endpoint.model``)
and a corpus (``tools.wiki_search.corpus=FILE.jsonl``; the Factbook if none is given).
Takes: for each question, one call of the model to write the question, ten to thirty calls for the
team that solves it with tools, and ``without_tools.samples`` (32) calls for the answers without
tools. ``synthesis.batch`` questions are processed at the same time.
Gives: the files of configs/synthesize/factbook.py and ``calls/`` with every request and reply.

``config.solver`` is the model that answers without tools (Qwen2.5-72B-Instruct in the paper). If
``solver.url`` or ``solver.model`` is empty, the value of ``endpoint`` is used. If ``solver.url`` is
empty, ``endpoint.key_env`` is used, too. Prices that ``solver.prices`` lacks are taken from
``endpoint.prices``. Each of the two models has its own budget. A judge (``judge.chat.url`` and
``judge.chat.model``) decides if the answer of the team does not literally equal the accepted
answer.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.distillation.endpoint import EndpointConfig

_MODEL = "Qwen/Qwen2.5-72B-Instruct"


def get_config() -> ConfigDict:
    """Returns the configuration."""
    config = load_config("configs/synthesize/factbook.py").unlock()
    config.tools.names, config.without_tools.who = ("wiki_search",), "endpoint"
    config.synthesis.update(batch=16, candidates=3)
    config.with_tools.attempts = 2
    server = {"url": "http://localhost:8000/v1", "model": _MODEL, "prices": ((_MODEL, 0.0, 0.0),)}
    # The empty name is an example of the form; it prices no model.
    solver = {"key_env": "", "temperature": 1.0, "prices": (("", 0.0, 0.0),)}
    config.endpoint = complete_config(EndpointConfig, {**server, "max_calls": 50_000})
    config.solver = complete_config(EndpointConfig, {**solver, "max_calls": 50_000})
    return config
