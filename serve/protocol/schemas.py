"""The requests and replies of the scoring protocol."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_TOP_K = 5
MAX_TOP_K = 2**63 - 1
"""Any number of classes; MLflow reads the same as a long."""


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class DataframeSplit(_Request):
    """A table as pandas writes it with orient="split"."""

    columns: list[str]
    """Names of the columns: `image` alone."""
    data: list[list[object]]
    """The rows."""
    index: list[object] | None = None
    """Names of the rows; not used."""


class Params(_Request):
    """How to answer."""

    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = DEFAULT_TOP_K
    """How many classes to list for each image; all of them when there are fewer."""


class Invocation(_Request):
    """A JSON body of `POST /invocations`: exactly one of the four forms, and how to answer."""

    dataframe_split: DataframeSplit | None = None
    """{"columns": ["image"], "data": [[base64], ...]}"""
    dataframe_records: list[dict[str, object]] | None = None
    """[{"image": base64}, ...]"""
    inputs: list[object] | dict[str, object] | None = None
    """{"image": [base64, ...]}, or the list alone; also a float tensor (B, 3, height, width), already normalised."""
    instances: list[object] | None = None
    """[{"image": base64}, ...], or [base64, ...]; also a float tensor."""
    params: Params | None = None
    """How to answer."""

    @model_validator(mode="after")
    def _check_one_form(self) -> "Invocation":
        forms = (self.dataframe_split, self.dataframe_records, self.inputs, self.instances)
        if sum(form is not None for form in forms) != 1:
            raise ValueError("give exactly one of dataframe_split, dataframe_records, inputs, instances")
        return self


class Score(BaseModel):
    """A class and its probability."""

    label: str
    probability: float
    """Between 0 and 1."""


class Prediction(Score):
    """The answer for one image: its most probable class, and the runners-up."""

    top: list[Score]
    """The `top_k` most probable classes, the most probable first."""


class Reply(BaseModel):
    """The answer to `POST /invocations`."""

    predictions: list[Prediction]
    """One for each image, in the order of the request."""


class Fault(BaseModel):
    """What went wrong."""

    code: str
    """A short name that stays the same."""
    message: str
    """One line for people."""


class ErrorReply(BaseModel):
    """The answer to a request that failed."""

    error: Fault
