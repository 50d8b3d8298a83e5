"""What the audit says of one tensor."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One fault, doubt or remark.

    Attributes:
        check: Which check found it, as "optimizer".
        severity: "error" will not train as its owner believes; "warning" may not; "note" is as it should be but worth
            knowing.
        tensor: The parameter's, buffer's, attribute's or module's name in the bare model; "" for the whole model.
        message: What is wrong and the way out, without the name.
    """

    check: str
    severity: Severity
    tensor: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.tensor and self.tensor + ': '}{self.message}"
