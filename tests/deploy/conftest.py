"""Fixtures of the tests of deploy/: PostgreSQL and, on it, the MLflow server."""

from collections.abc import Iterator

import pytest

from tests.deploy.postgres import Cluster, find_programs, running_cluster
from tests.deploy.tracking_server import TrackingServer, tracking_server
from tests.end_to_end.conftest import shell  # noqa: F401  (a fixture)
from tests.train.conftest import empty_store  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL server; skip where the machine has none."""
    programs = find_programs()
    if programs is None:
        pytest.skip("needs PostgreSQL's server programs (initdb, postgres): apt-get install postgresql")
    with running_cluster(programs) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackingServer]:
    """The MLflow server of the compose file, whose database was empty when it started."""
    folder = tmp_path_factory.mktemp("server")
    with tracking_server(cluster, cluster.create_database("fresh"), folder, {"MLFLOW_HOSTNAME": "zoo.test"}) as server:
        yield server
