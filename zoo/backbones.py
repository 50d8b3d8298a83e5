"""Which timm models the zoo swaps, and why it does not the others: the survey's facts judged by `zoo.timm_map`.

No torch is imported here, so that listing is quick.
"""

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from zoo.survey import Facts, Form, read_survey
from zoo.timm_map import PLAIN, REFUSED, ROWS, Slot


@dataclass(frozen=True)
class Backbone:
    """A timm model with attention in its blocks.

    Attributes:
        name: Its name in timm.
        family: The file of timm's that defines it, as "vision_transformer".
        parameters: How many numbers it learns, with timm's own class count.
        img_size: Side of its input in pixels; None where the model does not say.
        attention: Classes of its attention, with their modules, and how many modules of each.
        reason: Why it cannot be swapped, by the classes that are in the way; None if it can.
    """

    name: str
    family: str
    parameters: int
    img_size: int | None
    attention: tuple[tuple[str, int], ...]
    reason: str | None = None

    @property
    def is_swappable(self) -> bool:
        """Whether every variant that is a projection, the built-in ones among them, can be swapped in and out."""
        return self.reason is None

    @property
    def is_plain(self) -> bool:
        """Whether all its attention is timm's plain class, so that a whole-module variant can stand in too."""
        return self.is_swappable and all(name == PLAIN for name, _ in self.attention)


def list_backbones(pattern: str = "*") -> tuple[str, ...]:
    """Return the timm models that every built-in variant can be swapped into.

    Args:
        pattern: A name or a glob over names, as "vit_tiny*".

    Returns:
        Names for `zoo.create_model`, sorted; empty if none matches.
    """
    return tuple(
        backbone.name for backbone in read_backbones() if backbone.is_swappable and fnmatchcase(backbone.name, pattern)
    )


@cache
def read_backbones() -> tuple[Backbone, ...]:
    """Return every timm model of the survey, judged, in the order of their names."""
    return tuple(map(judge, sorted(read_survey().models, key=lambda facts: facts.name)))


def judge(facts: Facts) -> Backbone:
    """Say whether a timm model can be swapped, by the rows of its attention classes and the layers that stand there."""
    counts: Counter[str] = Counter()
    reasons: dict[str, dict[str, None]] = {}  # the classes of each reason, once and in order
    for form, count in facts.attention:
        counts[form.name] += count
        if (reason := _why_not(form)) is not None:
            reasons.setdefault(reason, {})[short_name(form.name)] = None
    return Backbone(
        name=facts.name,
        family=facts.family,
        parameters=facts.parameters,
        img_size=facts.img_size,
        attention=tuple(counts.items()),
        reason="; ".join(f"{', '.join(classes)}: {reason}" for reason, classes in reasons.items()) or None,
    )


def short_name(name: str) -> str:
    """Return a class's name with the last part of its module's, which tells timm's many `Attention` apart."""
    return ".".join(name.split(".")[-2:])


def _why_not(form: Form) -> str | None:
    """Return why attention of this form cannot be swapped, None if it can."""
    if form.name in REFUSED:
        return REFUSED[form.name]
    if form.name not in ROWS:
        return "no row in zoo.timm_map"
    layers = dict(form.layers)
    slots = [slot for slot in ROWS[form.name].slots if _stands_in(layers, slot)]
    if not slots:
        return f"none of its row's children is there, it has {', '.join(layers) or 'no layers'}"
    other = next((slot.child for slot in slots if layers.get(slot.child) != "Linear"), None)
    if other is None:
        return None
    kind = layers.get(other, "several layers")
    return f"its {other} is {kind}, not nn.Linear"


def _stands_in(layers: dict[str, str], slot: Slot) -> bool:
    return any(path == slot.child or path.startswith(f"{slot.child}.") for path in layers)
