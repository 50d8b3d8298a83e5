"""What happened to each parameter between a snapshot and now: replaced, untied, without gradient, unchanged."""

from collections.abc import Iterator

import torch
from torch import nn

from zoo.auditing.findings import Finding, Severity
from zoo.auditing.snapshots import Snapshot, Trace, first_names
from zoo.weights import attention_weights

_REDRAWN = 0.5  # a cosine below is no clipping or rescaling: two draws of mean 0 have one near 0
_LEFT = "the pass looks for modules of other kinds (Module.apply hands it modules, no parameters): initialise it too"

# An exact zero once or twice is what zero-initialised heads, gains and scales give to the layers behind them.
_ZEROS: dict[int, Severity] = {1: "note", 2: "warning"}


def check_replaced(model: nn.Module, before: Snapshot) -> Iterator[Finding]:
    """Find parameters that are other objects than at the snapshot, so that the optimizer holds the old ones."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for name, old in before.parameters.items():
        new = now.get(name)
        if new is None:
            yield Finding("replaced", "error", name, "was a parameter at the snapshot and is none now")
        elif new is not old:
            yield Finding(
                "replaced",
                "error",
                name,
                f"was created anew since the snapshot (shape {tuple(old.shape)}, now {tuple(new.shape)}): change a "
                "parameter in place under torch.no_grad, and make the optimizer after the last replacement",
            )
    for name in now.keys() - before.parameters.keys():
        yield Finding("replaced", "error", name, "appeared since the snapshot: the optimizer and DDP do not know it")


def check_broken_ties(model: nn.Module, before: Snapshot) -> Iterator[Finding]:
    """Find names that shared one tensor at the snapshot and do not now."""
    now = dict(model.named_parameters(remove_duplicate=False))
    owners = first_names(before.parameters)
    for name, old in before.parameters.items():
        owner = owners[id(old)]
        if name in now and now.get(owner) is not now[name]:
            yield Finding("tie", "error", name, f"was one tensor with {owner} and is another now: tie them again")


def check_frozen(before: Snapshot) -> Iterator[Finding]:
    """Find parameters that were frozen at the snapshot, and changed all the same in training."""
    for name, trace in before.frozen.items():
        if trace.changed and not trace.tensor.requires_grad:
            message = (
                "was frozen at the snapshot and has changed: an optimizer moves whatever has a .grad, by its momentum "
                "and weight decay too; keep frozen parameters out of it, or their .grad None"
            )
            yield Finding("frozen", "error", name, message)


def check_rewrites(model: nn.Module, before: Snapshot) -> Iterator[Finding]:
    """Find parameters that something else than the optimizer wrote to while it trained them."""
    now = dict(model.named_parameters())
    for name, trace in before.traces.items():
        if not trace.rewrites or not trace.gradients or now.get(name) is not trace.tensor:
            continue
        worst = min(trace.rewrites, key=lambda rewrite: rewrite.likeness)
        when = f"after step {worst.after_step}" if worst.after_step else "before the first step"
        what = f"was written to by something else than the optimizer ({len(trace.rewrites)} times; {when} the values"
        if worst.likeness < _REDRAWN:
            message = (
                f"{what} have a cosine of {worst.likeness:.2f} to those before): it is initialised again while it "
                "trains, and what it learned is lost; initialise before the optimizer is made"
            )
            yield Finding("rewritten", "error", name, message)
        else:
            message = f"{what} stayed alike, cosine {worst.likeness:.3f}): clipped, rescaled or loaded; is it meant?"
            yield Finding("rewritten", "warning", name, message)


def check_init_pass(before: Snapshot) -> Iterator[Finding]:
    """Where no gradient and no step was seen since the snapshot: find what an init pass left untouched."""
    traces = before.traces | before.frozen
    reached = {name for name, trace in traces.items() if trace.written}
    left = [name for name, trace in traces.items() if name not in reached and trace.tensor.numel()]
    if not reached:
        message = (
            "nothing reached a parameter: no optimizer step was taken since the snapshot, no gradient came and nothing "
            "wrote; audit after some steps. If it was an init pass: Module.apply hands its function modules, so that "
            "isinstance(m, nn.Parameter) never holds; loop over m.parameters(recurse=False) inside it"
        )
        yield Finding("init", "error", "", message)
        return
    message = f"was left untouched by the init pass, as {len(left)} of {len(traces)} were; {_LEFT}"
    for name in left:
        yield Finding("init", "warning", name, message)


def check_progress(model: nn.Module, before: Snapshot) -> Iterator[Finding]:
    """Find trainable parameters that got no gradient or did not change since the snapshot."""
    now = dict(model.named_parameters())
    traces = {
        name: trace
        for name, trace in before.traces.items()
        if now.get(name) is trace.tensor and trace.tensor.requires_grad
    }
    changed = {name: trace.changed for name, trace in traces.items()}
    backwards = max((trace.gradients for trace in before.traces.values()), default=0)
    steps = backwards if before.steps is None else before.steps
    if not steps and backwards:
        message = f"{backwards} backward passes and no optimizer step since the snapshot: audit after some steps"
        yield Finding("progress", "error", "", message)
        return
    if traces and not any(changed.values()):
        yield _judge_standstill(list(traces.values()), steps)
    key_biases = _find_key_biases(model)
    for name, trace in traces.items():
        rate = 1.0 if before.steps is None else trace.learning_rate
        verdict = _judge(trace, steps, rate, changed=changed[name], any_changed=any(changed.values()))
        if verdict and name in key_biases and trace.gradients:
            verdict = "note", f"{verdict[1]} (a key bias shifts all logits of a query alike, which softmax ignores)"
        if verdict:
            yield Finding("progress", verdict[0], name, verdict[1])


def _judge_standstill(traces: list[Trace], steps: int) -> Finding:
    rates = [trace.learning_rate for trace in traces if trace.learning_rate is not None]
    what = f"{steps} steps changed none of the {len(traces)} trainable parameters"
    if rates and not any(rates):
        return Finding(
            "progress", "warning", "", f"{what}: the learning rate was 0; audit after the warm-up's first step"
        )
    if rates:
        return Finding("progress", "error", "", f"{what}, though the optimizer holds {len(rates)} of them")
    cause = "the optimizer steps orphans; make it from the model as it is now"
    return Finding("progress", "error", "", f"{what}: {cause}")


def _judge(
    trace: Trace, steps: int, rate: float | None, *, changed: bool, any_changed: bool
) -> tuple[Severity, str] | None:
    """Return severity and message for one parameter, None if it learns; `any_changed` is whether any parameter did."""
    if not trace.tensor.numel():
        return None
    if not trace.gradients and changed:
        return "warning", "changed though no gradient arrived: something else writes to it"
    if not trace.gradients:
        cause = "forward does not use it, or its graph is cut; use it, or freeze it"
        return "error", f"got no gradient in {steps} steps: {cause}"
    gradient = trace.largest_gradient
    if gradient == 0.0:
        severity = _ZEROS.get(min(steps, trace.gradients), "error")
        return severity, f"its gradient was exactly zero in all {trace.gradients} backward passes"
    if changed or not any_changed:  # that nothing changed at all is said once, for the whole
        return None
    if rate is None:
        return "error", "did not change: no optimizer group held it"
    if rate == 0.0:
        return "warning", f"did not change in {steps} steps: its learning rate was 0"
    found = f"did not change in {steps} steps, with gradients up to {gradient:.3g} and lr={rate:.3g}"
    resolution = torch.finfo(trace.tensor.dtype).eps * float(trace.tensor.detach().abs().max())
    if rate * min(gradient, 1.0) <= resolution:
        return "warning", f"{found}: such steps are below {trace.tensor.dtype}'s resolution of its values"
    return "error", found


def _find_key_biases(model: nn.Module) -> set[str]:
    """Return the names of parameters that are an attention's key bias and nothing else."""
    biases = [weights["k_bias"] for weights in attention_weights(model).values() if "k_bias" in weights]
    places = {(bias.data_ptr(), bias.numel()) for bias in biases}
    return {name for name, tensor in model.named_parameters() if (tensor.data_ptr(), tensor.numel()) in places}
