"""What timm would do to load pretrained weights into a model: handed to us instead of done, so that we can check it.

timm loads with strict=False whenever the class count differs, and would read a pickle. So when timm comes to load, it
says how a file becomes this model's weights (its filter, its classifier's name, where the file is), and
`zoo.pretrained` reads the file and loads strictly.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.models import _builder
from timm.models._hub import _get_safe_alternatives, download_from_hf
from torch import Tensor, nn

from zoo.errors import BackboneError
from zoo.files.sources import Source, find_source, read_timm_folder

Filter = Callable[..., dict[str, Tensor]]

_LOADER = "load_pretrained"
_BUILDING = threading.Lock()


@dataclass(frozen=True)
class Recipe:
    """How timm would load weights into one model.

    Attributes:
        config: The model's pretrained_cfg: where the weights are, and the names of its classifier and first layer.
        filter: timm's function (state_dict, model) -> state_dict, which renames old layouts and resamples positions;
            None where timm has none.
        strict: Whether timm wants every tensor used; for a few models it does not (SigLIP without its pooling head).
    """

    config: Mapping[str, Any]
    filter: Filter | None
    strict: bool = True

    def names(self, key: str) -> tuple[str, ...]:
        """Return the module names under `key` of the config, which may hold none, one or several."""
        found = self.config.get(key) or ()
        return (found,) if isinstance(found, str) else tuple(found)


@contextmanager
def loading_by(load: Callable[[nn.Module, Recipe], None]) -> Iterator[None]:
    """Let `timm.create_model(..., pretrained=True)` in this thread call `load` where it would load weights itself."""
    here = threading.get_ident()
    with _BUILDING:
        original = getattr(_builder, _LOADER)

        def hand_over(model: nn.Module, *args: Any, filter_fn: Filter | None = None, **kwargs: Any) -> None:
            if threading.get_ident() != here:  # somebody else's model is loaded as ever
                original(model, *args, filter_fn=filter_fn, **kwargs)
                return
            config = kwargs.get("pretrained_cfg") or model.pretrained_cfg
            assert isinstance(config, dict)
            load(model, Recipe(config, filter_fn, kwargs.get("strict", True)))

        setattr(_builder, _LOADER, hand_over)
        try:
            yield
        finally:
            setattr(_builder, _LOADER, original)


def fetch(recipe: Recipe, backbone: str) -> Source:
    """Find the weights that timm would load: in a local folder, or on the hub, whence they are downloaded and cached.

    Raises:
        BackboneError: If there are none, they cannot be fetched, or are not safetensors.
    """
    kind, where = _builder._resolve_pretrained_source(dict(recipe.config))
    if kind == "local-dir":
        return read_timm_folder(Path(where))
    if kind == "file":
        return find_source(Path(where))
    if kind == "hf-hub":
        hub_id, filename = where if isinstance(where, tuple) else (where, "model.safetensors")
        safe = next(iter([filename] if filename.endswith(".safetensors") else _get_safe_alternatives(filename)), None)
        if safe is None:
            raise BackboneError(f"{backbone}: {hub_id} holds {filename}, not safetensors; no pickle is read")
        try:
            return Source(Path(download_from_hf(hub_id, safe)))
        except Exception as error:  # the network, the hub and its client fail in many ways
            reason = " ".join(str(error).split())[:200]
            raise BackboneError(
                f"{backbone}: cannot fetch {safe} of {hub_id} from the hub ({type(error).__name__}: {reason}); "
                "download it elsewhere and give its path as pretrained"
            ) from error
    if kind == "url":
        raise BackboneError(
            f"{backbone}: timm keeps these weights at {where}, not as safetensors; no pickle is read: convert them "
            "elsewhere and give the path as pretrained"
        )
    raise BackboneError(
        f"{backbone}: timm has no pretrained weights for it; add a tag that has, or give a path as pretrained"
    )
