"""Build a run from its config: accelerator, data, model, optimizer, and the wrap around them."""

from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
from torch import nn

import zoo
from train.buckets import settle_buckets
from train.config import LoopConfig, ModelConfig, TrainConfig
from train.data import Data, build_data, read_split
from train.errors import ConfigError, ReplicaMismatch
from train.load import check_names
from train.loaders import build_train_loader, build_val_loader
from train.optim import build_optimizer
from train.position import EpochPlan
from train.ranks import gather_json, together
from train.run import Run
from train.tracking import Tracker
from zoo.card import ModelCard
from zoo.create import find_architecture, find_preprocessing
from zoo.freezing import check_trainable


def build_accelerator(config: LoopConfig, *, timeout_s: float = 600.0) -> Accelerator:
    """Build the Accelerator: NCCL where there are GPUs, one gloo group of all ranks where there is none.

    Without `cpu=True` a launcher's ranks on a machine without a GPU would each believe that they are alone.

    Args:
        config: Precision, accumulation, compilation.
        timeout_s: Seconds without progress after which the watch ends a run. A collective waits for longer, so that
            the watch, which can name the rank, comes first.

    Raises:
        ConfigError: If fp16 is asked for where there is no GPU: Accelerate would quietly train in full precision.
    """
    if config.mixed_precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError("loop.mixed_precision fp16 needs a GPU; bf16 and no work without one")
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.accumulation_steps,
        step_scheduler_with_optimizer=False,
        dynamo_backend="inductor" if config.compile else None,
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=max(1800.0, 3 * timeout_s))),
        ],
    )


def build_run(config: TrainConfig, accelerator: Accelerator, tracker: Tracker) -> Run:
    """Build everything but the wrap; the same on every rank, and every rank raises what any raises."""
    place = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    global_batch_size = find_global_batch_size(config.loop, accelerator.num_processes)
    load_plugins(config.model, accelerator)
    with together(accelerator, "building the run"):
        check_names(config.model)
        split = read_split(config.data)
        model = build_model(config, len(split.class_names)).to(accelerator.device)
        own = find_preprocessing(config.model.backbone, **config.model.timm_kwargs)
        data = build_data(config.data, config.augment, own, config.seed, split=split)
        card = build_card(config, data)
        workers = config.data.num_workers
        return Run(
            config=config,
            accelerator=accelerator,
            tracker=tracker,
            data=data,
            card=card,
            model=model,
            bare=model,
            forward=model.forward,
            optimizer=build_optimizer(model, config.optimizer),
            train_loader=build_train_loader(data, config.loop, num_workers=workers, **place),
            val_loader=build_val_loader(data, config.evaluate, num_workers=workers, **place),
            folder=Path(),
            plan=EpochPlan(len(data.train), global_batch_size, config.schedule.epochs),
        )


def find_global_batch_size(loop: LoopConfig, world_size: int) -> int:
    """Return the images of one optimizer step on all ranks together."""
    return loop.batch_size_per_rank * loop.accumulation_steps * world_size


def load_plugins(config: ModelConfig, accelerator: Accelerator) -> None:
    """Load the plugins on every rank, and make sure that all ranks run the same code of the variant that is trained.

    Raises:
        ZooError: If one cannot be loaded, or none registers the variant; on every rank.
        ReplicaMismatch: If ranks have found different files; on every rank.
    """
    with together(accelerator, "loading the plugins"):
        zoo.load_plugins(config.plugins)
        sources = [source.model_dump() for source in zoo.plugin_sources(config.attention)]
    found = gather_json(sources, accelerator)
    differing = [str(rank) for rank, sources in enumerate(found) if sources != found[0]]
    if differing:
        raise ReplicaMismatch(
            f"model.plugins: rank {', '.join(differing)} has other code of attention {config.attention!r} than rank 0: "
            f"{found[int(differing[0])]}, rank 0 has {found[0]}; give all machines the same file"
        )


def build_card(config: TrainConfig, data: Data) -> ModelCard:
    """Say what the trained model will be, before it is: what no bundle could hold stops the run here."""
    backbone, args = find_architecture(config.model.backbone)
    return ModelCard(
        backbone=backbone,
        timm_kwargs={**args, **config.model.timm_kwargs},
        attention=config.model.attention,
        plugins=zoo.plugin_sources(config.model.attention),
        class_names=data.class_names,
        preprocessing=data.preprocessing,
    )


def build_model(config: TrainConfig, num_classes: int) -> nn.Module:
    """Build the backbone with its attention, its ties and its frozen parameters, from `seed` alone.

    Raises:
        ZooError: If a name is unknown, the backbone cannot be swapped, a tie cannot be made, a freeze pattern matches
            nothing, or nothing is left to train.
    """
    wanted = config.model
    model = zoo.create_model(
        wanted.backbone,
        wanted.attention,
        pretrained=wanted.pretrained,
        init=wanted.init,
        seed=config.seed,
        num_classes=num_classes,
        **wanted.timm_kwargs,
    )
    zoo.tie(model, *config.tie)
    zoo.freeze(model, config.freeze)
    check_trainable(model)
    return model


def wrap(run: Run) -> None:
    """Hand model and optimizer to Accelerate, in place, and give each rank a random stream of its own for dropout."""
    if run.config.loop.channels_last:
        run.bare.to(memory_format=torch.channels_last)
    run.model, run.optimizer = cast(
        tuple[nn.Module, torch.optim.Optimizer], run.accelerator.prepare(run.bare, run.optimizer)
    )
    settle_buckets(run)
    set_seed((run.config.seed + run.accelerator.process_index) % 2**32)  # numpy takes no more
