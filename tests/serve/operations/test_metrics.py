import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from serve.operations.metrics import STAGES, Metrics


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.observe_request("/invocations", "digits", 200, 0.02)
    metrics.observe_request("/invocations", "digits", 200, 0.2)
    metrics.observe_request("", "", 404, 0.001)
    metrics.in_flight.inc()
    metrics.queue_depth.labels("digits").set(3)
    metrics.batch_size.observe(8)
    metrics.stages.labels("engine").observe(0.5)
    metrics.reloads.labels("digits", "swapped").inc()
    metrics.model_info.labels("digits", "7", "onnx").set(1)
    return metrics


def test_what_was_counted_is_read_by_a_parser_with_these_numbers(metrics: Metrics) -> None:
    body, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in parse_text(body.decode())}
    values = {(s.name, tuple(s.labels.values())): s.value for family in families.values() for s in family.samples}
    assert values["serve_requests_total", ("digits", "/invocations", "200")] == 2
    assert values["serve_requests_total", ("none", "other", "404")] == 1
    assert values["serve_request_duration_seconds_count", ("/invocations",)] == 2
    assert values["serve_request_duration_seconds_sum", ("/invocations",)] == pytest.approx(0.22)
    assert values["serve_request_duration_seconds_bucket", ("0.1", "/invocations")] == 1
    assert values["serve_request_duration_seconds_bucket", ("0.25", "/invocations")] == 2
    assert values["serve_batch_images_bucket", ("4.0",)] == 0
    assert values["serve_batch_images_bucket", ("8.0",)] == 1
    assert values["serve_queue_images", ("digits",)] == 3
    assert values["serve_requests_in_flight", ()] == 1
    assert values["serve_reloads_total", ("digits", "swapped")] == 1
    assert values["serve_model_info", ("onnx", "digits", "7")] == 1
    assert values["process_resident_memory_bytes", ()] > 1e6
    assert values["process_cpu_seconds_total", ()] > 0
    assert values["process_open_fds", ()] > 0
    assert ("python_gc_collections_total", ("0",)) in values
    assert not any(name.endswith("_created") for name, _ in values)


def test_names_follow_prometheus_and_every_series_explains_itself(metrics: Metrics) -> None:
    ours = [family for family in metrics.registry.collect() if family.name.startswith("serve_")]
    assert len(ours) == 10
    for family in ours:
        assert family.documentation.endswith("."), family.name
        if "seconds" in family.documentation.lower():
            assert family.name.endswith("_seconds"), family.name
        if family.type == "counter":
            assert {sample.name for sample in family.samples} <= {f"{family.name}_total"}


def test_openmetrics_is_given_to_who_accepts_it(metrics: Metrics) -> None:
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    assert "serve_requests" in {family.name for family in parse_openmetrics(body.decode())}


@pytest.mark.parametrize("accept", ["*/*", "text/html", "\x00", "text/plain; version=x", "a" * 1000])
def test_any_other_wish_gets_text(metrics: Metrics, accept: str) -> None:
    body, content_type = metrics.render(accept)
    assert content_type.startswith("text/plain; version=")
    assert body.startswith(b"# HELP ")


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.stages.labels(STAGES[0]).observe(1)
    assert second.registry.get_sample_value("serve_stage_duration_seconds_count", {"stage": STAGES[0]}) is None
