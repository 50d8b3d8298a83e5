"""A PostgreSQL that trainings write to without a server between: what `Tracker.check` makes of its faults."""

import pytest

from tests.deploy.postgres import PASSWORD, Cluster, find_programs, running_cluster
from train.config import TrackingConfig
from train.errors import TrackingError
from train.tracking import Tracker

pytestmark = pytest.mark.slow


def refused(uri: str) -> str:
    """Return the one line that a store is refused with."""
    with pytest.raises(TrackingError) as caught:
        Tracker(TrackingConfig(uri=uri)).check()
    said = str(caught.value)
    assert "\n" not in said
    for secret in (PASSWORD, "s3cret", "wrong"):
        assert secret not in said
    return said


def test_fault_of_a_database_is_one_line_without_the_password(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    there = f"tracking.uri postgresql://127.0.0.1:{cluster.port}"
    said = refused(cluster.uri("postgres", password="wrong"))
    assert said.startswith(f"{there}/postgres: cannot be used: ")
    assert 'password authentication failed for user "mlflow"' in said
    assert 'database "nowhere" does not exist' in refused(cluster.uri("nowhere"))
    other = refused(cluster.uri("postgres").replace("postgresql:", "postgresql+psycopg2:"))
    assert "its driver is missing (No module named 'psycopg2'); for postgresql://, install attention-zoo[post" in other
    assert "will be retried" not in caplog.text  # as MLflow does, ten times in a hundred seconds


def test_database_that_has_stopped_is_one_line_without_the_password(cluster: Cluster) -> None:
    assert cluster.port  # a machine without PostgreSQL skips
    programs = find_programs()
    assert programs is not None
    with running_cluster(programs) as other:
        uri = other.uri("postgres")
    assert "cannot be reached" in refused(uri)
