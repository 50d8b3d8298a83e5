"""What `python -m zoo list` shows: backbones chosen by name, family, attention class or variant."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

from zoo.backbones import Backbone, judge, read_backbones, short_name
from zoo.commands.columns import format_columns
from zoo.errors import BackboneError, UnknownNameError, ZooError
from zoo.survey import look_at, read_survey
from zoo.timm_map import PLAIN

_HINT = "a pattern is a timm name or a glob over names, such as 'vit_tiny*'"


def find_backbones(patterns: Sequence[str]) -> tuple[Backbone, ...]:
    """Return the backbones that any of the patterns names, in the order of their names; all if there is no pattern.

    A name that timm knows and the survey does not (a model that you registered, or a newer timm's) is looked at now.

    Raises:
        UnknownNameError: If a pattern names nothing.
        ZooError: If it names models of timm's without attention.
    """
    known = {backbone.name: backbone for backbone in read_backbones()}
    if not patterns:
        return tuple(known.values())
    found: dict[str, Backbone] = {}
    for pattern in patterns:
        hits = {name: backbone for name, backbone in known.items() if fnmatchcase(name, pattern)}
        if not hits:
            further = _look_further(pattern, known)
            hits = {further.name: further}
        found |= hits
    return tuple(backbone for _, backbone in sorted(found.items()))


def select_family(backbones: Sequence[Backbone], family: str) -> tuple[Backbone, ...]:
    """Keep the backbones of one file of timm's, such as "swin_transformer", or of a glob over files.

    Raises:
        UnknownNameError: If no backbone that the zoo knows is of that family.
    """
    everything = {backbone.family for backbone in (*read_backbones(), *backbones)}
    if not any(fnmatchcase(known, family) for known in everything):
        raise UnknownNameError("family", family, everything, "a family is a file of timm's, such as vision_transformer")
    return tuple(backbone for backbone in backbones if fnmatchcase(backbone.family, family))


def select_class(backbones: Sequence[Backbone], cls: str) -> tuple[Backbone, ...]:
    """Keep the backbones with attention of a class: "EvaAttention", "eva.EvaAttention", the full name, or a glob.

    Raises:
        UnknownNameError: If no backbone that the zoo knows has attention of that class.
    """
    everything = {name for backbone in (*read_backbones(), *backbones) for name, _ in backbone.attention}
    if not any(_is_called(name, cls) for name in everything):
        raise UnknownNameError(
            "attention class", cls, {*map(short_name, everything), *(n.rpartition(".")[2] for n in everything)}
        )
    return tuple(backbone for backbone in backbones if any(_is_called(name, cls) for name, _ in backbone.attention))


def judge_for(backbones: Sequence[Backbone], attention: str) -> tuple[Backbone, ...]:
    """Judge backbones for one registered variant: a whole module fits only where all attention is timm's plain class.

    Raises:
        UnknownNameError: If the variant is not registered.
        SwapError: If it is of no kind that a swap can place.
    """
    from zoo.attention import Attention  # here: the built-in variants fit whatever is swappable, and need no torch
    from zoo.registry import find_attention
    from zoo.swapping.whole import projection_of

    variant = find_attention(attention)
    projection_of(variant)
    if not issubclass(variant, Attention):
        return tuple(backbones)
    reason = f"{attention} is a whole module, which stands in for {short_name(PLAIN)} alone"
    return tuple(
        backbone
        if backbone.is_plain or not backbone.is_swappable
        else replace(backbone, reason=_add_classes(backbone, reason))
        for backbone in backbones
    )


def describe_difference() -> str:
    """Say in one line that another timm is installed than the survey's; "" if it is the same."""
    installed, surveyed = version("timm"), read_survey().timm
    if installed == surveyed:
        return ""
    return (
        f"timm {installed} is installed, and this list is of timm {surveyed}: models may differ; ask for one by its "
        "name, or survey anew by python -m zoo.survey"
    )


def format_backbones(backbones: Sequence[Backbone], *, width: int | None = None) -> str:
    """Return the backbones as a table for people, and a last line that counts them.

    Args:
        backbones: What to show.
        width: Characters to a line; None leaves every backbone one line.
    """
    rows = [("MODEL", "PARAMS", "IMAGE", "SWAP", "ATTENTION, OR WHY NOT")]
    rows += [
        (
            backbone.name,
            f"{backbone.parameters / 1e6:.1f}M",
            str(backbone.img_size or "-"),
            "yes" if backbone.is_swappable else "no",
            backbone.reason or ", ".join(f"{count} {short_name(name)}" for name, count in backbone.attention),
        )
        for backbone in backbones
    ]
    table = format_columns(rows, right={1, 2}, width=width) if backbones else []
    return "\n".join([*table, _count(backbones)])


def to_dict(backbones: Sequence[Backbone]) -> dict[str, Any]:
    """Return the backbones as plain JSON values."""
    return {
        "timm": version("timm"),
        "surveyed": read_survey().timm,
        "swappable": sum(backbone.is_swappable for backbone in backbones),
        "refused": sum(not backbone.is_swappable for backbone in backbones),
        "models": [
            asdict(backbone) | {"attention": dict(backbone.attention), "swappable": backbone.is_swappable}
            for backbone in backbones
        ],
    }


def _count(backbones: Sequence[Backbone]) -> str:
    swappable = sum(backbone.is_swappable for backbone in backbones)
    models = f"{len(backbones)} model{'s' * (len(backbones) != 1)}"
    return f"{models}: {swappable} swappable, {len(backbones) - swappable} not; timm {read_survey().timm}"


def _is_called(name: str, pattern: str) -> bool:
    return any(fnmatchcase(said, pattern) for said in (name, short_name(name), name.rpartition(".")[2]))


def _add_classes(backbone: Backbone, reason: str) -> str:
    others = ", ".join(short_name(name) for name, _ in backbone.attention if name != PLAIN)
    return f"{others}: {reason}"


def _look_further(pattern: str, known: dict[str, Backbone]) -> Backbone:
    """Ask timm for what the survey does not know, and look at it."""
    import timm  # here: it takes seconds

    architecture, _, tag = pattern.partition(".")
    if tag and architecture in known:
        tagged = timm.list_pretrained(f"{architecture}.*")
        if pattern not in tagged:
            raise UnknownNameError("pretrained tag of", pattern, tagged)
        return known[architecture]
    if timm.is_model(pattern):
        try:
            facts = look_at(pattern)
        except Exception as error:  # a user's own model may fail in any way
            said = str(error).strip().partition("\n")[0]
            raise BackboneError(f"{pattern}: cannot be built to look at: {type(error).__name__}: {said}") from error
        if not facts.attention:
            raise ZooError(f"{pattern} is a timm model without attention in its blocks: there is nothing to swap")
        return judge(facts)
    others = timm.list_models(pattern) if re.search(r"[*?[]", pattern) else []
    if others:
        raise ZooError(
            f"{pattern!r} names {len(others)} timm models such as {others[0]}, none with attention that is known here; "
            "give one by its full name to look at it"
        )
    for glob in (f"{pattern}*", f"*{pattern}*") if pattern else ():
        if wider := sum(fnmatchcase(name, glob) for name in known):
            raise ZooError(f"no timm model is called {pattern!r}; {glob!r} names {wider} with attention")
    raise UnknownNameError("model", pattern, {*known, *timm.list_models()}, _HINT)
