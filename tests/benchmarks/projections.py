"""Time each variant's attention against timm's own module: `python tests/benchmarks/projections.py [--compiled]`.

All forms take turns in one run, so that a change of the machine's load meets them alike; the figure is the median of
the ratios of neighbours, in CPU time. One thread, float32, batch 8.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

import zoo

HEAD_DIM, BATCH = 64, 8


def main() -> None:
    """Print a row for each width and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds: about a minute")
    parser.add_argument("--compiled", action="store_true", help="all forms through torch.compile")
    given = parser.parse_args()
    rounds = 15 if given.quick else 80
    torch.set_num_threads(1)
    variants = ("timm again", *zoo.list_attentions())  # the first shows the noise
    how = "compiled" if given.compiled else "eager"
    print(f"{how}: ratio of time to timm's own attention, training (forward and backward) / inference")
    print(" ".join([f"{'dim':>5} {'tokens':>6}", *(f"{name:>15}" for name in variants)]))
    for dim in (192, 384, 768):
        for num_tokens in (65, 197):
            ratios = compare(dim, num_tokens, rounds, compiled=given.compiled)
            cells = (f"{ratios[name][0]:.3f} / {ratios[name][1]:.3f}" for name in variants)
            print(" ".join([f"{dim:>5} {num_tokens:>6}", *(f"{cell:>15}" for cell in cells)]), flush=True)


def compare(dim: int, num_tokens: int, rounds: int, *, compiled: bool) -> dict[str, tuple[float, float]]:
    """Return each form's ratio of time to timm's, (training, inference), the median over `rounds`."""
    stock = nn.Sequential(Attention(dim, dim // HEAD_DIM, qkv_bias=True))
    forms = {"timm": stock, "timm again": build_same(stock)}
    for variant in zoo.list_attentions():
        forms[variant] = build_same(stock)
        zoo.swap_attention(forms[variant], variant)
    if compiled:
        torch.compiler.reset()
        for form in forms.values():
            form.compile(fullgraph=True, dynamic=False)
    x = torch.randn(BATCH, num_tokens, dim)
    training, inference = (interleave(step, forms, x, rounds) for step in (train, infer))
    return {name: (training[name], inference[name]) for name in forms}


def build_same(stock: nn.Module) -> nn.Module:
    """Return timm's module with the same weights, in memory of its own."""
    dim = stock.get_parameter("0.proj.weight").shape[0]
    model = nn.Sequential(Attention(dim, dim // HEAD_DIM, qkv_bias=True))
    model.load_state_dict(stock.state_dict())
    return model


def interleave(
    step: Callable[[nn.Module, Tensor], None], forms: dict[str, nn.Module], x: Tensor, rounds: int
) -> dict[str, float]:
    """Time every form once a round, starting with another one each time; return median ratios to "timm"."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    names = list(forms)
    for turn in range(rounds + 3):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.process_time()
            step(forms[name], x)
            times[name].append(time.process_time() - start)
    warm = {name: seen[3:] for name, seen in times.items()}
    return {
        name: statistics.median(ours / timms for ours, timms in zip(seen, warm["timm"], strict=True))
        for name, seen in warm.items()
    }


def train(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward, with a gradient for the input as inside a network."""
    model.zero_grad(set_to_none=True)
    model(x.requires_grad_()).sum().backward()
    x.grad = None


@torch.inference_mode()
def infer(model: nn.Module, x: Tensor) -> None:
    """Run forward without autograd."""
    model(x)


if __name__ == "__main__":
    main()
