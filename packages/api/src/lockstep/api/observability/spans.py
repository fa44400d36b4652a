"""OpenTelemetry spans of requests, sent to a collector over HTTP. Needs the extra `otel` of lockstep-api.

    lockstep serve --otlp-endpoint http://127.0.0.1:4318/v1/traces

Each request that reached the engine has one span, a child of the request's `traceparent`, and below it one span for
each of its phases: queue, prefill, decode. Names of attributes are those of the semantic conventions for generative AI
where these define one, and those of vLLM's spans where vLLM's tools read them.

Spans are made when an answer has ended, from times that are recorded in any case, and sent by a thread of their own. An
unreachable collector has no effect but log lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lockstep.api.observability.served import Served
from lockstep.core.contract.errors import ConfigError

SECONDS_NS = 1_000_000_000
HINT = 'pip install "lockstep-api[otel]"'


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError if the exporter is not installed or the endpoint is not a URL."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"`otlp_endpoint` must be a URL, got `{endpoint}`\nhint: http://127.0.0.1:4318/v1/traces")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401  # only whether they can be imported
    except ImportError as error:
        raise ConfigError(f"`otlp_endpoint` needs OpenTelemetry's SDK: {error}\nhint: {HINT}") from error


class SpanExporter:
    """Sends spans to a collector.

    Args:
        endpoint: URL of a collector, such as http://127.0.0.1:4318/v1/traces.
        model: returns the name of the model in answers; called when an answer has ended.
        service: name of this server at the collector; OTEL_SERVICE_NAME takes precedence.
    """

    def __init__(self, endpoint: str, model: Callable[[], str], service: str = "lockstep") -> None:
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else {"service.name": service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("lockstep.api")

    def add(self, served: Served) -> None:
        """Make the spans of a request, if it reached the engine."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        generation = served.generation
        if generation is None or not generation.choices:
            return
        ended_ns = round(served.ended_at_s * SECONDS_NS)
        began_ns = ended_ns - round(served.took_s * SECONDS_NS)
        above = TraceContextTextMapPropagator().extract(dict(served.headers))
        span = self._tracer.start_span(
            f"{served.method} {served.path}",
            context=above,
            kind=SpanKind.SERVER,
            start_time=began_ns,
            attributes=self._attributes(served),
        )
        inside, phases = set_span_in_context(span), served.phases
        at_ns = ended_ns - 1000 * sum(max(us, 0) for us in (phases.queue_us, phases.prefill_us, phases.decode_us))
        at_ns = max(at_ns, began_ns)  # engine times end with the answer, but for the transport of a token
        for name, took_us in (
            ("queue", phases.queue_us),
            ("prefill", phases.prefill_us),
            ("decode", phases.decode_us),
        ):
            if took_us >= 0:
                self._tracer.start_span(name, context=inside, start_time=at_ns).end(at_ns + 1000 * took_us)
                at_ns += 1000 * took_us
        span.end(ended_ns)

    def _attributes(self, served: Served) -> dict[str, Any]:
        row, phases = served.row(), served.phases
        parameters = served.generation.parameters if served.generation is not None else None
        found: dict[str, Any] = {
            "gen_ai.system": "lockstep",
            "gen_ai.request.model": self._model(),
            "gen_ai.request.id": served.request_id,
            "gen_ai.response.id": served.label,
            "gen_ai.usage.input_tokens": row["prompt_tokens"],
            "gen_ai.usage.output_tokens": row["output_tokens"],
            "gen_ai.usage.prompt_tokens": row["prompt_tokens"],
            "gen_ai.usage.completion_tokens": row["output_tokens"],
            "gen_ai.response.finish_reasons": row["reasons"],
            "gen_ai.latency.e2e": served.took_s,
            "http.request.method": served.method,
            "http.route": served.path,
            "http.response.status_code": served.status,
            "lockstep.cached_tokens": row["cached_tokens"],
        }
        if parameters is not None and parameters.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = parameters.max_tokens
        for name, took_us in (
            ("time_in_queue", phases.queue_us),
            ("time_in_model_prefill", phases.prefill_us),
            ("time_in_model_decode", phases.decode_us),
        ):
            if took_us >= 0:
                found[f"gen_ai.latency.{name}"] = took_us / 1e6
        return found

    def close(self) -> None:
        """Send the remaining spans and stop."""
        self._provider.shutdown()
