"""An abstract test suite for attention variants, for pytest: whatever a variant must keep, in one class.

    import zoo.testing

    class TestMine(zoo.testing.VariantSuite):
        attention = "mine"
        plugins = "my_attention.py"

Every test runs over tiny models of all `backbones`. What a variant does not claim is skipped: see the attributes.
"""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from unittest import SkipTest

import timm
import torch
from torch import Tensor, nn

import zoo
from zoo.errors import SwapError
from zoo.files.ties import find_ties
from zoo.init import expected_std
from zoo.trial import (
    PLAIN,
    TINY,
    Backbones,
    Pair,
    assert_clean,
    backward,
    disturb,
    named_weights,
    share,
    step,
    through_bundle,
)


class VariantSuite:
    """Tests of one registered variant; a subclass whose name starts with Test is collected.

    Attributes:
        attention: The variant's name.
        plugins: What registers it, as for `zoo.load_plugins`; empty where the test file or a package does.
        backbones: timm's names and arguments of the models to try; tiny ones, with `num_classes` and `img_size`.
        same_function: Whether a swapped model answers as timm's. Where it does not, on purpose, what compares the two
            is skipped; all else is asked of the variant itself.
        exact: Whether a swapped model answers as before to the last bit; if not, within `tolerance`.
        tolerance: Largest difference, absolute and relative, of logits, gradients and weights where not `exact`.
        bf16_tolerance: The same for logits under bf16 autocast, which keeps 8 bits; never less than `tolerance`.
        restores: Whether timm's own module can come back: false where the variant has parameters of its own.
        schemes: The init schemes that the variant's projections can be drawn by.
        exports: Whether torch.export is tried; it takes seconds for each backbone.
        compiles: Whether torch.compile is tried, in one graph.
    """

    attention: ClassVar[str]
    plugins: ClassVar[str | Path | tuple[str | Path, ...]] = ()
    backbones: ClassVar[Backbones] = (
        *PLAIN,
        ("vit_base_patch16_sapiens2", TINY | {"num_heads": 4, "num_kv_heads": (2, 2)}),  # narrower k and v, apart
        ("eva_giant_patch14_224", TINY),  # its biases stand outside of the projections
    )
    same_function: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5
    bf16_tolerance: ClassVar[float] = 0.05
    restores: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("torch", "trunc_normal", "normal")
    exports: ClassVar[bool] = False
    compiles: ClassVar[bool] = False

    def test_it_is_registered(self) -> None:
        """The name is known, to be listed and to be found."""
        self._load()
        assert self.attention in zoo.list_attentions(), (
            f"{self.attention!r} is not registered; decorate its class with @zoo.register_attention({self.attention!r})"
        )

    def test_a_swap_keeps_the_logits(self) -> None:
        """In eval mode the swapped model answers as the stock one."""
        self._skip_unless(self.same_function, "same_function")
        for where, stock, ours, images in self._pairs():
            with torch.no_grad():
                self._assert_same(ours(images), stock(images), f"{where}: logits in eval mode")

    def test_a_swap_keeps_a_training_step(self) -> None:
        """In train mode, dropout included, logits agree; after a step by the gradients all weights agree."""
        self._skip_unless(self.same_function, "same_function")
        for where, stock, ours, images in self._pairs():
            got, want = step(ours, images), step(stock, images)
            self._assert_same(got, want, f"{where}: logits in train mode")
            after = named_weights(ours)
            for name, tensor in named_weights(stock).items():
                self._assert_same(after[name], tensor, f"{where}: {name} after a step along its gradient")

    def test_logits_and_gradients_are_finite(self) -> None:
        """In train mode logits are finite, and a finite gradient reaches every parameter."""
        for where, _, ours, images in self._pairs():
            assert bool(backward(ours.train(), images, seed=5).isfinite().all()), f"{where}: NaN or Inf in the logits"
            self._assert_gradients(ours, where)

    def test_restore_gives_timms_state_dict_back(self) -> None:
        """After a restore the state_dict is timm's, strictly and bit for bit; before, timm's loads into the variant."""
        for where, stock, ours, images in self._pairs():
            if not self.restores:
                self._check_refused(ours, where)
                continue
            other = copy.deepcopy(stock)
            disturb(other, seed=1)
            zoo.swap_attention(other, self.attention)
            other.load_state_dict(stock.state_dict(), strict=True)
            with torch.no_grad():
                want = (stock if self.same_function else ours)(images)
                self._assert_same(other(images), want, f"{where}: logits with timm's state_dict loaded")
            zoo.restore_attention(ours)
            restored, timms = ours.state_dict(), stock.state_dict()
            assert list(restored) == list(timms), (
                f"{where}: restored names differ: {sorted(restored.keys() ^ timms.keys())[:5]}"
            )
            for name, tensor in timms.items():
                assert torch.equal(restored[name], tensor), f"{where}: {name} came back with other values"

    def test_a_bundle_brings_it_back(self) -> None:
        """A bundle holds the whole state; loaded, it answers its golden example."""
        for where, _, ours, _ in self._pairs():
            loaded = self._through_bundle(where, ours)
            got, want = loaded.state_dict(), ours.state_dict()
            assert got.keys() == want.keys(), f"{where}: names changed: {sorted(got.keys() ^ want.keys())[:5]}"
            for name, tensor in want.items():
                assert torch.equal(got[name], tensor), f"{where}: {name} came back with other values"

    def test_ties_survive(self) -> None:
        """Attention modules that share their parameters share them after deepcopy and through a bundle."""
        for where, _, ours, _ in self._pairs():
            names = list(zoo.attention_weights(ours))
            share(ours.get_submodule(names[0]), ours.get_submodule(names[1]))
            ties = find_ties(ours.state_dict())
            assert ties, f"{where}: {names[1]} shares no parameter with {names[0]} though they were made one"
            for how, other in (("deepcopy", copy.deepcopy(ours)), ("bundle", self._through_bundle(where, ours))):
                lost = ties.keys() - find_ties(other.state_dict()).keys()
                assert not lost, f"{where}: {how} untied {sorted(lost)[:3]}"

    def test_the_audit_finds_nothing(self) -> None:
        """Looked at, tried on a batch, and after three steps of AdamW: every parameter learns."""
        for where, _, ours, images in self._pairs():
            assert_clean(zoo.audit(ours, batch=images), f"{where}, on a batch")
            optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
            before = zoo.snapshot(ours, optimizer)
            for seed in range(3):
                backward(ours.train(), images, seed=seed)
                optimizer.step()
            assert_clean(zoo.audit(ours, optimizer, before=before), f"{where}, after three steps")

    def test_it_freezes_and_unfreezes(self) -> None:
        """A frozen attention stays still while the rest learns, and learns again when unfrozen."""
        for where, _, ours, images in self._pairs():
            attention = next(iter(zoo.attention_weights(ours)))
            frozen = zoo.freeze(ours, attention)
            before = {name: tensor.detach().clone() for name, tensor in ours.named_parameters()}
            step(ours, images)
            moved = {name for name, tensor in ours.named_parameters() if not torch.equal(tensor, before[name])}
            assert not moved & set(frozen), f"{where}: frozen and moved: {sorted(moved & set(frozen))[:3]}"
            assert moved, f"{where}: nothing moved beside the frozen {attention}"
            zoo.unfreeze(ours, attention)
            still = [name for name, tensor in ours.named_parameters() if not tensor.requires_grad]
            assert not still, f"{where}: still frozen: {still[:3]}"

    def test_deepcopy_is_a_model_of_its_own(self) -> None:
        """A copy answers the same and shares no memory."""
        for where, _, ours, images in self._pairs():
            other = copy.deepcopy(ours)
            with torch.no_grad():
                assert torch.equal(other(images), ours(images)), f"{where}: a deepcopy answers otherwise"
            places = {tensor.data_ptr() for tensor in ours.parameters()}
            shared = [name for name, tensor in other.named_parameters() if tensor.data_ptr() in places]
            assert not shared, f"{where}: a deepcopy shares {shared[:3]} with its original"

    def test_autocast_works(self) -> None:
        """Under bf16 autocast logits are near those in float32, and every parameter gets a finite gradient."""
        for where, stock, ours, images in self._pairs():
            with torch.no_grad():
                want = (stock if self.same_function else ours)(images)
            with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
                warnings.simplefilter("ignore", UserWarning)  # torch's, of its own LayerNorm
                got = ours(images)
            difference, allowed = (got - want).abs(), max(self.bf16_tolerance, self.tolerance) * (1 + want.abs().max())
            assert bool((difference <= allowed).all()), (
                f"{where}: off by {difference.max().item():.3g} under bf16, allowed is {allowed.item():.3g}"
            )
            got.float().square().sum().backward()
            self._assert_gradients(ours, f"{where}, under bf16")

    def test_init_schemes_draw_what_they_say(self) -> None:
        """Each scheme fills every projection, with its own standard deviation, and biases with finite numbers."""
        for where, stock, _, _ in self._pairs():
            for scheme in self.schemes:
                model = copy.deepcopy(stock)
                zoo.swap_attention(model, self.attention, init=scheme, seed=3)
                for name, tensors in zoo.attention_weights(model).items():
                    for part, tensor in tensors.items():
                        assert bool(tensor.isfinite().all()), f"{where}: {scheme} left {name} {part} with NaN or Inf"
                        want = expected_std(scheme, *tensor.shape) if tensor.ndim == 2 else None
                        got = tensor.std().item()
                        assert want is None or 0.85 < got / want < 1.15, (
                            f"{where}: {scheme} gave {name} {part} a std of {got:.3g}, and says {want:.3g}"
                        )

    def test_attention_weights_show_timms_matrices(self) -> None:
        """q, k, v, out and biases read as timm's own, (out, in), and are views that write through."""
        for where, stock, ours, images in self._pairs():
            got, want = zoo.attention_weights(ours), zoo.attention_weights(stock)
            assert list(got) == list(want), f"{where}: attention modules {list(got)}, timm has {list(want)}"
            for name, tensors in want.items():
                assert got[name].keys() == tensors.keys(), f"{where}: {name} shows {sorted(got[name])}"
                for part, tensor in tensors.items():
                    assert torch.equal(got[name][part], tensor), (
                        f"{where}: {name} {part} is not timm's (out, in) matrix: {tuple(got[name][part].shape)}, "
                        f"timm's {tuple(tensor.shape)}"
                    )
            with torch.no_grad():
                before = ours(images)
                next(iter(got.values()))["q"].mul_(3)
                assert not torch.equal(ours(images), before), f"{where}: q is a copy, not a view of the model's storage"

    def test_it_exports(self) -> None:
        """torch.export takes the model, and the program answers as the model does."""
        self._skip_unless(self.exports, "exports")
        for where, _, ours, images in self._pairs():
            program = torch.export.export(ours, (images,)).module()
            with torch.no_grad():
                torch.testing.assert_close(program(images), ours(images), msg=f"{where}: the exported program differs")

    def test_it_compiles(self) -> None:
        """torch.compile takes the model in one graph, and it answers as the model does."""
        self._skip_unless(self.compiles, "compiles")
        for where, _, ours, images in self._pairs():
            compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
            with torch.no_grad():
                torch.testing.assert_close(compiled(images), ours(images), msg=f"{where}: the compiled model differs")
            torch._dynamo.reset()

    def _load(self) -> None:
        assert hasattr(self, "attention"), f"{type(self).__name__} wants the variant's name: attention = 'mine'"
        if self.plugins:
            zoo.load_plugins(self.plugins)

    def _pairs(self) -> Iterator[Pair]:
        """Build each backbone twice, stock and swapped, in eval mode; give them with a name and a batch of images."""
        self._load()
        for index, (backbone, kwargs) in enumerate(self.backbones):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                stock = timm.create_model(backbone, **kwargs).eval()
            disturb(stock, seed=0)
            ours = copy.deepcopy(stock)
            zoo.swap_attention(ours, self.attention)
            size = int(kwargs.get("img_size", 224))
            images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(7))
            yield f"backbones[{index}], {backbone} with {self.attention}", stock, ours, images

    def _assert_same(self, got: Tensor, want: Tensor, what: str) -> None:
        assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
        difference = (got - want).abs()
        allowed = 0.0 if self.exact else self.tolerance * (1 + want.abs())
        assert bool((difference <= allowed).all()), (
            f"{what}: differ by up to {difference.max().item():.3g}, allowed is "
            f"{f'{self.tolerance:g} of them' if not self.exact else 'nothing (exact = True)'}"
        )

    def _assert_gradients(self, model: nn.Module, where: str) -> None:
        bad = [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
        assert not bad, f"{where}: no finite gradient for {bad[:3]}"

    def _check_refused(self, ours: nn.Module, where: str) -> None:
        """See that timm's module does not come back, silently or in part, where the variant has more than it holds."""
        before = {name: (id(tensor), tensor.clone()) for name, tensor in ours.state_dict(keep_vars=True).items()}
        try:
            zoo.restore_attention(ours)
        except SwapError:
            after = ours.state_dict(keep_vars=True)
            same = after.keys() == before.keys() and all(id(after[name]) == before[name][0] for name in before)
            assert same, f"{where}: a refused restore changed the model"
        else:
            raise AssertionError(f"{where}: it can be restored: set restores = True")

    def _through_bundle(self, where: str, model: nn.Module) -> nn.Module:
        backbone, kwargs = self.backbones[int(where.partition("[")[2].partition("]")[0])]
        return through_bundle(model, backbone, self.attention, kwargs)

    def _skip_unless(self, wanted: object, attribute: str) -> None:
        if not wanted:
            raise SkipTest(f"{attribute} = False")
