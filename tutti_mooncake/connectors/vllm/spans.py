"""OpenTelemetry spans of loads, by vLLM's own tracer: one `tutti.load` per load, inside the trace that the request came with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm import tracing

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class Spans:
    """Makes spans when `--otlp-traces-endpoint` is set and OpenTelemetry is installed; else does nothing."""

    def __init__(self, vllm_config: VllmConfig | None) -> None:
        endpoint = None if vllm_config is None else vllm_config.observability_config.otlp_traces_endpoint
        self.enabled = bool(endpoint) and tracing.is_tracing_available()

    def load(self, request: Request, seconds: float, attributes: dict[str, Any]) -> None:
        """A load that took `seconds` and ends now."""
        if not self.enabled:
            return
        end = time.time_ns()
        tracing.instrument_manual(
            "tutti.load",
            end - int(seconds * 1e9),
            end,
            {"gen_ai.request.id": request.request_id, **attributes},
            tracing.extract_trace_context(request.trace_headers),
        )
