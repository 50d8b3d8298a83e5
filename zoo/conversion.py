"""Convert a trained model on disk: from one attention variant to another, to stock timm and from there."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor, nn

from zoo.bundle import answer, ask_golden, check_golden, compare_logits, load_bundle, save_bundle
from zoo.card import EngineChoice, ModelCard
from zoo.create import create_model, find_architecture
from zoo.errors import BundleError, SwapError, UnknownNameError
from zoo.files.bundle_files import CARD, WEIGHTS, written_aside
from zoo.files.part_ties import describe_untied, tie_known, untie_parts
from zoo.files.sources import CONFIG, OURS, STATE
from zoo.files.tensor_files import list_names
from zoo.files.ties import find_ties
from zoo.files.timm_folders import describe_timm_model, load_by_timm, write_timm_folder
from zoo.plugins import find_plugin, plugin_sources
from zoo.pretrained import find_report
from zoo.registry import list_attentions
from zoo.swap import restore_attention, swap_attention

TIMM = "timm"
"""The `attention` that asks for a folder of stock timm."""


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source: Where the model came from.
        destination: The directory that was written: a bundle, or with attention "timm" a folder of timm's.
        backbone: timm's name of the model.
        before: The attention variant of the source; "timm" for stock timm.
        after: That of the destination.
        num_classes: Number of classes.
        num_parameters: Number of parameters, tied ones counted once.
        difference: Largest absolute difference of the logits of the golden input, before and after.
        notes: What the destination could not hold, or what had to be made up.
    """

    source: str
    destination: str
    backbone: str
    before: str
    after: str
    num_classes: int
    num_parameters: int
    difference: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.source} ({self.before}) -> {self.destination} ({self.after})",
            f"{self.backbone}, {self.num_parameters:,} parameters, {self.num_classes} classes; "
            f"logits differ by at most {self.difference:.3g}",
            *self.notes,
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the report as plain JSON values."""
        return {**asdict(self), "notes": list(self.notes)}


def convert(
    source: str | Path, destination: str | Path, attention: str, *, class_names: Sequence[str] | None = None
) -> ConversionReport:
    """Write the model at `source` to `destination` with another attention: the same function, all of it or nothing.

    Class names, preprocessing, lineage and ties are carried over; the golden example is made anew and checked.

    Args:
        source: A bundle; a folder of timm's, with or without "local-dir:"; or a timm name or "hf-hub:...", whose
            pretrained weights are fetched.
        destination: The directory to write; it must not exist yet. Its parents are made.
        attention: A registered variant for a bundle; "timm" for a folder that stock timm loads, strictly.
        class_names: Names for a model of timm's, in the order of its logits; a bundle has its own.

    Returns:
        What was written, and what the format could not hold.

    Raises:
        UnknownNameError: If there is no such variant or backbone.
        BackboneError, BundleError: If the source is missing, damaged or has no trained weights, or the destination
            exists or cannot be written.
        SwapError: If the model's attention cannot be converted, or the variant computes another function.
    """
    if attention != TIMM and attention not in list_attentions():
        raise UnknownNameError("attention", attention, (*list_attentions(), TIMM))
    target = Path(destination)
    if os.path.lexists(target):
        raise BundleError(f"{target}: exists already; nothing is overwritten, remove it or choose another path")
    model, card, before, notes = _load(source, class_names)
    _, wanted = ask_golden(model, card)
    loaded = find_report(model)
    part_ties = {} if loaded is None else dict(loaded.untied)
    if attention == TIMM:
        part_ties |= untie_parts(model)
        restore_attention(model)
        difference = _check_function(ask_golden(model, card)[1], wanted, "linear", str(source), before)
        card = card.model_copy(update={"attention": "linear", "plugins": ()})
        notes += _write_for_timm(model, card, target, wanted, part_ties)
    else:
        swap_attention(model, attention)
        notes += describe_untied(tie_known(model, part_ties))
        difference = _check_function(ask_golden(model, card)[1], wanted, attention, str(source), before)
        if card.engine.name == "onnx":  # what is exported has to be compared, which is not the zoo's to do
            notes.append(
                f"engine: eager; python -m serve.equip {target} NEW --engine onnx makes it that of ONNX Runtime"
            )
            card = card.model_copy(update={"engine": EngineChoice()})
        card = card.model_copy(
            update={"attention": attention, "attention_options": {}, "plugins": plugin_sources(attention)}
        )
        save_bundle(model, card, target)
    return ConversionReport(
        source=str(source),
        destination=str(target),
        backbone=card.backbone,
        before=before,
        after=attention,
        num_classes=len(card.class_names),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        difference=difference,
        notes=tuple(notes),
    )


def _load(source: str | Path, class_names: Sequence[str] | None) -> tuple[nn.Module, ModelCard, str, list[str]]:
    """Return the model in eval mode, its card, the variant it had, and what to tell the user."""
    text = str(source)
    folder = Path(text.removeprefix("local-dir:"))
    if not text.startswith("local-dir:") and (folder / CARD).is_file():
        if class_names is not None:
            raise BundleError(f"{text}: a bundle has class names of its own; leave class_names out")
        model, card = load_bundle(folder)
        check_golden(model, folder)
        return model, card, card.attention, []
    backbone = _name_timm_source(text, folder)
    model = create_model(backbone, "linear", pretrained=True, seed=0).eval()
    name, args = find_architecture(backbone)
    beside = folder if backbone.startswith("local-dir:") else None
    card, notes = describe_timm_model(model, name, args, class_names=class_names, beside=beside)
    report = find_report(model)
    assert report is not None
    if report.drawn:
        raise BundleError(f"{text}: not all of it is trained: {'; '.join(report.adapted)}")
    untied = describe_untied(report.untied)  # what becomes of these, the destination decides
    return model, card, TIMM, [*notes, *(note for note in report.adapted if note not in untied)]


def _check_function(got: Tensor, wanted: Tensor, attention: str, source: str, before: str) -> float:
    """Return how far the logits are apart; raise SwapError if a variant of the same weights answers otherwise."""
    try:
        return compare_logits(got, wanted)
    except BundleError as error:
        difference = (got - wanted).abs().max().item()
        is_path = before != TIMM or Path(source.removeprefix("local-dir:")).exists()
        start = f"--model.pretrained {source}" if is_path else f"--model.backbone {source} --model.pretrained true"
        plugin = find_plugin(attention)
        given = f" --model.plugins {plugin.file}" if plugin and plugin.file and not plugin.source.distribution else ""
        raise SwapError(
            f"{source}: {attention!r} computes another function (logits differ by {difference:.3g}), so that the "
            "conversion would not be the same model; train it from these weights instead: "
            f"{start} --model.init null --model.attention {attention}{given}"
        ) from error


def _name_timm_source(text: str, folder: Path) -> str:
    """Return the backbone to build for a source that is no bundle."""
    if (folder / CONFIG).is_file():
        return f"local-dir:{folder}"
    if text.startswith("local-dir:") or not folder.exists():
        if text.startswith((".", "/", "~")) or (os.sep in text and ":" not in text):
            raise BundleError(f"{text}: nothing is there; wanted a bundle, a folder of timm's, or a timm name")
        return text
    if (folder / STATE).is_file():
        raise BundleError(f"{text}: a training's checkpoint; convert the bundle that the training wrote")
    if folder.is_file():
        raise BundleError(f"{text}: a file; wanted a bundle, or a folder with timm's {CONFIG} and {WEIGHTS}")
    raise BundleError(f"{text}: neither {CARD} nor {CONFIG} is there; wanted a bundle, or a folder of timm's")


def _write_for_timm(
    model: nn.Module, card: ModelCard, target: Path, wanted: Tensor, part_ties: Mapping[str, str]
) -> list[str]:
    """Write a folder of timm's, let timm load it, and compare; return what to tell the user."""
    with written_aside(target) as aside:
        ties = write_timm_folder(model, card, aside, part_ties)
        image, _ = ask_golden(model, card)
        loaded = load_by_timm(aside, model)
        compare_logits(answer(loaded, image), wanted)
    notes = [f"lineage, metrics, fingerprint and EMA flag are in {CONFIG} under {OURS}, which timm passes over"]
    if part_ties:
        few = list_names((f"{name} = {kept}" for name, kept in part_ties.items()), most=3)
        notes.append(
            f"untied: {few}: timm keeps each as a part of a fused weight, where they are equal copies; {CONFIG} keeps "
            "what is tied for the way back"
        )
    if loose := ties.keys() - find_ties(loaded.state_dict()).keys():  # some models of timm's tie by themselves
        few = list_names((f"{name} = {kept}" for name, kept in ties.items() if name in loose), most=3)
        notes.append(
            f"tied: {few}: timm loads equal copies, not one tensor; the file keeps what is tied for the way back"
        )
    return notes
