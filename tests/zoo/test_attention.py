import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.errors import UnknownNameError, ZooError
from zoo.projections import ParameterProjection

B, N, DIM, HEADS, HEAD_DIM = 2, 5, 24, 3, 16


def reference(module: zoo.Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The question's own arithmetic: three products, an explicit softmax, heads one by one."""
    w = zoo.attention_weights(module)[""]

    def project(tokens: Tensor, part: str) -> Tensor:
        product = tokens @ w[part].t()
        return product + w[f"{part}_bias"] if f"{part}_bias" in w else product

    q, k, v = (project(x, part) for part in "qkv")
    heads = []
    for h in range(module.num_heads):
        columns = slice(h * module.head_dim, (h + 1) * module.head_dim)
        logits = q[..., columns] @ k[..., columns].transpose(1, 2) / math.sqrt(module.head_dim)
        if mask is not None:
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        odds = (logits - logits.amax(-1, keepdim=True)).exp()
        heads.append(odds / odds.sum(-1, keepdim=True) @ v[..., columns])
    merged = torch.cat(heads, dim=-1)
    return project(merged, "out") if "out" in w else merged


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(B, N, DIM, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("out_bias", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "project_out"),
    [
        (HEADS, HEAD_DIM, "auto"),
        (1, DIM, "auto"),
        (1, DIM, "always"),
        (1, DIM, "never"),
        (3, 8, "never"),
        (1, 8, "auto"),
    ],
)
def test_it_is_the_questions_attention(
    tokens: Tensor, variant: str, num_heads: int, head_dim: int, project_out: Any, qkv_bias: bool, out_bias: bool
) -> None:
    module = zoo.Attention(
        DIM, num_heads, head_dim, variant=variant, project_out=project_out, qkv_bias=qkv_bias, out_bias=out_bias
    )
    got = module(tokens)
    assert got.shape == (B, N, DIM)
    torch.testing.assert_close(got, reference(module, tokens))  # float32's defaults: another order of summation
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), [*module.parameters()]),
        torch.autograd.grad(reference(module, tokens).square().sum(), [*module.parameters()]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_the_reference_sees_a_swapped_q_and_k(tokens: Tensor) -> None:
    module = zoo.Attention(DIM, HEADS, HEAD_DIM, variant="parameter")
    wanted = reference(module, tokens)
    qkv = module.qkv
    qkv.to_q, qkv.to_v = qkv.to_v, qkv.to_q
    with pytest.raises(AssertionError):
        torch.testing.assert_close(module(tokens), wanted)


def test_the_questions_two_forms_have_the_questions_parameters() -> None:
    def shapes(**kwargs: Any) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in zoo.Attention(DIM, **kwargs).named_parameters()}

    inner = 8 * 64  # the question's defaults
    assert shapes() == {"qkv.weight": (3 * inner, DIM), "proj.weight": (DIM, inner), "proj.bias": (DIM,)}
    assert shapes(variant="parameter", out_bias=False) == {
        "qkv.to_q": (DIM, inner),
        "qkv.to_k": (DIM, inner),
        "qkv.to_v": (DIM, inner),
        "proj.projection": (inner, DIM),
    }


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "project_out", "projects"),
    [
        (1, DIM, "auto", False),
        (1, DIM, "always", True),
        (1, DIM, "never", False),
        (3, 8, "auto", True),  # inner == dim, but several heads to mix
        (1, 8, "auto", True),
        (3, 8, "never", False),
    ],
)
def test_no_parameter_is_created_for_a_projection_left_out(
    tokens: Tensor, variant: str, num_heads: int, head_dim: int, project_out: Any, projects: bool
) -> None:
    module = zoo.Attention(DIM, num_heads, head_dim, variant=variant, project_out=project_out)
    assert isinstance(module.proj, nn.Identity) != projects
    assert any(name.startswith("proj.") for name, _ in module.named_parameters()) == projects
    assert ("out" in zoo.attention_weights(module)[""]) == projects
    module(tokens).sum().backward()
    assert all(p.grad is not None for p in module.parameters())  # DDP waits for none


def test_variants_of_one_draw_are_one_function(tokens: Tensor) -> None:
    outputs = []
    for variant in zoo.list_attentions():
        torch.manual_seed(3)
        outputs.append(zoo.Attention(DIM, HEADS, HEAD_DIM, variant=variant, qkv_bias=True)(tokens))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_masks_hide_keys_or_add_to_logits(tokens: Tensor, variant: str) -> None:
    module = zoo.Attention(DIM, HEADS, HEAD_DIM, variant=variant)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    torch.testing.assert_close(module(tokens, causal), reference(module, tokens, causal))
    shift = torch.randn(N, N)
    torch.testing.assert_close(module(tokens, shift), reference(module, tokens, shift))
    changed = tokens.clone()
    changed[:, -1] += 1
    assert torch.equal(module(changed, causal)[:, :-1], module(tokens, causal)[:, :-1])
    assert not torch.equal(module(changed)[:, :-1], module(tokens)[:, :-1])


def test_dropout_drops_in_training_alone_and_keeps_the_mean(variant: str) -> None:
    p = 0.25
    module = zoo.Attention(DIM, HEADS, HEAD_DIM, variant=variant, dropout=p)
    x = torch.randn(512, N, DIM, generator=torch.Generator().manual_seed(2))
    wanted = module.eval()(x)
    assert torch.equal(module(x), wanted)
    torch.testing.assert_close(wanted, reference(module, x))
    torch.manual_seed(0)
    got = module.train()(x)
    dropped = (got == 0).float().mean().item()  # of 61440 outputs: standard error 0.0017
    assert dropped == pytest.approx(p, abs=0.01)
    kept = got[got != 0] * (1 - p) - wanted[got != 0]  # what attention's own dropout adds
    assert kept.std() > 0.01
    assert abs(kept.mean().item()) < 0.02 * wanted.std().item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim, num_heads and head_dim must be at least 1, got 0, 8, 64"),
        ({"num_heads": 0}, "at least 1, got 24, 0, 64"),
        ({"head_dim": -1}, "at least 1, got 24, 8, -1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": math.nan}, "dropout must be in"),
        ({"project_out": "maybe"}, "project_out must be 'auto', 'always' or 'never', got 'maybe'"),
        ({"project_out": "never"}, "project_out='never' would return tokens of width 512, not dim 24"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        zoo.Attention(**({"dim": DIM} | arguments))


def test_an_unknown_variant_gives_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown attention 'parameters', did you mean 'parameter'"):
        zoo.Attention(DIM, variant="parameters")


@pytest.mark.usefixtures("own_registry")
def test_a_whole_module_is_no_projection() -> None:
    zoo.register_attention("whole")(nn.Identity)
    with pytest.raises(ZooError, match="variant 'whole' is a whole module"):
        zoo.Attention(DIM, variant="whole")


def test_it_swaps_and_restores_in_a_persons_own_model(tokens: Tensor) -> None:
    model = nn.Sequential(zoo.Attention(DIM, HEADS, HEAD_DIM), zoo.Attention(DIM, 1, DIM))
    wanted, before = model(tokens), {name: t.clone() for name, t in model.state_dict().items()}
    assert zoo.swap_attention(model, "parameter").modules == ("0", "1")
    assert isinstance(model.get_submodule("0.proj"), ParameterProjection)
    assert torch.equal(model(tokens), wanted)
    zoo.restore_attention(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    alone = zoo.Attention(DIM, HEADS, HEAD_DIM)
    assert zoo.swap_attention(alone, "parameter").modules == ("",)


def test_a_class_derived_from_it_can_be_made(tokens: Tensor) -> None:
    class Own(zoo.Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
            return super().attend(2 * q, k, v, **masks)

    module = Own(DIM, HEADS, HEAD_DIM, variant="parameter")
    wanted = module(tokens)
    model = nn.Sequential(module)
    zoo.swap_attention(model, "linear")
    assert type(module.qkv) is nn.Linear
    torch.testing.assert_close(model(tokens), wanted)
