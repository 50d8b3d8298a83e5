"""What is known of a model's attention as it is stored: shapes, spread against a scheme's, ties, what is trainable.

Numbers only: no torch is imported here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Spread:
    """How far the values of one part of a parameter spread.

    Attributes:
        std: Standard deviation; None where a value is not finite, or there are none.
        expected_std: What the declared scheme gives; None where only timm knows.
        numbers: How many values there are.
    """

    std: float | None
    expected_std: float | None
    numbers: int


@dataclass(frozen=True)
class StoredParameter:
    """One parameter of an attention module.

    Attributes:
        name: Its name below the attention module, as "qkv.to_k".
        shape: As it is stored.
        dtype: Its type, as "float32".
        parts: What it holds, by part: "q", "k", "v" and "out", with "_bias" for biases, "mlp" for a block's first MLP
            layer beside them; empty for what is no projection (a norm, a table of biases).
        trainable: Whether it requires a gradient.
        contiguous: Whether its values lie in memory in its own order.
        tied_to: Further names, in the whole model, of the very same tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, Spread]
    trainable: bool
    contiguous: bool
    tied_to: tuple[str, ...]


@dataclass(frozen=True)
class DescribedAttention:
    """One attention module.

    Attributes:
        name: Its name in the model.
        cls: Its class, with its module.
        dim: Width of its tokens.
        num_heads: Its heads; None where the module does not say.
        logit_std: Spread of its logits for N(0, I) tokens; None where q and k alone do not decide them
            (see `zoo.auditing.scale`).
        expected_logit_std: What the declared scheme gives; None where only timm knows, or q and k are normalised.
        entropy: Mean entropy in nats of its attention over `zoo.auditing.scale.TOKENS` such tokens; None like
            `logit_std`.
        normalised: Whether q and k are normalised, which bounds the logits whatever the weights are.
        parameters: All that it stores.
    """

    name: str
    cls: str
    dim: int
    num_heads: int | None
    logit_std: float | None
    expected_logit_std: float | None
    entropy: float | None
    normalised: bool
    parameters: tuple[StoredParameter, ...]

    @property
    def parts(self) -> dict[str, Spread]:
        """Every part's spread, whatever parameter holds it."""
        return {part: spread for parameter in self.parameters for part, spread in parameter.parts.items()}


@dataclass(frozen=True)
class Note:
    """One thing worth knowing of one attention module.

    Attributes:
        attention: The module's name.
        kind: "doubt" where something may be wrong; "remark" where somebody must have meant it.
        what: What it is, without numbers, so that alike notes of many blocks can be told as one.
        got: The number in question; None if there is none.
        wanted: What it should be; None if there is no number.
        yardstick: By what it should be so: "the scheme gives", "the blocks around have"; "" if there is no number.
    """

    attention: str
    kind: Literal["doubt", "remark"]
    what: str
    got: float | None = None
    wanted: float | None = None
    yardstick: str = ""


@dataclass(frozen=True)
class Description:
    """A model's attention.

    Attributes:
        attentions: Every attention module that the zoo knows, in the model's order.
        notes: What stands out, and what is frozen or tied.
    """

    attentions: tuple[DescribedAttention, ...]
    notes: tuple[Note, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the description as plain JSON values."""
        told = [asdict(attention) | {"class": attention.cls} for attention in self.attentions]
        for attention in told:
            del attention["cls"]
            attention["parameters"] = {parameter.pop("name"): parameter for parameter in attention["parameters"]}
        return {"attentions": told, "notes": [asdict(note) for note in self.notes]}

    def __str__(self) -> str:
        from zoo.commands.description_text import format_description  # it draws on this file

        return format_description(self)
