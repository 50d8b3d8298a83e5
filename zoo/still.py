"""Keep running statistics still: a norm that is held uses them in train mode too, and leaves them as they are."""

from torch import nn


def iter_running(model: nn.Module) -> dict[str, nn.Module]:
    """Map every path to the module there that owns running statistics, as BatchNorm's running_mean and running_var."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if any(name.startswith("running_") and held is not None for name, held in module._buffers.items())
    }


def hold_still(module: nn.Module) -> None:
    """Keep a module itself in eval mode from now on, whatever `train` is told; its children follow `train`.

    The module keeps its class, and pays nothing in forward. A copy is held too; a module that another is made from, as
    by `SyncBatchNorm.convert_sync_batchnorm`, has to be held anew.
    """
    if not is_still(module):
        vars(module)["train"] = _StillTrain(module)
        module.training = False


def let_run(module: nn.Module, *, training: bool | None = None) -> None:
    """Undo `hold_still`, in the mode `training`, or in the one that `train` was last told."""
    if is_still(module):
        held = vars(module).pop("train")
        module.training = held.mode if training is None else training


def is_still(module: nn.Module) -> bool:
    """Say whether a module is held."""
    return isinstance(vars(module).get("train"), _StillTrain)


class _StillTrain:
    """Stands for the `train` method of one module. An object, not a closure, so that a copy holds the copy."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.mode = module, module.training

    def __call__(self, mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  (nn.Module's own signature)
        self.mode = mode
        type(self.module).train(self.module, mode)
        self.module.training = False
        return self.module
