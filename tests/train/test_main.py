import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.tiny import BACKBONE, write_images
from train import __main__ as command
from train.errors import NonFiniteLoss, RunEnded, Stopped
from train.faults.cause import TOLD

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
ROOT = Path(__file__).parent.parent.parent
KWARGS = ("img_size", "8", "patch_size", "4", "embed_dim", "16", "depth", "1", "num_heads", "2")
TINY = (
    *("--data.root", "images", "--loop.batch_size_per_rank", "2", "--schedule.epochs", "1"),
    *("--schedule.warmup_epochs", "0", "--publish.enabled", "false", "--tracking.uri", "sqlite:///mlflow.db"),
    *(
        word
        for key, value in zip(KWARGS[::2], KWARGS[1::2], strict=True)
        for word in (f"--model.timm_kwargs.{key}", value)
    ),
)


@pytest.fixture
def images(here, monkeypatch) -> Path:
    """The current directory, with images in it, as a shell that launched nothing sees it."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    write_images(here / "images")
    for backbone in ("resnet18", "coatnet_pico_rw_224"):
        (here / f"{backbone}.yaml").write_text(f"{{name: a, model: {{backbone: {backbone}}}, data: {{root: images}}}}")
    (here / "key.yaml").write_text("{name: a, model: {backbone: a}, data: {root: a}, optimizer: {weight_decy: 1}}")
    for name in ("empty", "one/ash"):
        (here / name).mkdir(parents=True)
    (here / "one" / "ash" / "0.png").write_bytes((here / "images" / "val" / "ash" / "0.png").read_bytes())
    return here


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


MISTAKES = {
    "recipe": (["digist"], "did you mean 'digits'?"),
    "flag": (["--optimizer.leraning_rate", "1"], "unknown flag --optimizer.leraning_rate"),
    "key": (["key.yaml"], "unknown key 'optimizer.weight_decy', did you mean 'optimizer.weight_decay'?"),
    "range": (["--optimizer.lr", "-1"], "optimizer.lr: got -1, wanted greater than 0"),
    "type": (["--schedule.epochs", "many"], "schedule.epochs: got 'many', wanted a whole number"),
    "backbone": (["--model.backbone", "vit_tiny_patch16_24"], f"did you mean '{BACKBONE}'"),
    "attention": (["--model.attention", "paramter"], "unknown attention 'paramter', did you mean 'parameter'"),
    "init": (["--model.init", "torhc"], "did you mean 'torch'"),
    "no attention": (["resnet18.yaml"], "ResNet has no attention that can be swapped"),
    "convolutions": (["coatnet_pico_rw_224.yaml"], "stages.2.blocks.0.attn: cannot swap Attention2d"),
    "timm's arguments": (["--model.timm_kwargs.deph", "3"], "deph"),
    "data missing": (["--data.root", "none"], "none"),
    "data empty": (["--data.root", "empty"], "empty"),
    "one class": (["--data.root", "one"], "one"),
    "built-in": (["--data.root", "builtin:digist"], "did you mean 'builtin:digits'"),
    "few images": (["--loop.batch_size_per_rank", "99"], "12 training images are fewer than one global batch of 99"),
    "tracking": (["--tracking.uri", "http://127.0.0.1:1"], "tracking.uri http://127.0.0.1:1: cannot be reached"),
    "store's folder": (["--tracking.uri", "sqlite:///none/m.db"], "none is no folder that can be written to"),
    "all frozen": (["--freeze", "['*']"], "no trainable parameters"),
    "pattern": (["--freeze", "[patch_embd]"], "unknown pattern 'patch_embd', did you mean 'patch_embed"),
    "resume": (["--resume", "none"], "resume none: no such directory"),
}


@pytest.mark.parametrize("dry_run", [True, False], ids=["dry run", "real"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_status_2_and_nothing_written(images, capsys, mistake, dry_run):
    """Later flags may not repeat earlier ones, so the mistake's stand instead of the tiny training's."""
    wrong, said = MISTAKES[mistake]
    pairs = list(zip(TINY[::2], TINY[1::2], strict=True))
    if wrong[0].endswith(".yaml"):  # a backbone that takes no ViT's arguments
        pairs = [pair for pair in pairs if "timm_kwargs" not in pair[0]]
    line = [word for pair in pairs if pair[0] not in wrong for word in pair]
    before = everything(images)
    status = command.main([*wrong, *line, *(["--dry-run"] if dry_run else [])])
    err = capsys.readouterr().err
    assert status == 2, err
    (only,) = err.splitlines()
    assert only.startswith("error: ")
    assert said in only
    assert everything(images) == before


def test_tiny_training_itself_is_no_mistake(images, capsys):
    assert command.main([*TINY, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "everything is in place" in captured.out
    assert everything(images) == everything(images)


@pytest.mark.slow
def test_real_process_says_a_mistake_in_one_line_and_no_library_adds_to_it(images):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for extra, status, err in (
        (["--data.root", "none"], 2, 1),
        (["--dry-run"], 0, 0),
    ):
        line = [word for pair in zip(TINY[::2], TINY[1::2], strict=True) if pair[0] not in extra for word in pair]
        before = everything(images)
        done = subprocess.run(
            [sys.executable, "-m", "train", *line, *extra],
            cwd=images,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert len(done.stderr.splitlines()) == err, done.stderr
        assert "Traceback" not in done.stderr
        assert everything(images) == before


def told(error: BaseException) -> BaseException:
    error.add_note(TOLD)
    return error


def raising(error: BaseException):
    def run_job(*_args, **_kwargs):
        raise error

    return run_job


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (NonFiniteLoss("step 3: the loss is nan"), 3, "error: step 3: the loss is nan\n"),
        (Stopped(), 1, ""),
        (told(NonFiniteLoss("step 3: the loss is nan")), 3, ""),
        (told(RunEnded("rank 1: no such folder", status=2)), 2, ""),
        (told(Stopped("SIGTERM after step 7 of 9")), 1, ""),
    ],
)
@pytest.mark.usefixtures("images")
def test_each_end_has_its_status(monkeypatch, capsys, error, status, said):
    monkeypatch.setattr(command, "run_job", raising(error))
    assert command.main([]) == status
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("images")
def test_fault_of_ours_has_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(command, "run_job", raising(RuntimeError("planned")))
    assert command.main([]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("RuntimeError: planned\n")


@pytest.mark.usefixtures("images")
def test_other_rank_waits_for_the_main_process_to_speak_and_is_ended_without_a_word(monkeypatch, capsys):
    """The launcher ends it by SIGTERM once the main process has left."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(command, "build_accelerator", lambda *_, **__: None)
    monkeypatch.setattr(command, "run_job", raising(NonFiniteLoss("the loss is nan")))
    monkeypatch.setattr(time, "sleep", lambda _seconds: os.kill(os.getpid(), signal.SIGTERM))
    assert command.main([]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("images")
def test_other_rank_that_was_alone_with_its_mistake_speaks_for_itself(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(command, "build_accelerator", lambda *_, **__: None)
    monkeypatch.setattr(command, "run_job", raising(NonFiniteLoss("the loss is nan")))
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert command.main([]) == 3
    assert waited
    assert capsys.readouterr().err == "rank 1: error: the loss is nan\n"


@pytest.mark.usefixtures("images")
def test_help_explains_itself_with_status_0(capsys):
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    assert left.value.code == 0
    assert "--optimizer.lr" in capsys.readouterr().out
