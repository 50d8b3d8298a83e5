"""Build a timm backbone by name and give its attention the variant that was asked for."""

from pathlib import Path
from typing import Any

import timm
import torch
from timm.models._hub import load_model_config_from_hf
from torch import nn

from zoo.card import Preprocessing
from zoo.errors import BackboneError, BundleError, UnknownNameError, ZooError
from zoo.files.sources import Source, find_source, read_timm_config
from zoo.files.timm_weights import Recipe, fetch, loading_by
from zoo.init import check_scheme
from zoo.pretrained import Loaded, load_pretrained
from zoo.registry import find_attention
from zoo.swap import swap_attention

_ELSEWHERE = ("hf-hub:", "local-dir:")  # timm reads the architecture from there


def create_model(
    backbone: str,
    attention: str = "linear",
    *,
    pretrained: bool | str | Path = False,
    init: str | None = None,
    seed: int | None = None,
    **timm_kwargs: Any,
) -> nn.Module:
    """Build a timm model whose attention projections are of the variant `attention`.

    Args:
        backbone: A timm name, with or without a pretrained tag, or timm's "hf-hub:..." or "local-dir:...".
        attention: A registered variant: "linear", "separate", "parameter" or your own.
        pretrained: Weights to load, which the swap then carries over. True: timm's own, over the network, or those
            of a "local-dir:" backbone. A path: a bundle, a checkpoint of a training, a folder of timm's, or a
            .safetensors file, with timm's names or a swapped model's. Another `img_size` resamples positions, another
            class count leaves the head as it is drawn: `zoo.find_report(model)` says what was adapted.
        init: A scheme that draws the projections (`zoo.init`); None and "timm" keep what timm drew.
        seed: Of everything random in the construction, torch's global stream left as it was; None draws from that
            stream. Two variants made with one seed are the same function.
        **timm_kwargs: Passed to timm: num_classes, img_size, depth, drop_path_rate, ...

    Returns:
        The model, (B, 3, height, width) -> (B, K), on the CPU, in train mode.

    Raises:
        UnknownNameError: If the backbone, the variant or the scheme is not known.
        BackboneError: If timm cannot build the backbone with these arguments, `pretrained` comes with `init`, or the
            weights do not fit: every tensor that is missing, unknown or of the wrong shape is named.
        SwapError: If the backbone's attention cannot be swapped.
    """
    find_attention(attention)
    if init is not None:
        check_scheme(init)
        if pretrained:
            raise BackboneError(f"{backbone}: init={init!r} would overwrite pretrained weights; give one of the two")
    _check_backbone(backbone)
    checkpoint = timm_kwargs.get("checkpoint_path")
    if checkpoint and not str(checkpoint).endswith(".safetensors"):
        raise BackboneError(f"{backbone}: checkpoint_path={str(checkpoint)!r}: only .safetensors, no pickle, is read")
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        loaded: Loaded | None = None
        if pretrained is False:
            model = _build(backbone, timm_kwargs, pretrained=False)
        else:
            path = None if pretrained is True else str(pretrained)
            model, loaded = _build_pretrained(backbone, attention, path, timm_kwargs)
        swap_attention(model, attention, init=None if init == "timm" else init, seed=seed)
    if loaded is not None:
        loaded.finish(model)
    return model


def _build(backbone: str, timm_kwargs: dict[str, Any], *, pretrained: bool) -> nn.Module:
    """Let timm build a backbone; whatever it raises becomes one line."""
    try:
        model = timm.create_model(backbone, pretrained=pretrained, **timm_kwargs)
    except ZooError:  # of ours, while timm had us load
        raise
    except Exception as error:  # timm checks little: a wrong argument ends in any class of error
        given = ", ".join(f"{key}={value!r}" for key, value in timm_kwargs.items())
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise BackboneError(f"{backbone}: timm cannot build it with {given or 'its defaults'}: {reason}") from error
    assert isinstance(model, nn.Module)
    return model


def _build_pretrained(
    backbone: str, attention: str, path: str | None, timm_kwargs: dict[str, Any]
) -> tuple[nn.Module, Loaded]:
    """Let timm build a backbone, and load weights at the moment that timm would: those at `path`, or timm's own."""
    loaded: list[Loaded] = []
    given = None if path is None else find_pretrained(path)

    def load(model: nn.Module, recipe: Recipe) -> None:
        try:
            source = given or fetch(recipe, backbone)
        except BundleError as error:
            raise BackboneError(str(error)) from error
        loaded.append(load_pretrained(model, recipe, source, attention, timm_kwargs))

    with loading_by(load):
        model = _build(backbone, timm_kwargs, pretrained=True)
    if not loaded:
        raise BackboneError(f"{backbone}: timm loads no weights into this model")
    return model, loaded[0]


def find_pretrained(path: str) -> Source:
    """Return what weights lie at a path, as `create_model` takes it; raise BackboneError if it could not load them."""
    try:
        return find_source(Path(path.removeprefix("local-dir:")))
    except BundleError as error:
        raise BackboneError(f"pretrained {error}") from error


def _check_backbone(backbone: str) -> None:
    """Raise UnknownNameError for a name timm does not know, BackboneError for a folder that holds no safetensors."""
    if backbone.startswith("local-dir:"):
        folder = Path(backbone.removeprefix("local-dir:"))
        for name in ("config.json", "model.safetensors"):  # by any other name timm may prefer a pickle beside it
            if not (folder / name).is_file():
                raise BackboneError(f"{backbone}: no {name} in {folder}; pickled weights are not read")
        _read_config(folder)
    elif not backbone.startswith(_ELSEWHERE) and not timm.is_model(backbone):
        raise UnknownNameError("backbone", backbone, timm.list_models(), "python -m zoo list shows them")


def find_architecture(backbone: str) -> tuple[str, dict[str, Any]]:
    """Return the name in timm, and the arguments, of a backbone that may live outside of timm.

    A bundle is built from these two and its own weights: it must not depend on a hub or on a folder that may move.

    Args:
        backbone: As for `create_model`; "hf-hub:" reads the configuration over the network.
    """
    if backbone.startswith("local-dir:"):
        name, args = _read_config(Path(backbone.removeprefix("local-dir:")))
    elif backbone.startswith("hf-hub:"):
        _, name, args = load_model_config_from_hf(backbone.removeprefix("hf-hub:"))
    else:
        return backbone, {}
    return str(name), dict(args or {})


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    try:
        _, name, args = read_timm_config(folder)
    except BundleError as error:
        raise BackboneError(str(error)) from error
    return name, args


def find_preprocessing(backbone: str, **timm_kwargs: Any) -> Preprocessing:
    """Return what timm feeds a backbone: its size, crop, interpolation, mean and std.

    Args:
        backbone: As for `create_model`.
        **timm_kwargs: As for `create_model`; `img_size` decides the size.

    Raises:
        ZooError: As `create_model`; the model is built on the meta device, so nothing is allocated or loaded.
    """
    with torch.device("meta"):
        model = create_model(backbone, **timm_kwargs)
    args: dict[str, Any] = {}
    if (size := timm_kwargs.get("img_size")) is not None:  # timm's own resolution reads the pretrained size
        height, width = (size, size) if isinstance(size, int) else size
        args["input_size"] = (3, height, width)
    resolved = timm.data.resolve_model_data_config(model, args=args)  # type: ignore[no-untyped-call]
    return Preprocessing.from_timm(resolved)
