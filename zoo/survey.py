"""What attention each timm model has: looked up in the file `survey.json`, which `python -m zoo.survey` writes anew.

The file holds facts of timm alone, not what the zoo makes of them: a new row in `zoo.timm_map` needs no new survey.
Reading it imports neither torch nor timm, so that `python -m zoo list` is quick; looking at a model does.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

FILE = "survey.json"


@dataclass(frozen=True)
class Form:
    """An attention class and the layers that it holds.

    Attributes:
        name: The class, with its module.
        layers: Class of every layer with a weight matrix below it (nn.Linear, nn.Conv2d), by path.
    """

    name: str
    layers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Facts:
    """A timm model.

    Attributes:
        name: Its name in timm.
        family: The file of timm's that defines it, as "vision_transformer".
        parameters: How many numbers it learns, with timm's own class count.
        img_size: Side of its input in pixels; None where the model does not say.
        attention: Its forms of attention, and how many modules of each.
    """

    name: str
    family: str
    parameters: int
    img_size: int | None
    attention: tuple[tuple[Form, int], ...]


@dataclass(frozen=True)
class Survey:
    """All timm models that have attention in their blocks, and the version of timm that was looked at."""

    timm: str
    models: tuple[Facts, ...]


def look_at(name: str) -> Facts:
    """Build a timm model on the meta device and say what attention it has; nothing is allocated or downloaded."""
    import timm
    import torch

    from zoo.slots import iter_claims

    with torch.device("meta"):
        model = timm.create_model(name)
    assert isinstance(model, torch.nn.Module)
    input_size = (getattr(model, "default_cfg", None) or {}).get("input_size")  # a user's own model may have none
    return Facts(
        name=name,
        family=type(model).__module__.rpartition(".")[2],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        img_size=int(input_size[-1]) if input_size else None,
        attention=tuple(sorted(Counter(_form(module) for _, module in iter_claims(model)).items(), key=str)),
    )


def look_at_all(names: Iterable[str], *, processes: int = 2) -> Iterator[Facts]:
    """Look at many timm models side by side, in the order of their names; those without attention are left out."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from (facts for facts in pool.map(look_at, names, chunksize=8) if facts.attention)


@cache
def read_survey() -> Survey:
    """Return the survey that came with the package."""
    read = json.loads(files("zoo").joinpath(FILE).read_text(encoding="utf-8"))
    forms = [Form(form["name"], tuple(form["layers"].items())) for form in read["forms"]]
    models = (
        Facts(name, family, parameters, img_size, tuple((forms[index], count) for index, count in attention))
        for name, (family, parameters, img_size, attention) in read["models"].items()
    )
    return Survey(read["timm"], tuple(models))


def write_survey(survey: Survey, path: Path) -> None:
    """Write a survey as JSON, a line for each form and each model, so that a change of timm's reads well."""
    forms = sorted({form for facts in survey.models for form, _ in facts.attention}, key=str)
    rows = {
        facts.name: [
            facts.family,
            facts.parameters,
            facts.img_size,
            [[forms.index(form), count] for form, count in facts.attention],
        ]
        for facts in survey.models
    }
    lines = ",\n".join(json.dumps({"name": form.name, "layers": dict(form.layers)}) for form in forms)
    models = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    text = f'{{"timm": {json.dumps(survey.timm)}, "forms": [\n{lines}\n], "models": {{\n{models}\n}}}}\n'
    path.write_text(text, encoding="utf-8")


def _form(attention: "nn.Module") -> Form:
    from torch import nn

    from zoo.slots import qualified_name

    layers = {
        name: type(module).__name__
        for name, module in attention.named_modules()
        if name and isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    return Form(qualified_name(attention), tuple(layers.items()))


if __name__ == "__main__":
    import timm

    names = timm.list_models()
    found = []
    for facts in look_at_all(names):
        found.append(facts)
        sys.stderr.write(f"\r{len(found)} models have attention, now {facts.name:<60}")
    write_survey(Survey(timm.__version__, tuple(found)), Path(str(files("zoo").joinpath(FILE))))
    sys.stdout.write(f"\n{len(found)} of {len(names)} models of timm {timm.__version__} have attention\n")
