import torch
from torch import nn

from train.equality.inventory import fingerprint
from train.equality.mismatches import describe_mismatch


def toy() -> nn.Module:
    """Three matrices alike in shape, a head, and a norm whose start values are all zeros or ones."""
    torch.manual_seed(0)
    model = nn.Module()
    for name in ("to_q", "to_k", "frozen"):
        setattr(model, name, nn.Parameter(torch.randn(4, 4)))
    model.first, model.head, model.norm = nn.Linear(4, 4), nn.Linear(4, 3), nn.BatchNorm1d(4)
    return model


def tables(*plants):
    for plant in plants:
        model = toy()
        if plant:
            plant(model)
        yield fingerprint(model)


def rotate(model: nn.Module) -> None:
    model.to_q.data, model.to_k.data, model.frozen.data = model.to_k.data, model.frozen.data, model.to_q.data


def test_rotated_tensors_are_traced_to_where_they_belong() -> None:
    message = describe_mismatch(list(tables(None, rotate)))
    assert "rank 1 holds here what rank 0 holds at to_k" in message
    assert "swapped" not in message


def test_equal_zero_biases_are_no_proof_of_a_swap() -> None:
    def change(model: nn.Module) -> None:
        model.norm.bias.data.fill_(1)  # as norm.weight and running_var of the other rank

    assert "holds here" not in describe_mismatch(list(tables(None, change)))


def test_message_names_eight_tensors_and_counts_the_rest() -> None:
    def change(model: nn.Module) -> None:
        for tensor in [*model.parameters(), model.norm.running_mean, model.norm.running_var]:
            tensor.data = tensor.data + 1

    message = describe_mismatch(list(tables(None, change)))
    assert message.count("bytes differ") == 8
    assert "... and 3 more" in message
