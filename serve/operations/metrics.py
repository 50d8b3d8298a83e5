"""What Prometheus reads: one object for an application, handed to whatever has something to count."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STAGES = ("read", "decode", "queue", "engine")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All series of one server.

    Attributes:
        requests: Answered requests by `route`, `model` and `status`.
        latency: Seconds from the head of a request to the end of its answer, by `route`.
        stages: Seconds in each of `STAGES`: reading the body, decoding, waiting, computing.
        batch_size: Images in each batch.
        queue_depth: Images that hold a place, by `model`.
        in_flight: Requests that are being answered.
        model_info: 1 for each model version that answers, by `model`, `version` and `engine`.
        reloads: New versions by `model` and `outcome`: "swapped", "refused" or "unreachable".
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("serve_requests", "Answered requests.", ["route", "model", "status"], registry=registry)
        self.latency = Histogram(
            "serve_request_seconds", "Head to end of answer.", ["route"], buckets=_SECONDS, registry=registry
        )
        self.stages = Histogram("serve_stage_seconds", "Time by stage.", ["stage"], buckets=_SECONDS, registry=registry)
        self.batch_size = Histogram(
            "serve_batch_images", "Images in a batch.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.queue_depth = Gauge("serve_queue_images", "Images that hold a place.", ["model"], registry=registry)
        self.in_flight = Gauge("serve_requests_in_flight", "Requests being answered.", registry=registry)
        self.model_info = Gauge(
            "serve_model_info", "1 for what answers.", ["model", "version", "engine"], registry=registry
        )
        self.reloads = Counter("serve_reloads", "New versions, by outcome.", ["model", "outcome"], registry=registry)

    def render(self) -> bytes:
        """Write all series in Prometheus' text format."""
        return generate_latest(self.registry)
