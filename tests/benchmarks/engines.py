"""The engines side by side on one model: images a second, CPU milliseconds an image, and how far answers differ.

    python tests/benchmarks/engines.py                  speed, on a fresh ViT-tiny/16 at 224
    python tests/benchmarks/engines.py BUNDLE           the same on a trained bundle; of one that was trained on the
                                                        digits, its top-1 on all 1,797 of scikit-learn's too

The engines take turns within each round, so that whatever else the machine does falls on all alike; the median of the
rounds is told. CPU time is that of this whole process, idle threads included.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the server sets it

import numpy as np

import zoo
from serve.engines.engine import Engine, EngineOptions
from serve.engines.opening import open_engine
from serve.equip.write import equip
from serve.errors import EngineError
from train.config import DataConfig
from train.data import read_split
from zoo.card import EngineChoice, ModelCard
from zoo.create import find_preprocessing
from zoo.errors import UnfitEngineError
from zoo.files.golden import read_bundle_card
from zoo.preprocess import preprocess

BATCHES = (1, 8, 32)
CHOICES = (
    EngineChoice(),
    EngineChoice(precision="bf16"),
    EngineChoice(name="compile"),
    EngineChoice(name="onnx"),
)
BACKBONE = "vit_tiny_patch16_224"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--skip", nargs="*", default=[], help="engines to leave out: compile")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        bundle = asked.bundle or make_bundle(Path(folder) / "bundle")
        options = EngineOptions(device="cpu", threads=asked.threads, max_batch=max(BATCHES))
        engines = open_all(bundle, Path(folder), options, asked.skip)
        card = read_bundle_card(bundle)
        print(
            f"{card.backbone}, {card.preprocessing.size}, {options.num_threads} threads, load {os.getloadavg()[0]:.1f}"
        )
        measure_speed(engines, card, asked.rounds)
        compare_answers(engines, card)


def make_bundle(path: Path) -> Path:
    """Write a bundle of a fresh ViT-tiny/16."""
    names = tuple(f"class {k}" for k in range(1000))
    card = ModelCard(backbone=BACKBONE, class_names=names, preprocessing=find_preprocessing(BACKBONE))
    zoo.save_bundle(zoo.create_model(BACKBONE, seed=0, num_classes=1000), card, path)
    return path


def open_all(bundle: Path, folder: Path, options: EngineOptions, skip: list[str]) -> dict[str, Engine]:
    """Open every engine that works here, each warm."""
    opened: dict[str, Engine] = {}
    for choice in CHOICES:
        if choice.name in skip:
            continue
        start = time.perf_counter()
        path = bundle
        try:
            if choice.name == "onnx":
                path = folder / "onnx"
                equip(bundle, path, choice)
                start = time.perf_counter()
            engine, difference = open_engine(path, read_bundle_card(path), choice=choice, options=options)
        except (EngineError, UnfitEngineError) as error:
            print(f"{choice.name} {choice.precision}: {error}", file=sys.stderr)
            continue
        engine.warm_up()
        name = f"{choice.name} {choice.precision}"
        print(f"{name:12} ready in {time.perf_counter() - start:5.1f} s, golden logits differ by {difference:.1e}")
        opened[name] = engine
    return opened


def measure_speed(engines: dict[str, Engine], card: ModelCard, rounds: int) -> None:
    """Print images a second and CPU milliseconds an image, by engine and batch size."""
    noise = np.random.default_rng(0)
    print(f"{'engine':12}" + "".join(f"{f'batch {count}: images/s, CPU ms':>28}" for count in BATCHES))
    cells: dict[str, list[str]] = {name: [] for name in engines}
    for count in BATCHES:
        images = noise.standard_normal((count, 3, *card.preprocessing.size), dtype=np.float32)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(max(1, 8 // count)):
                    engine.run(images)
                done = count * max(1, 8 // count)
                taken[name].append(((time.perf_counter() - wall) / done, (time.process_time() - cpu) / done))
        for name, times in taken.items():
            wall, cpu = (statistics.median(one) for one in zip(*times, strict=True))
            cells[name].append(f"{f'{1 / wall:.1f}, {1000 * cpu:.1f}':>28}")
    for name, row in cells.items():
        print(f"{name:12}{''.join(row)}")


def compare_answers(engines: dict[str, Engine], card: ModelCard) -> None:
    """Print how far the logits lie from eager fp32's, and the top-1 on the digits where those are the classes."""
    digits = card.class_names == tuple(map(str, range(10)))
    if digits:
        split = read_split(DataConfig(root="builtin:digits"))
        parts = {"train": split.train, "validation": split.val}
        files = {part: [images.read(i) for i in range(len(images))] for part, images in parts.items()}
        inputs = {
            part: np.stack([preprocess(file, card.preprocessing) for file in some]) for part, some in files.items()
        }
    else:
        parts = {}
        size = (16, 3, *card.preprocessing.size)
        inputs = {"noise": np.random.default_rng(1).standard_normal(size, dtype=np.float32)}
    for part, images in inputs.items():
        wanted = engines["eager fp32"].run(images)
        for name, engine in engines.items():
            got = engine.run(images)
            apart, largest = np.abs(got - wanted).max(), np.abs(wanted).max()
            line = f"{name:12} {part}: logits differ by {apart:.1e} (largest {largest:.1f})"
            if part in parts:
                right = int((got.argmax(1) == np.array(parts[part].labels)).sum())
                line += f", top-1 {right / len(images):.2%} ({right} of {len(images)})"
            print(line)


if __name__ == "__main__":
    main()
