"""Somebody's own training with Accelerate: own model, own loop, no recipe. The lines marked # check are all it adds.

accelerate launch --config_file accelerate_config.yaml own_script.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from train.drift import DriftCheck  # check
from train.replicas import check_replicas  # check


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", choices=["none", "seed", "inner", "cpu"], default="none")
    mistake = parser.parse_args().mistake

    accelerator = Accelerator(cpu=mistake != "cpu" and not torch.cuda.is_available())
    set_seed(42 + (accelerator.process_index if mistake == "seed" else 0))
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(64, 16), torch.arange(64) % 4
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)

    accelerator.print(check_replicas(model, accelerator))  # check, before prepare
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    drift = DriftCheck(model, accelerator, optimizer, every_steps=3)  # check

    step = 0
    for _ in range(3):
        for inputs, targets in loader:
            forward = accelerator.unwrap_model(model) if mistake == "inner" else model
            loss = nn.functional.cross_entropy(forward(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            drift.after_step(step)  # check
    accelerator.print(f"trained {step} steps; {drift.checks} drift checks")
    accelerator.end_training()


if __name__ == "__main__":
    main()
