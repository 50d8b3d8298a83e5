"""Variants with a fault each: the suite's test of that name fails and says which it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from tests.zoo.suites import Broken, Cosine, Temperature, suite
from zoo.errors import ZooError
from zoo.trial import TINY

OWN = pytest.mark.usefixtures("own_registry")


class Transposed(Broken):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([w.t() for w in self.part_tensors("weight").values()]), self.bias)


class Biasless(Broken):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Forgetful(Broken):
    @classmethod
    def build(cls, spec: Any) -> nn.Module:
        return cls(type(spec)(spec.in_features, spec.layout, False, spec.device, spec.dtype))


class Recreating(Broken):
    def forward(self, x: Tensor) -> Tensor:
        first = self.stored_key(self.layout.parts[0], "weight")
        setattr(self, first, nn.Parameter(getattr(self, first).detach().clone()))
        return super().forward(x)


class Unregistered(Broken):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.gain = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Unused(Broken):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.gain = nn.Parameter(torch.ones(1))


class Detached(Broken):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach(), self.bias)


class DropsMore(Broken):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Restless(Broken):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            next(self.parameters()).data.add_(1e-3)
        return y


class CopiesItself(Broken):
    def __deepcopy__(self, memo: dict[int, Any]) -> "CopiesItself":
        return self


class UntiesItself(Broken):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        from zoo.projections import ProjectionSpec

        other = type(self)(ProjectionSpec(self.in_features, self.layout, self.bias is not None))
        other.load_state_dict(self.state_dict())
        return other


class NoHalf(Broken):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 3 if y.dtype == torch.bfloat16 else y


class Infinite(Cosine):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
        return super().attend(q, k, v, **masks) / torch.zeros(())


class HalfCosine(Cosine):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
        y = super().attend(q, k, v, **masks)
        return y * 5 if y.dtype == torch.bfloat16 else y


class Branching(Broken):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if bool(y.sum() < 1e9) else -y


@OWN
@pytest.mark.parametrize(
    ("cls", "test", "message"),
    [
        (None, "test_it_is_registered", "'mine' is not registered; decorate its class with @zoo.register_attention"),
        (
            Transposed,
            "test_a_swap_keeps_the_logits",
            "vit_tiny_patch16_224 with mine: logits in eval mode: differ by up",
        ),
        (
            Biasless,
            "test_a_swap_keeps_the_logits",
            r"logits in eval mode: differ by .*allowed is nothing \(exact = True",
        ),
        (Forgetful, "test_a_swap_keeps_the_logits", r"blocks\.0\.attn\.qkv: Forgetful does not keep q's bias"),
        (DropsMore, "test_a_swap_keeps_a_training_step", "logits in train mode: differ by"),
        (
            Detached,
            "test_a_swap_keeps_a_training_step",
            r"blocks\.0\.attn q after a step along its gradient: differ by",
        ),
        (Unused, "test_restore_gives_timms_state_dict_back", r"blocks\.0\.attn.*gain|Missing key.*gain"),
        (Temperature, "test_restore_gives_timms_state_dict_back", "temperature"),
        (CopiesItself, "test_deepcopy_is_a_model_of_its_own", r"a deepcopy shares \['blocks\.0\.attn\.qkv\.to_q"),
        (UntiesItself, "test_ties_survive", r"deepcopy untied \['blocks\.1\.attn"),
        (
            Recreating,
            "test_the_audit_finds_nothing",
            r"on a batch: the audit finds .*attn\.qkv\.to_q: is created anew in",
        ),
        (
            Unregistered,
            "test_the_audit_finds_nothing",
            r"attn\.qkv\.gain: is a plain tensor .*neither parameter nor buf",
        ),
        (Unused, "test_the_audit_finds_nothing", r"attn\.qkv\.gain: is trainable and gets no gradient"),
        (Detached, "test_the_audit_finds_nothing", r"attn\.qkv\.to_q: is trainable and gets no gradient"),
        (Restless, "test_it_freezes_and_unfreezes", r"frozen and moved: \['blocks\.0\.attn\."),
        (Infinite, "test_logits_and_gradients_are_finite", "vit_tiny_patch16_224 with mine: NaN or Inf in the logits"),
        (Detached, "test_logits_and_gradients_are_finite", r"no finite gradient for \['blocks\.0\.attn\.qkv\.to_q'"),
        (NoHalf, "test_autocast_works", "off by .* under bf16"),
        (Detached, "test_autocast_works", r"under bf16: no finite gradient for \['blocks\.0\.attn\.qkv\.to_q'"),
    ],
)
def test_each_planted_fault_fails_its_test(cls: type[nn.Module] | None, test: str, message: str) -> None:
    with pytest.raises((AssertionError, ZooError, RuntimeError), match=message):
        getattr(suite(cls), test)()


@OWN
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda view: view * 2, "q is not timm's"),
        (lambda view: view.t(), "q is not timm's"),
        (lambda view: view.clone(), "q is a copy, not a view of the model's storage"),
    ],
)
def test_weights_that_are_shown_wrong_fail(monkeypatch: pytest.MonkeyPatch, part: Any, message: str) -> None:
    """The swap itself refuses a variant that shows copies, so the fault is planted in what is shown."""
    from zoo import weights

    def shown(model: nn.Module) -> Any:
        found = weights.attention_weights(model)
        if any(isinstance(module, Broken) for module in model.modules()):
            for tensors in found.values():
                tensors["q"] = part(tensors["q"])
        return found

    monkeypatch.setitem(vars(zoo), "attention_weights", shown)
    with pytest.raises(AssertionError, match=message):
        suite(Broken).test_attention_weights_show_timms_matrices()


@OWN
def test_a_scheme_that_draws_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.testing.expected_std", lambda *_: 0.5)
    with pytest.raises(AssertionError, match=r"torch gave blocks\.0\.attn q a std of 0\.1\d*, and says 0\.5"):
        suite(Broken).test_init_schemes_draw_what_they_say()


@OWN
def test_a_bundle_that_brings_back_other_weights_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def through(model: nn.Module, *_: Any) -> nn.Module:
        next(model.parameters()).data.add_(1)
        return zoo.create_model("vit_tiny_patch16_224", "mine", seed=0, **TINY)

    monkeypatch.setattr("zoo.testing.through_bundle", through)
    with pytest.raises(AssertionError, match="came back with other values"):
        suite(Broken).test_a_bundle_brings_it_back()


@OWN
@pytest.mark.slow
@pytest.mark.parametrize("test", ["test_it_exports", "test_it_compiles"])
def test_a_branch_on_values_is_no_graph(test: str) -> None:
    with pytest.raises(Exception, match=r"(?i)data-dependent|branching|guard"):
        getattr(suite(Branching, exports=True, compiles=True), test)()


@OWN
def test_exactness_is_what_the_suite_says() -> None:
    class Rounded(Broken):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 1e-6)

    with pytest.raises(AssertionError, match="allowed is nothing"):
        suite(Rounded).test_a_swap_keeps_the_logits()
    suite(None, exact=False).test_a_swap_keeps_the_logits()
    suite(None, exact=False).test_a_swap_keeps_a_training_step()
    with pytest.raises(AssertionError, match="allowed is 1e-09 of them"):
        suite(None, exact=False, tolerance=1e-9).test_a_swap_keeps_the_logits()


@OWN
def test_bf16_is_held_to_what_the_suite_allows_and_to_the_variants_own_float32() -> None:
    suite(Cosine, same_function=False).test_autocast_works()
    with pytest.raises(AssertionError, match=r"off by .* under bf16, allowed is 1\.\d+e-05"):
        suite(None, same_function=False, tolerance=1e-6, bf16_tolerance=1e-5).test_autocast_works()
    suite(None, same_function=False, tolerance=0.05, bf16_tolerance=1e-5).test_autocast_works()
    zoo.register_attention("half")(HalfCosine)
    with pytest.raises(AssertionError, match=r"with half: off by .* under bf16"):
        suite(None, attention="half", same_function=False).test_autocast_works()
