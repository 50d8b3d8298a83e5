import os
import time
from collections.abc import Callable, Iterator

import mlflow
import pytest
from accelerate import Accelerator

from train.build import build_accelerator
from train.config import TrainConfig
from train.errors import ConfigError, NonFiniteLoss, Stopped, exit_status
from train.faults import pulse, stop
from train.faults.cause import was_told
from train.faults.watched import watched
from train.load import validate
from train.ranks import describe_ranks, together

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
Fail = Callable[[BaseException], str]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.fixture
def run(tracked: Callable[..., TrainConfig]) -> tuple[TrainConfig, str]:
    """A config, and an MLflow run under way in its store."""
    config = tracked()
    client = mlflow.MlflowClient(config.tracking.uri)
    return config, client.create_run(client.create_experiment("any")).info.run_id


@pytest.fixture
def fail(run: tuple[TrainConfig, str], capsys: pytest.CaptureFixture[str]) -> Iterator[Fail]:
    """`fail(error)` raises it under the watch, alone, and returns what was printed."""

    def fail(error: BaseException) -> str:
        accelerator = build_accelerator(run[0].loop)

        def work() -> None:
            with watched(run[0], accelerator, describe_ranks(accelerator)) as watch:
                watch.words.run_id, watch.words.advice = run[1], lambda: "--resume auto goes on"
                raise error

        with stop.listening(), pytest.raises(type(error)) as caught:
            work()
        assert caught.value is error
        assert was_told(error)
        return capsys.readouterr().err

    yield fail
    pulse.mark("between tests", patient=True)


def find_end(run: tuple[TrainConfig, str]) -> tuple[str, str | None]:
    found = mlflow.MlflowClient(run[0].tracking.uri).get_run(run[1])
    return found.info.status, found.data.tags.get("failure")


@pytest.mark.parametrize(
    ("error", "line", "end"),
    [
        (ConfigError("steps is 0"), "error: steps is 0", ("FAILED", "steps is 0")),
        (NonFiniteLoss("the loss is nan"), "error: the loss is nan", ("FAILED", "the loss is nan")),
        (Stopped("SIGTERM", agreed=True), "stopped: SIGTERM", ("KILLED", "SIGTERM")),
        (Stopped("SIGTERM, twice"), "stopped: SIGTERM, twice", ("KILLED", "SIGTERM, twice")),
    ],
)
def test_end_that_explains_itself_is_one_line_and_a_mark(run, fail, error, line, end):
    assert fail(error) == f"{line}; --resume auto goes on\n"
    assert find_end(run) == end


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (UnprintableError(), "UnprintableError: it cannot be printed (KeyError)"),
    ],
)
def test_fault_of_ours_has_its_traceback_above_the_line(run, fail, error, said):
    printed = fail(error)
    assert printed.startswith("Traceback (most recent call last):\n")
    assert printed.endswith(f"\nerror: {said}; --resume auto goes on\n")
    assert printed.count("Traceback") == 1
    assert find_end(run) == ("FAILED", said)


def test_work_that_ends_well_says_nothing_and_leaves_the_run_to_its_tracker(run, capsys):
    accelerator = build_accelerator(run[0].loop)
    with watched(run[0], accelerator, describe_ranks(accelerator)) as watch:
        watch.words.run_id = run[1]
    assert capsys.readouterr() == ("", "")
    assert find_end(run) == ("RUNNING", None)


def fail_on(accelerator: Accelerator, kind: str, store: str) -> dict[str, object]:
    """Let rank 1 fail, or both alike, while rank 0 waits for it outside any collective; return what each raises."""
    data, model = {"root": "builtin:digits"}, {"backbone": "vit_tiny_patch16_224"}
    config = validate({"name": "any", "data": data, "model": model, "tracking": {"uri": store}})
    infos, rank = describe_ranks(accelerator), accelerator.process_index
    try:
        with watched(config, accelerator, infos) as watch:
            if kind == "together":
                with together(accelerator, "planting"):
                    raise ConfigError("steps is 0")
            if rank == 1:
                raise {"mistake": ConfigError("no such folder"), "fault": ValueError("boom")}[kind]
            assert watch._found.wait(30)
            raise RuntimeError("[gloo/pair.cc:534] Connection closed by peer")
    except Exception as error:
        time.sleep(1)  # no rank takes the group down while another still speaks
        told = {"kind": type(error).__name__, "message": str(error), "told": was_told(error), "pid": os.getpid()}
        return told | {"status": exit_status(error)}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("mistake", ("RunEnded", "no such folder", 2), ("ConfigError", "no such folder", 2)),
        ("fault", ("RunEnded", "ValueError: boom", 1), ("ValueError", "boom", 1)),
        ("together", ("ConfigError", "steps is 0", 2), ("ConfigError", "steps is 0", 2)),
    ],
)
def test_all_ranks_end_with_the_status_of_the_first_cause(run_ranks, tmp_path, kind, first, second):
    outcomes = run_ranks(fail_on, kind=kind, store=f"sqlite:///{tmp_path}/none.db")
    for outcome, (error, said, status) in zip(outcomes, (first, second), strict=True):
        assert not outcome.error, outcome.traceback
        assert (outcome.value["kind"], outcome.value["status"]) == (error, status)
        assert outcome.value["message"].endswith(said)
        assert outcome.value["told"]
    if kind != "together":
        assert outcomes[0].value["message"].startswith("rank 1, ")
    assert list(tmp_path.iterdir()) == [], "there was no run to mark, and no store is made"
