from pathlib import Path

import pytest

from serve.batching.batcher import BatchLimits
from serve.errors import QueueFullError
from serve.models.room import RoomCheck
from serve.models.served import ServedModel, Shelf
from serve.operations.metrics import Metrics
from serve.predictor import Predictor


@pytest.fixture
def served(bundle: Path) -> ServedModel:
    return ServedModel(Predictor.from_bundle(bundle, name="models", version="3"), BatchLimits(max_queue=2), Metrics())


@pytest.fixture
def check(served: ServedModel) -> RoomCheck:
    shelf = Shelf(["models", "other"], Metrics())  # the second is still being loaded
    shelf.swap(served)
    return RoomCheck(shelf)


ROUTES = {
    "/invocations": "/invocations",
    "/models/models/invocations": "/models/{name}/invocations",
    "/v2/models/models/infer": "/v2/models/{name}/infer",
    "/v2/models/models/versions/3/infer": "/v2/models/{name}/versions/{version}/infer",
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_full_queue_is_told_by_the_path_and_counted_to_its_route(
    check: RoomCheck, served: ServedModel, path: str
) -> None:
    scope = {"path": path}
    with served.batcher.reserve(1):
        check(scope)
        assert scope == {"path": path}
        with served.batcher.reserve(1):
            with pytest.raises(QueueFullError, match="the queue is full"):
                check(scope)
            assert scope["route"].path == ROUTES[path]


@pytest.mark.parametrize(
    "path", ["/models/other/invocations", "/models/nobody/invocations", "/v2/models/models", "/x", "/invocations/"]
)
def test_what_asks_no_model_that_answers_is_left_to_its_route(check: RoomCheck, served: ServedModel, path: str) -> None:
    with served.batcher.reserve(2):
        check({"path": path})


def test_the_routes_are_those_of_the_application(predictor: Predictor) -> None:
    from serve.app import create_app
    from serve.settings import Settings

    paths = create_app(Settings(), predictor).openapi()["paths"]
    assert set(ROUTES.values()) <= set(paths)
