"""User code on a module: hooks, and a `forward` that was set on the instance."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

#: transformers' own hooks that change no value: they let gradients through, or collect what a caller has asked for
_HARMLESS_HOOKS = ("make_inputs_require_grads", "output_capturing_hook")

#: packages that wrap the `forward` of a whole model for training
_TRAINERS = ("accelerate", "trl")


def foreign_code(module: nn.Module) -> str | None:
    """What runs when the module is called, beside its class's `forward`, and may change what comes out; None: nothing.

    accelerate's placing of weights and inputs on devices is none of it, nor is what trainers put around a whole model
    for their steps (autocast, a fused loss).
    """
    own = module.__dict__
    for kind, hooks in (("forward pre-hook", own["_forward_pre_hooks"]), ("forward hook", own["_forward_hooks"])):
        for hook in hooks.values():
            if not _is_harmless(hook):
                return f"a {kind} ({getattr(hook, '__name__', type(hook).__name__)})"
    return "a patched forward" if "forward" in own and not _is_bookkeeping(module) else None


def _is_bookkeeping(module: nn.Module) -> bool:
    own = module.__dict__
    forward = getattr(own["forward"], "__func__", own["forward"])
    if forward is type(module).forward or type(own.get("_hf_hook")).__name__ == "AlignDevicesHook":
        return True
    home = getattr(forward, "__globals__", {}).get("__name__", "")  # `functools.wraps` makes `__module__` another's
    by_trainer = "_original_forward" in own or home.split(".")[0] in _TRAINERS
    return isinstance(module, PreTrainedModel) and by_trainer


def _is_harmless(hook: object) -> bool:
    name, home = getattr(hook, "__name__", ""), getattr(hook, "__module__", None) or ""
    return name in _HARMLESS_HOOKS and home.startswith("transformers.")
