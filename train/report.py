"""What a training tells the person who started it, in a few lines, before and after."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import zoo
from train.config import TrackingConfig, TrainConfig
from train.data import BUILTIN
from train.launching.machines import group_by_machine
from train.publish import Published
from train.ranks import RankInfo
from train.run import Run
from train.store import find_file, without_password


def describe_world(ranks: Sequence[RankInfo]) -> str:
    """Say how many ranks there are, what joins them, and where each one is: on which device of which machine."""
    machines = group_by_machine(ranks)
    several = len(machines) > 1
    where = [", ".join(f"rank {info.rank} on {info.device}" for info in infos) for infos in machines]
    if several:
        where = [f"{infos[0].hostname} ({text})" for infos, text in zip(machines, where, strict=True)]
    return (
        f"{len(ranks)} rank{'s' * (len(ranks) > 1)}{f' on {len(machines)} machines' if several else ''}, "
        f"backend {ranks[0].backend}: {', '.join(where)}"
    )


def describe_writes(config: TrainConfig, ranks: Sequence[RankInfo]) -> str:
    """Say which machine writes what, what each reads, and what another one needs to go on; "" for a single machine.

    Args:
        config: Where is written and read.
        ranks: All ranks, in rank order.
    """
    machines = group_by_machine(ranks)
    if len(machines) == 1:
        return ""
    main, *others = (infos[0].hostname for infos in machines)
    uri = without_password(config.tracking.uri)
    store_is_here = find_file(config.tracking.uri) is not None
    kept = f"{config.run_dir}{f' and {uri}' if store_is_here else ''}"
    reads = "" if config.data.root in BUILTIN else f"; each machine reads its own {config.data.root}"
    return (
        f"writes    {main} alone, {config.run_dir} and the MLflow run in {uri}; nothing on {', '.join(others)}{reads}\n"
        f"          to resume with another machine as the first (--machine_rank 0), share {kept} with it"
    )


def describe_plan(run: Run) -> str:
    """Say what is about to be trained on what."""
    config, data = run.config, run.data
    loop, schedule = config.loop, config.schedule
    batch = loop.batch_size_per_rank * loop.accumulation_steps * run.accelerator.num_processes
    weights = None if run.step else zoo.find_report(run.bare)  # a resumed run has its checkpoint's
    return "\n".join(
        (
            f"model     {config.model.backbone}, attention {config.model.attention}, "
            f"init {config.model.init or 'kept'}, "
            f"{sum(parameter.numel() for parameter in run.bare.parameters()):,} parameters",
            *([] if weights is None else [f"weights   {weights}"]),
            f"data      {config.data.root}: {len(data.train):,} training and {len(data.val):,} validation images, "
            f"{len(data.class_names)} classes, input {'x'.join(map(str, data.preprocessing.size))}",
            f"schedule  {schedule.epochs} epochs of {run.steps_per_epoch} steps, global batch {batch}, "
            f"peak lr {config.optimizer.lr:g}, precision {loop.mixed_precision}",
        )
    )


def describe_result(run: Run, metrics: dict[str, float], seconds: float) -> str:
    """Say what came out."""
    images = len(run.data.val)
    return (
        f"result    top-1 {metrics['val/top1']:.2%} on {images} validation images "
        f"({round(metrics['val/top1'] * images)} right), loss {metrics['val/loss']:.3f}, trained in {seconds:.0f} s"
    )


def describe_rest(run: Run) -> str:
    """Say what is left of a run that ends before its time, and how to go on."""
    return f"{run.last_checkpoint()}; --resume auto goes on from there"


def describe_next(run: Run, published: Published, example: Path | None) -> str:
    """Give the two commands that come next: look at it, serve it; and how to ask it."""
    python = find_python()
    image = str(example or "IMAGE.jpg")
    kind = "png" if image.endswith(".png") else "jpeg"
    uri = without_password(run.config.tracking.uri)
    look = uri if uri.startswith("http") else f"{python} -m mlflow ui --backend-store-uri {shlex.quote(uri)}"
    model = shlex.quote(f"models:/{published.name}@{published.alias}")
    known = uri in (TrackingConfig().uri, os.environ.get("MLFLOW_TRACKING_URI"))  # serve finds it by itself
    where = "" if known else f"MLFLOW_TRACKING_URI={shlex.quote(uri)} "
    needs_code = run.card.plugins and run.card.engine.name != "onnx"
    files = run.config.model.plugins if needs_code else ()
    plugins = f" --plugins {shlex.quote(','.join(files))}" if files else ""
    return "\n".join(
        (
            f"look at it  {look}",
            f"serve it    {where}{python} -m serve {model}{plugins}",
            f"  then ask  curl -H 'Content-Type: image/{kind}' --data-binary @{shlex.quote(image)} "
            "localhost:8000/invocations",
        )
    )


def find_python() -> str:
    """Return this interpreter as one would type it here: relative where it lies below the current directory."""
    here, path = Path.cwd(), Path(sys.executable)
    return str(path.relative_to(here)) if path.is_relative_to(here) else "python"


def write_examples(run: Run, folder: Path) -> Path:
    """Write one validation image of each class, as it came, to FOLDER/CLASS.png; only for images that lie in no file.

    Returns:
        The file to show, of the fourth class that has an image, or the last; where the images lie in files, its own.
    """
    images = run.data.val.images
    first = {label: index for index, label in reversed(list(enumerate(images.labels)))}
    shown = first[sorted(first)[:4][-1]]  # validation may lack a class
    content = images.contents[shown]
    if isinstance(content, Path):
        return content
    folder.mkdir(parents=True, exist_ok=True)
    for label, index in first.items():
        (folder / f"{run.data.class_names[label]}.png").write_bytes(images.read(index))
    return folder / f"{run.data.class_names[images.labels[shown]]}.png"
