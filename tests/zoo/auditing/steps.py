"""Train a few steps, and read what the audit says of them."""

import torch
from torch import nn


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, *, draw=torch.randn) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(draw(4, 3, 32, 32)), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    optimizer.zero_grad()  # as a loop does, so that what is left in .grad tells nothing


def lines(report) -> list[str]:
    return [str(finding) for finding in report.findings]


def told(report, *checks: str) -> list[str]:
    return [str(finding) for finding in report.findings if finding.check in checks]
