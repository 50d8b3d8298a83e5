"""The requests and replies of Open Inference Protocol v2."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

OUTPUTS = {"probabilities": "FP32", "label": "BYTES"}
"""Data type of each output: (B, K), and (B)."""
EXTENSIONS = ["binary_tensor_data"]

Parameters = dict[str, str | bool | int | float]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=@#-]{1,128}$")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_MEANINGFUL = ("classification", "sequence_", "shared_memory_")
"""Starts of parameters of Triton's other extensions: they change what an answer is, so they are refused."""


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)

    parameters: Parameters = Field(default_factory=dict)
    """What is not known is not used."""

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if any(name.startswith(_MEANINGFUL) for name in self.parameters):
            raise ValueError("parameters of the extensions classification, sequence and shared memory are not known")
        for name, kind in (("binary_data_size", int), ("binary_data", bool), ("binary_data_output", bool)):
            if type(self.parameters.get(name, kind())) is not kind:
                raise ValueError(f"{name} has another type than {'a whole number' if kind is int else 'true or false'}")
        return self


class InferInput(_Request):
    """The one input: images as files, or as the model's own input."""

    name: Literal["image"]
    """`image`."""
    datatype: Literal["BYTES", "FP32"]
    """BYTES: image files, base64 in JSON. FP32: images decoded, resized and normalised as the model wants them."""
    shape: Annotated[list[Count], Field(min_length=1, max_length=8)]
    """BYTES: (B) or (B, 1). FP32: (B, 3, height, width)."""
    data: list[object] | None = None
    """The elements in row-major order, flat or nested; left out where they come as binary data."""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if (self.data is None) == (self.binary_data_size is None):
            raise ValueError("give either data or parameters.binary_data_size")
        return self

    @property
    def binary_data_size(self) -> int | None:
        """Bytes of this input after the JSON; None where it is in the JSON."""
        size = self.parameters.get("binary_data_size")
        return size if isinstance(size, int) else None


class InferOutput(_Request):
    """An output that is wanted."""

    name: Literal["probabilities", "label"]
    """`probabilities` or `label`."""


class InferRequest(_Request):
    """A JSON body of `POST /v2/models/{name}/infer`."""

    id: Id | None = None
    """The client's own name for the request, given back in the answer: at most 128 letters, digits or ._:/+=@#-"""
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=1)]
    """The one input."""
    outputs: list[InferOutput] = Field(default_factory=list)
    """What is wanted; everything if empty."""
    model_name: str | None = None
    """Not used: the path says it."""
    model_version: str | None = None
    """Not used: the path says it."""

    @model_validator(mode="after")
    def _check_outputs(self) -> Self:
        names = [output.name for output in self.outputs]
        if len(set(names)) != len(names):
            raise ValueError("outputs names one twice")
        return self

    def wanted(self) -> tuple[tuple[str, bool], ...]:
        """List the outputs in the order of the answer, each with whether it goes as binary data."""
        default = self.parameters.get("binary_data_output") is True
        if not self.outputs:
            return tuple((name, default) for name in OUTPUTS)
        return tuple((output.name, output.parameters.get("binary_data", default) is True) for output in self.outputs)


class ErrorV2(BaseModel):
    """A failed request."""

    error: str
    """What failed, in one line."""


class TensorMetadata(BaseModel):
    """An input or output; -1 stands for the number of images."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = Field(default_factory=dict)


class ModelMetadata(BaseModel):
    """A model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    """The server answers."""

    live: bool


class Ready(BaseModel):
    """Every model answers; `live` is the protocol's own name for it."""

    live: bool
    ready: bool


class ModelReady(BaseModel):
    """A model answers."""

    name: str
    ready: bool


class OutputTensor(BaseModel):
    """An output; `parameters.binary_data_size` instead of `data` where it comes as binary data."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | None = None
    data: list[float] | list[str] | None = None


class InferReply(BaseModel):
    """The answer to an infer request."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]
