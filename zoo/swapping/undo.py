"""The way back from a swap, without holding on to the weights that it replaced."""

import copy
import weakref

import torch
from torch import nn

from zoo.projections import KINDS, fill_parts, part_tensors
from zoo.slots import Place


class Remains:
    """What is left of a Parameter that a model let go: a weak reference, its likeness without values, its gradient."""

    def __init__(self, tensor: nn.Parameter) -> None:
        self._reference, self._gradient = weakref.ref(tensor), tensor.grad
        self._device = tensor.device
        self.likeness = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
        self._again: nn.Parameter | None = None

    def is_of(self, tensor: nn.Parameter) -> bool:
        """Say whether these are the remains of this very tensor, not of another at its address."""
        return self._reference() is tensor

    def revive(self) -> nn.Parameter:
        """Return the Parameter itself if somebody holds it, else an uninitialised one like it, always the same one."""
        alive = self._reference()
        alive = self._again if alive is None else alive
        if alive is None:
            empty = torch.empty_like(self.likeness, device=self._device)
            alive = self._again = nn.Parameter(empty, requires_grad=self.likeness.requires_grad)
            alive.grad = self._gradient
        return alive


class Undo:
    """The way back from an exchange that was carried out, without holding on to the old weights.

    The old module and its Parameters are held weakly: whoever else holds them gets the very same objects back. Those
    that nobody held are made anew of the same values, and nobody can tell.

    Args:
        place: Whose projection is about to be replaced.
        graves: What is left of the Parameters of earlier exchanges, by id, so that ties come back as ties: extended.
    """

    def __init__(self, place: Place, graves: dict[int, Remains]) -> None:
        old = place.child
        self._place, self._layout = place, place.layout
        self._module = weakref.ref(old)
        self._remains: dict[str, Remains] = {}
        for name, tensor in old.named_parameters(remove_duplicate=False):
            known = graves.get(id(tensor))
            if known is None or not known.is_of(tensor):
                known = graves[id(tensor)] = Remains(tensor)
            self._remains[name] = known
        likenesses = {id(tensor): self._remains[name].likeness for name, tensor in old.named_parameters()}
        self._shell = copy.deepcopy(old, likenesses)  # all of it but the weights

    def run(self) -> None:
        """Put the old projection back, of the values that the present one has."""
        module = self._module()
        if module is None:
            module = self._shell
            for name, remains in self._remains.items():
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner)._parameters[leaf] = remains.revive()
            for kind in KINDS:
                fill_parts(module, self._layout, kind, part_tensors(self._place.child, self._layout, kind))
        self._place.put(module)
