"""A model as ONNX: one file of standard operators, any batch size, nothing in it of where it was made."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zoo.errors import ExportError
from zoo.files.onnx_file import check_onnx

INPUT: Final = "image"
OUTPUT: Final = "logits"
MAX_WEIGHT_BYTES: Final = 2_000_000_000
"""One protobuf file holds 2 GiB, operators and names included."""

logger = logging.getLogger(__name__)


def check_exportable(model: nn.Module) -> None:
    """Raise ExportError, before any work, if the model is too large for one ONNX file."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if size > MAX_WEIGHT_BYTES:
        raise ExportError(
            f"its weights take {size / 1e9:.1f} GB, and one ONNX file holds {MAX_WEIGHT_BYTES / 1e9:.0f} GB at most; "
            "choose the engine eager or compile"
        )


def export_onnx(model: nn.Module, size: tuple[int, int], file: Path) -> None:
    """Write `model` to `file`: input `image`, (B, 3, height, width); output `logits`, (B, K); any B from 1 on.

    What the exporter prints and warns of goes to the log at DEBUG: the numbers tell whether it matters, and nothing is
    to be served that was not compared.

    Args:
        model: In eval mode, on the CPU, float32.
        size: Height and width, in pixels.
        file: Where to.

    Raises:
        ExportError: If the exporter cannot follow the model, or is not installed; one line that names the cause.
    """
    images = torch.zeros(2, 3, *size)
    batch = torch.export.Dim("batch", min=1)
    try:
        with _hushed() as said, torch.no_grad():
            program = torch.onnx.export(
                model,
                (images,),
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: batch},),
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        _forget_origins(program.model)
    except ImportError as error:
        raise ExportError(f"exporting takes the packages onnx and onnxscript: {_one_line(error)}") from error
    except Exception as error:  # the exporter follows a model's own code: any class of error can come out
        raise ExportError(f"torch.onnx cannot export this model: {_one_line(error)}") from error
    program.save(file, external_data=False)
    for line in said:
        logger.debug("torch.onnx: %s", line)
    check_onnx(file)


@contextmanager
def _hushed() -> Iterator[list[str]]:
    """Collect what the exporter warns of and prints, graphs by the page; leave out what it logs below ERROR."""
    said: list[str] = []
    names = ("torch", "onnx_ir", "onnxscript")
    known = {*names, *(name for name in logging.root.manager.loggerDict if name.partition(".")[0] in names)}
    levels = {one: one.level for one in map(logging.getLogger, known)}
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as heard, redirect_stdout(printed), redirect_stderr(printed):
        warnings.simplefilter("always")
        for one in levels:
            one.setLevel(logging.ERROR)
        try:
            yield said
        finally:
            for one, level in levels.items():
                one.setLevel(level)
            said += [_one_line(warning.message) for warning in heard]
            said += [line for line in printed.getvalue().splitlines() if line.strip()]


def _forget_origins(model: Any) -> None:
    """Remove what the exporter notes of each operator: source lines, and paths of this machine."""
    model.metadata_props.clear()
    for graph in (model.graph, *model.functions.values()):
        graph.metadata_props.clear()
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *getattr(graph, "initializers", {}).values()):
            value.metadata_props.clear()


def _one_line(error: object) -> str:
    """Return the first line of the innermost cause, which the exporter wraps in pages of advice."""
    while isinstance(error, BaseException) and error.__cause__ is not None:
        error = error.__cause__
    kind = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{kind}: {lines[0][:300]}" if lines else kind
