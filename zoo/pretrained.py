"""Load trained weights into a stock timm model: every tensor of the file is used, adapted and said, or refused."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

from timm.models import adapt_input_conv, clean_state_dict
from torch import Tensor, nn

from zoo.errors import BackboneError, BundleError, SwapError
from zoo.files.part_ties import describe_untied, tie_known
from zoo.files.sources import Source
from zoo.files.stock_names import StockNames, to_stock_names
from zoo.files.tensor_files import check_finite, find_misfits, list_names, read_tied, same_bits
from zoo.files.ties import find_ties
from zoo.files.timm_weights import Recipe

_REPORT = "pretrained_report"  # the attribute of a model that keeps it

_FREE = re.compile(r"img_size|num_classes|global_pool|in_chans|dynamic_img_\w+|strict_img_size|\w*drop\w*")


@dataclass(frozen=True)
class PretrainedReport:
    """What loading weights did.

    Attributes:
        source: The file they came from.
        num_tensors: How many of the model's tensors came from it.
        adapted: What was not taken as it stands, one clause each: a head replaced, positions resampled.
        drawn: Tensors that the file did not give, which are as the model was initialised.
        untied: {further name: first name} of what the file ties and this model cannot; `adapted` says it too.
    """

    source: str
    num_tensors: int
    adapted: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    untied: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join((f"{self.num_tensors} tensors of {self.source}", *self.adapted))


def find_report(model: nn.Module) -> PretrainedReport | None:
    """Return what `zoo.create_model` adapted when it loaded pretrained weights into `model`; None if it loaded none."""
    report = vars(model).get(_REPORT)
    assert report is None or isinstance(report, PretrainedReport)
    return report


@dataclass(frozen=True)
class Loaded:
    """Weights that a stock model has been given, and what only the swapped model has a place for.

    Attributes:
        report: What was done.
        own: Tensors of the variant alone.
        ties: Ties among parts of fused tensors.
    """

    report: PretrainedReport
    own: Mapping[str, Tensor]
    ties: Mapping[str, str]

    def finish(self, model: nn.Module) -> None:
        """Give the swapped model what the stock one had no place for, in place, and keep the report on it."""
        if self.own:
            state = model.state_dict()
            wanted = {name: state[name] for name in self.own if name in state}
            if misfits := find_misfits(self.own, wanted, exact=False):
                raise BackboneError(f"{self.report.source}: does not fit: {list_names(misfits, separator='; ')}")
            model.load_state_dict({**state, **self.own}, strict=True)
        untied = tie_known(model, self.ties)
        report = replace(
            self.report,
            num_tensors=self.report.num_tensors + len(self.own),
            adapted=(*self.report.adapted, *describe_untied(untied)),
            untied=untied,
        )
        vars(model)[_REPORT] = report


def load_pretrained(
    model: nn.Module, recipe: Recipe, source: Source, attention: str, timm_kwargs: Mapping[str, Any]
) -> Loaded:
    """Load the weights of `source` into a stock timm model, in place; on an error nothing of it was changed.

    Args:
        model: As timm built it; a head that must be replaced keeps what timm drew.
        recipe: How timm would load into it.
        source: The file, of stock timm's names or of a swapped model's.
        attention: The variant that the model will be swapped to.
        timm_kwargs: What the model was built with, to compare with what the source says.

    Raises:
        BackboneError: If a tensor is missing, unknown, of the wrong shape or not finite: file and tensor are named.
    """
    file = source.file
    try:
        found = _read(source, model)
    except (BundleError, SwapError) as error:
        where = "" if str(file) in str(error) else f"{file}: "
        raise BackboneError(f"{where}{error}") from error
    notes = _compare_arguments(source, model, timm_kwargs)
    adapted = _filter(model, recipe, source, found.tensors)
    notes += _describe_filter(model, source, found.tensors, adapted)
    state = model.state_dict()
    notes += _adapt_channels(recipe, adapted, state)
    drawn, head_notes = _replace_heads(recipe, adapted, state)
    if not recipe.strict:
        head_notes += _relax(adapted, state, drawn)
    misfits = find_misfits(adapted, state, exact=False)
    if attention == found.attention:
        misfits += [f"{name} is missing" for name in found.lacking]
    else:
        misfits += [f"{name} is of {found.attention}, not of {attention}" for name in found.own]
    if misfits:
        raise BackboneError(f"{file}: does not fit {type(model).__name__}: {list_names(misfits, separator='; ')}")
    notes += head_notes + _describe_casts(adapted, state)
    model.load_state_dict(adapted, strict=True)
    rest = tie_known(model, {name: kept for name, kept in found.ties.items() if not {name, kept} & drawn})
    report = PretrainedReport(str(file), len(state) - len(drawn), tuple(notes), tuple(sorted(drawn)))
    return Loaded(report, found.own, rest)


def _read(source: Source, model: nn.Module) -> StockNames:
    tensors, ties = read_tied(source.file)
    check_finite(source.file, tensors)
    tensors = clean_state_dict(tensors)  # prefixes of a wrapper
    for name, kept in find_ties(model.state_dict()).items():
        if kept in tensors:
            tensors.setdefault(name, tensors[kept])
    return to_stock_names(tensors, {**source.ties, **ties}, model, source.attention)


def _filter(model: nn.Module, recipe: Recipe, source: Source, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Let timm rename old layouts and resample positions, as it would for weights of its own."""
    if recipe.filter is None:
        return dict(tensors)
    saved = vars(model).get("pretrained_model_args")
    vars(model)["pretrained_model_args"] = dict(source.timm_kwargs)  # tells the grid that the positions lie on
    try:
        try:
            return dict(recipe.filter(dict(tensors), model))
        except TypeError:  # some take the tensors alone, as timm's own caller knows
            return dict(recipe.filter(dict(tensors)))
    except Exception as error:  # timm's filters index and reshape what they are given, whatever it is
        misfits = list_names(find_misfits(tensors, model.state_dict(), exact=False), separator="; ")
        reason = misfits or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise BackboneError(f"{source.file}: timm cannot adapt it to {type(model).__name__}: {reason}") from error
    finally:
        vars(model)["pretrained_model_args"] = saved


def _describe_filter(
    model: nn.Module, source: Source, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> list[str]:
    """Say what timm's filter changed, counting the tensors of one kind together."""
    changed: dict[str, list[str]] = {}
    for name in sorted(before.keys() & after.keys()):
        if after[name] is not before[name] and not same_bits(before[name], after[name]):
            changed.setdefault(name.rpartition(".")[2], []).append(name)
    notes = []
    for leaf, names in sorted(changed.items()):
        shapes = {f"{tuple(before[name].shape)} -> {tuple(after[name].shape)}": None for name in names}
        how = list_names(shapes, most=2)
        if leaf == "pos_embed":
            how = _describe_grids(model, source, before[names[0]], after[names[0]]) or how
        notes.append(f"{names[0]}: resampled {how}" if len(names) == 1 else f"{len(names)} {leaf}: resampled {how}")
    if gone := sorted(before.keys() - after.keys()):
        notes.append(f"{list_names(gone)}: renamed or left out by timm")
    return notes


def _describe_grids(model: nn.Module, source: Source, old: Tensor, new: Tensor) -> str:
    """Phrase position embeddings (1, N, C) as grids of patches, where the prefix and the grids are known."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not isinstance(grid, tuple) or old.ndim != 3 or new.ndim != 3:
        return ""
    patches = old.shape[1] - (new.shape[1] - grid[0] * grid[1])
    size = source.timm_kwargs.get("img_size")
    if isinstance(size, list | tuple) and len(size) == 2 and size[0] != size[1]:
        height = round((patches * size[0] / size[1]) ** 0.5)
        before = f"{height}x{patches // height}"
    else:
        side = isqrt(max(patches, 0))
        before = f"{side}x{side}" if side * side == patches else f"{patches} patches"
    return f"{before} -> {grid[0]}x{grid[1]}"


def _adapt_channels(recipe: Recipe, adapted: dict[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Convert the first convolution to another number of input channels, as timm does; in place."""
    notes = []
    for name in recipe.names("first_conv"):
        key = f"{name}.weight"
        have, want = adapted.get(key), state.get(key)
        if have is None or want is None or have.ndim != 4 or have.shape[1] == want.shape[1]:
            continue
        base = have.shape[1]
        try:
            adapted[key] = adapt_input_conv(want.shape[1], have, base_chans=base)
        except NotImplementedError:
            continue  # the misfit is named
        notes.append(f"{name}: converted, {base} -> {want.shape[1]} channels")
    return notes


def _replace_heads(
    recipe: Recipe, adapted: dict[str, Tensor], state: Mapping[str, Tensor]
) -> tuple[set[str], list[str]]:
    """Let the model keep its own classifier where the file's has other classes or none; `adapted` in place.

    Returns:
        The tensors that the model keeps, and what to say.
    """
    drawn: set[str] = set()
    notes: list[str] = []
    for head in recipe.names("classifier"):
        keys = [key for key in (f"{head}.weight", f"{head}.bias") if key in state or key in adapted]
        have, want = ([key for key in keys if key in tensors] for tensors in (adapted, state))
        if not keys or (have == want and not _differ_in_classes(keys, adapted, state)):
            continue
        if have and not want:
            notes.append(f"{head}: left out, {len(adapted[have[0]])} -> 0 classes")
            for key in have:
                del adapted[key]
        elif want and not have:
            notes.append(f"{head}: new, {len(state[want[0]])} classes; the file has none")
        elif have == want:
            notes.append(f"{head}: replaced, {len(adapted[have[0]])} -> {len(state[want[0]])} classes")
        else:
            continue  # a bias more or less: the misfit is named
        drawn.update(want)
        adapted.update({key: state[key].clone() for key in want})
    return drawn, notes


def _relax(adapted: dict[str, Tensor], state: Mapping[str, Tensor], drawn: set[str]) -> list[str]:
    """Leave out, and leave as drawn, what timm's own loader would for this model; all three in place, and said."""
    unknown, missing = sorted(adapted.keys() - state.keys()), sorted(state.keys() - adapted.keys())
    for name in unknown:
        del adapted[name]
    adapted.update({name: state[name].clone() for name in missing})
    drawn.update(missing)
    notes = [f"{list_names(unknown)}: left out, this model has none"] if unknown else []
    return notes + ([f"{list_names(missing)}: new, the file has none"] if missing else [])


def _differ_in_classes(keys: Iterable[str], left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Say whether all these differ in their first dimension, the classes, and in nothing else."""
    shapes = [(left[key].shape, right[key].shape) for key in keys]
    return all(len(a) == len(b) > 0 and a[0] != b[0] and a[1:] == b[1:] for a, b in shapes)


def _describe_casts(adapted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    casts: dict[str, int] = {}
    for name, tensor in adapted.items():
        if tensor.dtype != state[name].dtype:
            names = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, state[name].dtype))
            key = " -> ".join(names)
            casts[key] = casts.get(key, 0) + 1
    return [f"{count} tensors cast {key}" for key, count in sorted(casts.items())]


def _compare_arguments(source: Source, model: nn.Module, timm_kwargs: Mapping[str, Any]) -> list[str]:
    """Say where the source was another model: as many heads or a norm's eps show in no tensor's shape."""
    mine = str(model.pretrained_cfg.get("architecture")) if isinstance(model.pretrained_cfg, dict) else ""
    notes = []
    if source.backbone and ":" not in source.backbone and source.backbone.partition(".")[0] != mine:
        notes.append(f"backbone: {source.backbone} -> {mine}")
    keys = source.timm_kwargs.keys() & timm_kwargs.keys()
    if source.attention is not None:  # ours lists what was asked for; timm's folder lists defaults too
        keys = source.timm_kwargs.keys() | timm_kwargs.keys()
    for key in sorted(keys):
        old, new = (_plain(kwargs.get(key, "timm's own")) for kwargs in (source.timm_kwargs, timm_kwargs))
        if old != new and not _FREE.fullmatch(key):
            notes.append(f"{key}: {old} -> {new}")
    return notes


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
