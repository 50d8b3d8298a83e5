"""All ranks agree on what surrounds the weights, and differ where they must: `check_agreement` and `check_streams`.

Every rank calls each of them, at the same place. Where all is well, one short row of each rank travels.
"""

import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch
import xxhash
from accelerate import Accelerator

from train.equality.digests import made_alike, raise_alike
from train.equality.disagreements import describe_disagreement, describe_shared, is_told_only
from train.errors import RanksDisagree
from train.ranks import JsonValue, gather_json, together

logger = logging.getLogger(__name__)

Facts: TypeAlias = "Mapping[str, JsonValue]"
Streams: TypeAlias = "Mapping[str, Sequence[int | str]]"


def check_agreement(accelerator: Accelerator, collect: Callable[[], Facts], *, what: str) -> None:
    """Raise on every rank if the ranks' facts differ.

    Where only facts that may differ do (the kind "device": other GPUs, which may round otherwise), the main process
    warns and the training goes on.

    Args:
        accelerator: The world.
        collect: Returns this rank's facts by name, each name "kind: which" as "config: optimizer.lr"; may fail, but
            holds no collective.
        what: What is compared, in a few words: "start".

    Raises:
        RanksDisagree: Names the facts, the ranks, their values, and the way out.
        Exception: What `collect` raised on any rank, on all.
    """
    if accelerator.num_processes == 1:
        return
    facts: dict[str, JsonValue] = {}

    def make() -> bytes:
        facts.update(collect())
        return xxhash.xxh3_128_digest(json.dumps(facts, sort_keys=True).encode())

    if made_alike(make, accelerator, f"agreement on {what}"):
        return
    gathered = gather_json({"facts": facts, "host": platform.node()}, accelerator)
    ranks = [rank["facts"] for rank in cast("list[dict[str, dict[str, JsonValue]]]", gathered)]
    hosts = [str(rank["host"]) for rank in cast("list[dict[str, str]]", gathered)]
    message = describe_disagreement(ranks, hosts, what=what)
    if not is_told_only(ranks):
        raise_alike(RanksDisagree(message), accelerator, f"agreement on {what}")
    if accelerator.is_main_process:
        logger.warning("%s", message)


def check_streams(accelerator: Accelerator, collect: Callable[[], Streams] = dict, *, what: str = "first step") -> None:
    """Raise on every rank if two ranks are about to draw alike, or to see the same images.

    Torch's own random state, which dropout draws from, is always compared.

    Args:
        accelerator: The world.
        collect: Returns what no other rank may hold, by name: numbers or texts, such as the images of this rank's first
            batch; may fail, but holds no collective.
        what: The moment, in a few words.

    Raises:
        RanksDisagree: Names the stream, two ranks that share it, and the likely cause.
        Exception: What `collect` raised on any rank, on all.
    """
    if accelerator.num_processes == 1:
        return
    mine: dict[str, Sequence[int | str]] = {}
    with together(accelerator, f"random streams, {what}"):
        mine = {"dropout": [_hash_random_state(accelerator.device)], **collect()}
    ranks = cast("list[dict[str, list[int | str]]]", gather_json(mine, accelerator))
    lines = [line for name in mine if (line := describe_shared(name, [rank.get(name, []) for rank in ranks]))]
    if lines:
        first = f"random streams, {what}: ranks are alike where they must differ"
        raise_alike(RanksDisagree("\n  ".join([first, *lines])), accelerator, f"random streams, {what}")


def _hash_random_state(device: torch.device) -> str:
    """Hash the states that a forward on this device draws from."""
    hasher = xxhash.xxh3_128(torch.get_rng_state().numpy().data)
    if device.type != "cpu":
        hasher.update(torch.get_device_module(device).get_rng_state(device).numpy().data)
    return hasher.hexdigest()
