"""Defines the metrics of a server for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from coa_jax.serve.samples import Event, ServedRequest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """The Prometheus metrics of one server, summed over its policies."""

    def __init__(self) -> None:
        """Creates the metrics, all at zero."""
        self._policies: list[tuple[int, Callable[[], int]]] = []
        self._registry = r = CollectorRegistry()
        self.requests = Counter(
            "coa_jax_requests",
            "Requests by route and HTTP status.",
            ["route", "status"],
            registry=r,
        )
        self.completions = Counter(
            "coa_jax_completions", "Finished samples by reason.", ["reason"], registry=r
        )
        self.prompt_tokens = Counter(
            "coa_jax_prompt_tokens", "Tokens of the prompts of finished samples.", registry=r
        )
        self.generated_tokens = Counter(
            "coa_jax_generated_tokens", "Tokens of finished samples after the prompt.", registry=r
        )
        self.tool_calls = Counter(
            "coa_jax_tool_calls", "Tool calls of agents.", ["tool", "outcome"], registry=r
        )
        running = Gauge("coa_jax_running", "Samples in slots.", registry=r)
        running.set_function(lambda: sum(min(count(), slots) for slots, count in self._policies))
        waiting = Gauge("coa_jax_waiting", "Samples that wait for a slot.", registry=r)
        waiting.set_function(
            lambda: sum(max(count() - slots, 0) for slots, count in self._policies)
        )
        self._slots = Gauge("coa_jax_slots", "Samples that run at a time.", registry=r)
        timed = functools.partial(Histogram, buckets=_SECONDS, registry=r)
        self.first_text = timed("coa_jax_first_text_seconds", "From a request to the first text.")
        self.seconds = timed("coa_jax_request_seconds", "From a request to its end.")

    def watch(self, slots: int, samples: Callable[[], int]) -> None:
        """Adds a policy.

        Args:
            slots: number of samples of the policy that can run at a time.
            samples: function that returns the number of its samples that wait or run.
        """
        self._policies.append((slots, samples))
        self._slots.inc(slots)

    def finished(self, served: ServedRequest, event: Event) -> None:
        """Counts a sample that has ended, with its tokens and tool calls.

        Args:
            served: request of the sample.
            event: last event of the sample.
        """
        assert event.trajectory is not None
        self.completions.labels(str(event.trajectory.stop_reason)).inc()
        self.prompt_tokens.inc(len(served.prompt))
        self.generated_tokens.inc(len(event.trajectory.tokens) - len(served.prompt))
        for call in event.trajectory.tool_calls:
            self.tool_calls.labels(call.tool, call.outcome).inc()

    def text(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
