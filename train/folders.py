"""Folders of images: ROOT/CLASS/..., or ROOT/train/CLASS/... and ROOT/val/CLASS/... (or validation, or test).

The class map comes from the training part and holds for both. Names are sorted and in Unicode's composed form, so the
map is the same on every machine and file system. Hidden files and folders are passed over.
"""

import logging
import os
import unicodedata
from pathlib import Path

import xxhash

from train.errors import DataError
from train.images import Images, Split

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_VAL_NAMES = ("val", "validation", "test")
_log = logging.getLogger(__name__)

Files = dict[str, Path]  # name relative to the part's folder -> where it lies


def read_folder(root: Path, val_fraction: float, split_seed: int) -> Split:
    """List the images below `root` and split them, unless they come in two parts.

    Raises:
        DataError: If a folder is missing, unreadable or empty, or the classes of the parts do not agree.
    """
    if not root.is_dir():
        raise DataError(f"data.root {root}: {'not a folder' if root.exists() else 'no such folder'}")
    parts = _find_parts(root)
    if parts is None:
        classes = _checked_classes(root)
        return _split(classes, val_fraction, split_seed)
    train_dir, val_dir = parts
    classes = _checked_classes(train_dir)
    if val_dir is None:
        return _split(classes, val_fraction, split_seed)
    held_out = _match_classes(classes, _list_classes(val_dir), val_dir)
    return Split(_label(classes, classes), _label(held_out, classes), tuple(classes))


def _find_parts(root: Path) -> tuple[Path, Path | None] | None:
    """Return the folders of the two parts, or None where `root` holds the classes themselves."""
    folders = _list_dir(root)[0]
    train = folders.get("train")
    if train is None or not _list_dir(train)[0] or any(map(_is_image, _list_dir(train)[1])):
        return None  # a class may well be called train: then images lie right in it
    val = next((folders[name] for name in _VAL_NAMES if name in folders), None)
    others = [name for name, path in folders.items() if path not in (train, val)]
    if others:
        _log.warning("data.root %s: train/ is the training part; %s is not used", root, ", ".join(others))
    return train, val


def _checked_classes(folder: Path) -> dict[str, Files]:
    """List the classes of a training part; raise DataError unless there are two or more, each with images."""
    classes = _list_classes(folder)
    if not any(classes.values()):
        loose = sum(map(_is_image, _list_dir(folder)[1]))
        found = f"{loose} images outside any class folder" if loose else f"no images ({', '.join(SUFFIXES)})"
        raise DataError(f"data.root {folder}: {found}; wanted a folder for each class, such as {folder / 'cat'}/1.jpg")
    empty = [name for name, files in classes.items() if not files]
    if empty:
        raise DataError(f"data.root {folder}: no images for class {', '.join(map(repr, empty))}; add some or remove it")
    if len(classes) == 1:
        raise DataError(f"data.root {folder}: one class only, {next(iter(classes))!r}; wanted two or more")
    return classes


def _match_classes(train: dict[str, Files], val: dict[str, Files], folder: Path) -> dict[str, Files]:
    """Return the validation files of training's classes, in training's order."""
    extra = [name for name in val if name not in train]
    if extra:
        raise DataError(
            f"{folder}: class {', '.join(map(repr, extra))} is not in the training part, which has "
            f"{', '.join(map(repr, list(train)[:20]))}{', ...' if len(train) > 20 else ''}"
        )
    if not any(val.values()):
        raise DataError(f"{folder}: no images ({', '.join(SUFFIXES)}); without this folder a part of train is held out")
    without = [name for name in train if not val.get(name)]
    if without:
        _log.warning("%s: no images for class %s; these classes are not scored", folder, ", ".join(map(repr, without)))
    return {name: val.get(name, {}) for name in train}


def _split(classes: dict[str, Files], val_fraction: float, split_seed: int) -> Split:
    """Hold out a part of each class: the files whose hashed names come first, so that new files move few old ones."""
    train: dict[str, Files] = {}
    val: dict[str, Files] = {}
    for label, files in classes.items():
        if len(files) < 2:
            raise DataError(f"class {label!r} has one image, {next(iter(files))}; two are needed to hold one out")
        ranked = sorted(files, key=lambda name: (xxhash.xxh3_64_intdigest(name.encode(), seed=split_seed), name))
        num_val = min(max(1, round(len(files) * val_fraction)), len(files) - 1)
        held_out = set(ranked[:num_val])
        train[label] = {name: path for name, path in files.items() if name not in held_out}
        val[label] = {name: path for name, path in files.items() if name in held_out}
    return Split(_label(train, classes), _label(val, classes), tuple(classes))


def _label(files: dict[str, Files], classes: dict[str, Files]) -> Images:
    index = {name: i for i, name in enumerate(classes)}
    rows = [(name, index[label], path) for label in classes for name, path in files[label].items()]
    return Images(tuple(r[0] for r in rows), tuple(r[1] for r in rows), tuple(r[2] for r in rows))


def _list_classes(folder: Path) -> dict[str, Files]:
    """Return the images of each class below `folder`, at any depth; empty classes too."""
    return {
        name: {f"{name}/{below}": file for below, file in sorted(_walk(path, "").items())}
        for name, path in _list_dir(folder)[0].items()
    }


def _walk(folder: Path, prefix: str) -> Files:
    folders, files = _list_dir(folder)
    found = {prefix + name: path for name, path in files.items() if _is_image(name)}
    for name, path in folders.items():
        found |= _walk(path, f"{prefix}{name}/")
    return found


def _list_dir(folder: Path) -> tuple[Files, Files]:
    """Return what is visible in a folder, (folders, files), each by its composed name and sorted by it.

    Raises:
        DataError: If the folder cannot be read, a name is no text, or two names differ in Unicode's form only.
    """
    both: tuple[Files, Files] = ({}, {})
    try:
        with os.scandir(folder) as entries:
            visible = [(e.name, e.is_dir()) for e in entries if not e.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from error
    for raw, is_dir in visible:
        name = unicodedata.normalize("NFC", raw)
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise DataError(f"{str(folder / raw)!a}: the name is not UTF-8; rename it")
        found = both[0 if is_dir else 1]
        if name in found:
            raise DataError(f"{folder / raw}: another name is the same text in another Unicode form; rename one")
        found[name] = folder / raw
    folders, files = (dict(sorted(found.items())) for found in both)
    return folders, files


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)
