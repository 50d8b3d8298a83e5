"""What Prometheus reads: one object for an application, handed to whatever has something to count."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

STAGES = ("read", "decode", "queue", "engine")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, that says only when it began
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """All series of one server. Every label's values are bounded: no client can add one.

    Attributes:
        requests: Answered requests by `route` (its template, "other" if there is none), `model` ("none" if it came to
            none) and `status` (499 if the client left before the answer).
        latency: Seconds from the head of a request to the end of its answer, by `route`.
        stages: Seconds in each of `STAGES`: reading the body, decoding, waiting, computing.
        batch_size: Images in each batch.
        queue_depth: Images that hold a place, by `model`.
        in_flight: Requests that are being answered.
        connections: Open connections.
        refused_connections: Those that were refused or cut before there was a request, by `reason`.
        model_info: 1 for each model version that answers, by `model`, `version` and `engine`.
        reloads: New versions by `model` and `outcome`: "swapped", "refused" or "unreachable".
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "serve_requests_total",
            "Answered requests; status 499: the client left first.",
            ["route", "model", "status"],
            registry=registry,
        )
        self.latency = Histogram(
            "serve_request_duration_seconds",
            "Seconds from a request's head to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.stages = Histogram(
            "serve_stage_duration_seconds",
            "Seconds of a request in each stage: read, decode, queue, engine.",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram("serve_batch_images", "Images in a batch.", buckets=_IMAGES, registry=registry)
        self.queue_depth = Gauge(
            "serve_queue_images", "Images that hold a place: decoded, waiting, computed.", ["model"], registry=registry
        )
        self.in_flight = Gauge("serve_requests_in_flight", "Requests that are being answered.", registry=registry)
        self.connections = Gauge("serve_connections", "Open connections.", registry=registry)
        self.refused_connections = Counter(
            "serve_connections_refused_total",
            "Connections refused or cut before a request was read, by reason.",
            ["reason"],
            registry=registry,
        )
        self.model_info = Gauge(
            "serve_model_info",
            "1 for each model version that answers.",
            ["model", "version", "engine"],
            registry=registry,
        )
        self.reloads = Counter(
            "serve_reloads_total",
            "New versions by outcome: swapped, refused, unreachable.",
            ["model", "outcome"],
            registry=registry,
        )
        ProcessCollector(registry=registry)  # CPU seconds, memory, open files, start
        GCCollector(registry=registry)

    def observe_request(self, route: str, model: str, status: int, seconds: float) -> None:
        """Count one answered request; `route` and `model` are names that this server knows, or empty."""
        self.requests.labels(route or "other", model or "none", str(status)).inc()
        self.latency.labels(route or "other").observe(seconds)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Write all series in the text format that the Accept header asks for.

        Returns:
            The body, and its content type.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # it compares a version that is none with numbers
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type
