"""Where the run and the trained model are kept."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from train.fields import Section, Text
from train.store import without_password


class TrackingConfig(Section):
    """Where MLflow keeps the run and the model."""

    uri: Text = "sqlite:///mlflow.db"
    """MLflow's tracking and registry URI; MLFLOW_TRACKING_URI changes the default."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "attention-zoo"
    """MLflow's experiment; made if it is missing."""

    @field_serializer("uri")
    def _hide_password(self, uri: str) -> str:
        return without_password(uri)  # what is dumped goes into runs and checkpoints, for all to read


class PublishConfig(Section):
    """What becomes of the trained model."""

    enabled: bool = True
    """Register the model as a version of `name`."""
    alias: Text = "champion"
    """Registry alias that moves to the version if it scores higher on the same validation images."""
    force: bool = False
    """Move the alias whatever the score, and on other validation images too."""
    engine: Literal["auto", "eager", "compile", "onnx"] = "auto"
    """What computes where the model is served: eager torch, torch.compile, or ONNX Runtime, which needs no torch there.
    auto: onnx, or eager where the model cannot be exported or ONNX Runtime computes something else."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Numbers it computes in; bf16 for eager and compile. serve/top1 says what it costs in accuracy."""

    @field_validator("alias")
    @classmethod
    def _check_alias(cls, alias: str) -> str:
        if not re.fullmatch(r"[\w-]{1,255}", alias):
            raise ValueError(f"got {alias!r}, wanted letters, digits, _ and - (255 at most)")
        if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
            raise ValueError(f"{alias!r} is reserved by MLflow; take another, such as champion")
        return alias

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.engine == "onnx" and self.precision != "fp32":
            raise ValueError(f"the engine onnx computes in fp32, got {self.precision}; take engine eager or compile")
        return self
