import copy

import pytest
import timm
import torch
from torch import nn

import zoo
from zoo.errors import UnknownNameError, ZooError
from zoo.files.ties import find_ties
from zoo.freezing import find_frozen

FC1 = [f"blocks.{i}.mlp.fc1.weight" for i in range(3)]


@pytest.fixture
def vit() -> nn.Module:
    torch.manual_seed(0)
    return zoo.create_model(
        "vit_tiny_patch16_224",
        "parameter",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=2,
        num_classes=3,
    )


def state(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """Every name with its tensor's identity and bytes."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    return {name: (id(tensor), tensor.detach().numpy().tobytes()) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ([FC1[0], FC1[2]], (FC1[0], FC1[2])),
        ([FC1[2], FC1[0]], (FC1[2], FC1[0])),
        (f"{FC1[2]} = {FC1[0]}", (FC1[2], FC1[0])),
        ("blocks.*.mlp.fc1.weight", tuple(FC1)),
        (["blocks.*.mlp.fc1.weight"], tuple(FC1)),
        ("blocks.1-2.mlp.fc1.weight", (FC1[1], FC1[2])),
        ([FC1[1], "blocks.*.mlp.fc1.weight"], (FC1[1], FC1[0], FC1[2])),
        ("blocks.*.attn.qkv.to_q", tuple(f"blocks.{i}.attn.qkv.to_q" for i in range(3))),
    ],
)
def test_group_becomes_one_parameter_with_the_values_of_its_first(vit, group, names) -> None:
    before = state(vit)
    assert zoo.tie(vit, group) == (names,)
    after = state(vit)
    assert {name for name in after if after[name] != before[name]} == set(names[1:])
    assert {after[name] for name in names} == {before[names[0]]}
    assert isinstance(vit.get_parameter(names[1]), nn.Parameter)
    assert len(list(vit.parameters())) == len(before) - len(names) + 1
    assert set(find_ties(vit.state_dict())) | set(find_ties(vit.state_dict()).values()) == set(names)


@pytest.mark.parametrize("groups", [([FC1[0], FC1[1]], [FC1[1], FC1[2]]), ([FC1[1], FC1[2]], [FC1[0], FC1[1]])])
def test_groups_form_chains_in_either_order(vit, groups) -> None:
    assert zoo.tie(vit, *groups) == (tuple(FC1),)
    assert find_ties(vit.state_dict()) == {FC1[1]: FC1[0], FC1[2]: FC1[0]}


def test_chain_over_two_calls_takes_earlier_ties_along(vit) -> None:
    zoo.tie(vit, [FC1[1], FC1[2]])
    assert zoo.tie(vit, [FC1[0], FC1[1]]) == (tuple(FC1),)
    assert zoo.tie(vit, [FC1[2], FC1[0]]) == ((FC1[2], FC1[0], FC1[1]),)  # again: nothing to do


def test_groups_apart_stay_apart(vit) -> None:
    tied = zoo.tie(vit, "blocks.*.norm1.weight", "blocks.*.norm2.weight")
    assert [len(names) for names in tied] == [3, 3]
    assert vit.blocks[0].norm1.weight is vit.blocks[2].norm1.weight
    assert vit.blocks[0].norm1.weight is not vit.blocks[0].norm2.weight


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ([FC1[0]], rf"cannot tie {FC1[0]} alone: a tie wants two, as in '{FC1[0]} = OTHER'"),
        (FC1[0], rf"cannot tie {FC1[0]} alone"),
        ([FC1[0], FC1[0]], rf"cannot tie {FC1[0]} to itself"),
        ([], "cannot tie an empty group"),
        (
            [FC1[0], "blocks.0.mlp.fc2.weight"],
            r"cannot tie blocks\.0\.mlp\.fc2\.weight to .*: its shape is \(32, 128\)",
        ),
        ([FC1[0], FC1[1], "head.bias"], r"cannot tie head\.bias to .*: its shape is \(3,\), wanted \(128, 32\)"),
        ("blocks.*.weight", r"cannot tie blocks\.0\.mlp\.fc1\.weight to blocks\.0\.norm1\.weight: its shape"),
    ],
)
def test_group_that_cannot_be_one_tensor_is_refused_and_nothing_changed(vit, group, said) -> None:
    before = state(vit)
    with pytest.raises(ZooError, match=said) as caught:
        zoo.tie(vit, ["blocks.*.norm1.weight"], group)
    assert "\n" not in str(caught.value)
    assert state(vit) == before


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (
            [FC1[0], "blocks.1.mlp.fc1.wieght"],
            r"'blocks\.1\.mlp\.fc1\.wieght', did you mean 'blocks\.1\.mlp\.fc1\.weight'",
        ),
        (["blocks.0.mlp.fc1", "blocks.1.mlp.fc1"], r"'blocks\.0\.mlp\.fc1', .*wanted is a parameter's full name"),
        ("blocks.0-3.mlp.fc1.weight", r"blocks\.0-3\.mlp\.fc1\.weight'.*blocks holds 3, 0 to 2"),
        ("blocks.3.mlp.fc1.weight = head.weight", r"blocks holds 3, 0 to 2"),
        ("stages.0-3.weight", r"unknown parameter 'stages\.0-3\.weight'"),
        ("all", "unknown parameter 'all'"),
    ],
)
def test_unknown_name_gives_the_nearest_and_changes_nothing(vit, group, said) -> None:
    before = state(vit)
    with pytest.raises(UnknownNameError, match=said):
        zoo.tie(vit, ["blocks.*.norm1.weight"], group)
    assert state(vit) == before


def test_dtype_device_and_class_must_agree(vit) -> None:
    class Own(nn.Parameter):
        pass

    vit.blocks[1].mlp.fc1.half()
    with pytest.raises(ZooError, match=r"fc1\.weight: its dtype is torch\.float16, wanted torch\.float32"):
        zoo.tie(vit, [FC1[0], FC1[1]])
    vit.blocks[1].mlp.fc1.float().to("meta")
    with pytest.raises(ZooError, match=r"fc1\.weight: its device is meta, wanted cpu"):
        zoo.tie(vit, [FC1[0], FC1[1]])
    vit.blocks[2].mlp.fc1.weight = Own(torch.zeros(128, 32))
    with pytest.raises(ZooError, match=r"fc1\.weight: its class is Own, wanted Parameter"):
        zoo.tie(vit, [FC1[0], FC1[2]])


def test_buffer_is_no_parameter() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    with pytest.raises(ZooError, match=r"cannot tie 1\.running_mean: it is a buffer"):
        zoo.tie(model, ["0.bias", "1.running_mean"])


@pytest.mark.parametrize(("frozen", "free"), [(0, 1), (1, 0)])
def test_tensor_frozen_in_one_place_only_is_refused(vit, frozen, free) -> None:
    zoo.freeze(vit, FC1[frozen])
    before = state(vit)
    with pytest.raises(ZooError, match=rf"{FC1[frozen]} is frozen and {FC1[free]} is not; freeze both, or neither"):
        zoo.tie(vit, [FC1[0], FC1[1]])
    assert state(vit) == before
    zoo.freeze(vit, FC1[free])
    zoo.tie(vit, [FC1[0], FC1[1]])
    assert find_frozen(vit) == set(FC1[:2])
    assert not zoo.audit(vit).errors


def test_freeze_after_a_tie_takes_all_its_names(vit) -> None:
    zoo.tie(vit, "blocks.*.mlp.fc1.weight")
    assert zoo.freeze(vit, "blocks.1.mlp.fc1") == (FC1[0], FC1[1], "blocks.1.mlp.fc1.bias", FC1[2])
    assert zoo.unfreeze(vit, FC1[2]) == tuple(FC1)
    assert find_frozen(vit) == {"blocks.1.mlp.fc1.bias"}


def test_wrapped_model_is_refused(vit) -> None:
    with pytest.raises(ZooError, match="tie the model before it is wrapped: DataParallel"):
        zoo.tie(nn.DataParallel(vit), ["module.head.weight", "module.head.weight"])


def test_module_in_two_places_is_tied_in_both() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(4, 4)})
    assert zoo.tie(model, ["c.weight", "b.weight"]) == (("c.weight", "a.weight", "b.weight"),)
    assert shared.weight is model["c"].weight


def test_recurrent_layers_use_the_tied_tensor() -> None:
    """They keep a list of their weights besides their parameters."""
    model = nn.Sequential(nn.LSTM(4, 4), nn.LSTM(4, 4))
    zoo.tie(model, "*.weight_hh_l0")
    assert model[1]._flat_weights[1] is model[0].weight_hh_l0


def test_tied_model_is_one_function_of_one_tensor(vit) -> None:
    zoo.tie(vit, "blocks.*.attn.qkv.to_q")
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    nn.init.normal_(vit.head.weight)
    vit(torch.randn(2, 3, 32, 32)).square().sum().backward()
    shared = vit.blocks[0].attn.qkv.to_q
    assert shared.grad is not None
    optimizer.step()
    assert all(block.attn.qkv.to_q is shared for block in vit.blocks)
    assert torch.equal(zoo.attention_weights(vit)["blocks.2.attn"]["q"], shared.t())
    assert copy.deepcopy(vit).blocks[2].attn.qkv.to_q is not shared


def test_copy_and_cast_keep_the_tie(vit) -> None:
    zoo.tie(vit, "blocks.*.mlp.fc1.weight")
    for model in (copy.deepcopy(vit), vit.double(), vit.to(memory_format=torch.channels_last), vit.float()):
        assert model.blocks[2].mlp.fc1.weight is model.blocks[0].mlp.fc1.weight


def test_audit_tells_a_tie_from_an_equal_copy(vit) -> None:
    zoo.tie(vit, [FC1[0], FC1[1]])
    with torch.no_grad():
        vit.blocks[2].mlp.fc1.weight.copy_(vit.blocks[0].mlp.fc1.weight)
    found = {finding.tensor: str(finding) for finding in zoo.audit(vit).findings if finding.check == "tie"}
    assert f"is one tensor with {FC1[0]}" in found[FC1[1]]
    assert f"is an equal copy of {FC1[0]}, not tied" in found[FC1[2]]
    assert zoo.audit(vit).parameters == len(list(vit.parameters()))


def test_optimizer_made_before_a_tie_is_caught(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    zoo.tie(vit, [FC1[0], FC1[1]])
    errors = zoo.audit(vit, optimizer).errors
    assert any("is held by the optimizer and is not (any more) the model's" in str(error) for error in errors)


def test_stock_model_can_be_tied() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=3)
    zoo.tie(model, "blocks.*.attn.qkv.weight")
    assert model.blocks[1].attn.qkv.weight is model.blocks[0].attn.qkv.weight
