"""What is trained: the backbone and its attention."""

import json
from collections.abc import Mapping
from typing import Self

from pydantic import Field, JsonValue, field_validator, model_validator

from train.fields import Section, Text, Texts


class ModelConfig(Section):
    """The backbone and its attention."""

    backbone: Text
    """timm's name of the backbone, as `python -m zoo list` shows it; or local-dir:FOLDER."""
    attention: Text = "linear"
    """Attention variant that replaces the backbone's own: linear, separate, parameter or one of your own."""
    plugins: Texts = ()
    """Files (my_attention.py) or modules that register attention variants of your own; one, or a list."""
    init: Text | None = None
    """Scheme that draws the attention's projections anew: timm, torch, trunc_normal, kaiming_raw or normal.
    null keeps what timm gave."""
    pretrained: bool | Text = False
    """Start from trained weights. true: timm's own (needs a network or a local-dir: backbone). A path: a bundle, a
    checkpoint RUN/checkpoints/step-..., a folder of timm's, or a .safetensors file. Another image size resamples
    positions, another class count gets a new head; the run says so."""
    timm_kwargs: Mapping[str, JsonValue] = Field(default_factory=dict)
    """timm's own keyword arguments of the backbone, such as `--model.timm_kwargs.depth 6`."""

    @field_validator("pretrained", mode="before")
    @classmethod
    def _check_pretrained(cls, pretrained: object) -> object:
        if not isinstance(pretrained, bool | str) or pretrained == "":
            raise ValueError(f"got {pretrained!r}, wanted true, false, or a path")
        return pretrained

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pretrained and self.init is not None:
            raise ValueError(
                f"init {self.init!r} would redraw the pretrained weights; set init or pretrained, not both"
            )
        ours = {"backbone", "attention", "init", "seed", "pretrained"} & self.timm_kwargs.keys()
        if ours:
            raise ValueError(f"timm_kwargs: {', '.join(sorted(ours))} has its own field; leave it out of timm_kwargs")
        for key in self.timm_kwargs:
            if not key.isidentifier():
                raise ValueError(f"timm_kwargs: {key!r} is no name of an argument (YAML wants a space after a colon)")
        # JsonValue lets a NaN through, which would come back as null
        json.dumps(dict(self.timm_kwargs), allow_nan=False)
        if "num_classes" in self.timm_kwargs:
            raise ValueError("timm_kwargs: num_classes is read off the data; leave it out")
        return self
