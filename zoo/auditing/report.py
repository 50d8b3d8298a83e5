"""Audit a model and its optimizer: will every parameter that should learn, learn?"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from zoo.auditing.aliasing import check_ties
from zoo.auditing.arguments import OptimizerLike, Optimizers, check_model, list_optimizers
from zoo.auditing.checks import check_contiguous, check_finite, check_materialized, check_optimizer, check_requires_grad
from zoo.auditing.findings import Finding as Finding
from zoo.auditing.findings import Severity, tell_findings
from zoo.auditing.probes import Batch, check_probe
from zoo.auditing.progress import (
    check_broken_ties,
    check_frozen,
    check_init_pass,
    check_progress,
    check_replaced,
    check_rewrites,
)
from zoo.auditing.raw_matrices import check_raw_matrices
from zoo.auditing.scale import ScaleRow, check_scale, measure_scale
from zoo.auditing.snapshots import Snapshot, bare_model
from zoo.auditing.unregistered import check_registered
from zoo.auditing.wrapped import check_wrapper
from zoo.errors import AuditError

_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class AuditReport:
    """What the audit found, errors first; as text, many findings of one kind are one line.

    Attributes:
        findings: Errors, then warnings, then notes, each in the order of the checks.
        parameters: Parameter tensors, a tied one counted once.
        trainable: Those that require a gradient.
        elements: Numbers in all parameters together.
        buffers: Buffer tensors.
        attentions: The scale of each attention whose weights can be shown.
    """

    findings: tuple[Finding, ...]
    parameters: int
    trainable: int
    elements: int
    buffers: int
    attentions: tuple[ScaleRow, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity "error"."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def verdict(self) -> str:
        """Say it in one line."""
        counts = Counter[Severity](finding.severity for finding in self.findings)
        said = ", ".join(f"{counts[kind]} {kind}{'s' * (counts[kind] > 1)}" for kind in _ORDER if counts[kind])
        return f"audit: {self.parameters} parameters, {self.trainable} trainable, {said or '0 findings'}"

    def raise_for_findings(self) -> None:
        """Raise if there is an error among the findings.

        Raises:
            AuditError: Lists all errors; warnings and notes are left to the reader of the report.
        """
        if self.errors:
            raise AuditError("\n  ".join([self.verdict(), *tell_findings(self.errors)]))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self) | {
            "findings": [asdict(finding) for finding in self.findings],
            "attentions": [asdict(row) for row in self.attentions],
            "verdict": self.verdict(),
        }

    def __str__(self) -> str:
        return "\n  ".join([self.verdict(), *tell_findings(self.findings)])


def audit(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    batch: Batch | None = None,
    before: Snapshot | None = None,
) -> AuditReport:
    """Look for every way in which a model will not train as its owner believes; changes nothing.

    Args:
        model: The model, bare or wrapped for DDP or by torch.compile; names are the bare model's.
        optimizer: What will step it, or a list of several that share its parameters; without it, nothing is said of
            groups.
        batch: Images, (B, 3, height, width), the tuple of forward's arguments or the mapping of its keywords: one
            forward and backward pass is tried on a copy in train mode, for what forward does not use, replaces or
            keeps to itself.
        before: `zoo.snapshot(model, optimizer)` from before some optimizer steps, for what they did not reach and what
            else wrote; or from before an init pass, for what that left untouched. Its recording ends here.

    Returns:
        The findings; `raise_for_findings()` turns errors into an exception.

    Raises:
        ZooError: If the model fails on `batch`, is no module, or the optimizer is none.
    """
    check_model(model, "the audit")
    optimizers = None if optimizer is None else list_optimizers(optimizer, "the audit")
    given, model = model, bare_model(model)
    findings = list(check_materialized(model))
    attentions: tuple[ScaleRow, ...] = ()
    if not findings:  # without shapes there is nothing to measure yet
        attentions = measure_scale(model)
        findings = [*check_wrapper(given), *_check_state(model, optimizers, before), *check_scale(attentions)]
        if before is not None:
            findings += _check_since(model, before)
        if batch is not None and any(parameter.requires_grad for parameter in model.parameters()):
            findings += check_probe(model, batch)
    parameters = list(model.parameters())
    return AuditReport(
        findings=tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity))),
        parameters=len(parameters),
        trainable=sum(parameter.requires_grad for parameter in parameters),
        elements=sum(parameter.numel() for parameter in parameters if not is_lazy(parameter)),
        buffers=len(list(model.buffers())),
        attentions=attentions,
    )


def _check_state(model: nn.Module, optimizers: list[OptimizerLike] | None, before: Snapshot | None) -> list[Finding]:
    return [
        *check_registered(model),
        *check_requires_grad(model),
        *(check_optimizer(model, optimizers, before) if optimizers is not None else ()),
        *check_ties(model),
        *check_contiguous(model),
        *check_finite(model),
        *check_raw_matrices(model),
    ]


def _check_since(model: nn.Module, before: Snapshot) -> list[Finding]:
    before.close()
    findings = [*check_replaced(model, before), *check_broken_ties(model, before)]
    if not before.steps and not any(trace.gradients for trace in before.traces.values()):
        return [*findings, *(check_init_pass(before) if not findings else ())]
    return [*findings, *check_rewrites(model, before), *check_frozen(before), *check_progress(model, before)]
