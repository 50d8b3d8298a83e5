"""ONNX files that hold more than a model: each kind is refused by name before a runtime sees it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from zoo.errors import ExportError
from zoo.files.onnx_file import check_onnx


def model(*nodes: object) -> ModelProto:
    weight = numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["image", "w"], ["logits"]), *nodes],
        "graph",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def outside(tensor: TensorProto, location: str = "../../etc/passwd") -> TensorProto:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def branch(node: object) -> object:
    """An operator that holds a graph that holds the node."""
    inner = helper.make_graph([node], "inner", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])])
    return helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)


def constant(tensor: TensorProto) -> object:
    return helper.make_node("Constant", [], ["y"], value=tensor)


def weights_outside(made: ModelProto) -> None:
    outside(made.graph.initializer[0])


def location_alone(made: ModelProto) -> None:
    made.graph.initializer[0].external_data.add(key="location", value="model.onnx.data")


def constant_outside(made: ModelProto) -> None:
    made.graph.node.append(constant(outside(TensorProto(name="x"))))


def branch_outside(made: ModelProto) -> None:
    made.graph.node.append(branch(constant(outside(TensorProto(name="x")))))


def list_outside(made: ModelProto) -> None:
    attribute = AttributeProto(name="value", type=AttributeProto.TENSORS, tensors=[outside(TensorProto(name="x"))])
    made.graph.node.add(op_type="Constant", output=["y"], attribute=[attribute])


def sparse_outside(made: ModelProto) -> None:
    outside(made.graph.sparse_initializer.add().values)


def training_outside(made: ModelProto) -> None:
    outside(made.training_info.add().initialization.initializer.add())


def foreign_operator(made: ModelProto) -> None:
    made.graph.node.append(helper.make_node("EPContext", [], ["y"], domain="com.microsoft"))


def foreign_in_a_branch(made: ModelProto) -> None:
    made.graph.node.append(branch(helper.make_node("Run", [], ["y"], domain="my.library")))


def foreign_opset(made: ModelProto) -> None:
    made.opset_import.append(helper.make_opsetid("my.library", 1))


def own_function(made: ModelProto) -> None:
    made.functions.add(name="f", domain="my.library")


def function_outside(made: ModelProto) -> None:
    made.functions.add(name="f").node.append(constant(outside(TensorProto(name="x"))))


def deep(made: ModelProto) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    for _ in range(9):
        node = branch(node)
    made.graph.node.append(node)


EXTERNAL = r"model\.onnx: it keeps weights in another file, which is never read"
PLANTED = [
    (weights_outside, EXTERNAL),
    (location_alone, EXTERNAL),
    (constant_outside, EXTERNAL),
    (branch_outside, EXTERNAL),
    (list_outside, EXTERNAL),
    (sparse_outside, EXTERNAL),
    (training_outside, EXTERNAL),
    (function_outside, EXTERNAL),
    (foreign_operator, r"model\.onnx: it wants operators of 'com\.microsoft' \(node\)"),
    (foreign_in_a_branch, r"operators of 'my\.library' \(node\)"),
    (foreign_opset, r"operators of 'my\.library' \(opset\)"),
    (own_function, r"operators of 'my\.library' \(function\)"),
    (deep, "nested too deep"),
]


def test_a_plain_model_passes_and_its_content_comes_back(tmp_path: Path) -> None:
    content = model(branch(helper.make_node("Identity", ["x"], ["y"]))).SerializeToString()
    (tmp_path / "model.onnx").write_bytes(content)
    assert check_onnx(tmp_path / "model.onnx") == content


@pytest.mark.parametrize(("plant", "message"), PLANTED)
def test_what_is_more_than_a_model_is_refused(
    tmp_path: Path, plant: Callable[[ModelProto], None], message: str
) -> None:
    made = model()
    plant(made)
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ExportError, match=message) as caught:
        check_onnx(tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)
    assert "passwd" not in str(caught.value)


def test_a_field_given_twice_hides_nothing(tmp_path: Path) -> None:
    """Protobuf joins messages that are given twice: a second graph adds to the first one's operators."""
    bad = model()
    foreign_operator(bad)
    (tmp_path / "model.onnx").write_bytes(bad.SerializeToString() + model().SerializeToString())
    with pytest.raises(ExportError, match=r"com\.microsoft"):
        check_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ORTM" * 20,
        b"\x80\x02pickle",
        b"\xff" * 40,
        b"\x3a\x80",  # a graph whose length is cut
        b"\x3a\xff\xff\xff\xff\x0f",  # a graph of 4 GB
        b"\x38\x01",  # a graph that is a number
        b"\x3b\x3c",  # a group, which ONNX has none of
        b"\x0d\x00",  # a fixed32 that is cut
    ],
)
def test_what_is_not_onnx_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ExportError, match=r"model\.onnx: not ONNX, or truncated \("):
        check_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    content = model().SerializeToString()
    (tmp_path / "model.onnx").write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ExportError, match="not ONNX, or truncated"):
        check_onnx(tmp_path / "model.onnx")
