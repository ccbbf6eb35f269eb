"""Checkpointing was asked for and does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Finding, Severity
from lowtide.verify.doctor._look import LOWTIDE

_FLAGS = (
    *("gradient_checkpointing", "grad_checkpointing", "use_checkpoint", "use_checkpointing", "use_gradient_checkpointing"),
    *("activation_checkpointing", "checkpoint_activations", "with_cp", "is_gradient_checkpointing"),
)


def find(exam: Examination) -> Iterator[Finding]:
    """Regions that never ran, and flags that nothing follows."""
    yield from _never_ran(exam)
    yield from _without_gradients(exam)
    yield from _flags(exam)


def _never_ran(exam: Examination) -> Iterator[Finding]:
    ran = {end for run in exam.look.regions.values() if run.library == LOWTIDE for end in run.name.split(" … ")}
    installed = [path for path, module in exam.model.named_modules() if type(module.__dict__.get("forward")).__name__ == "InstalledForward"]
    if installed and not ran:
        what = f"regions are installed on {len(installed)} modules, {installed[0] or '(model)'!r} for one, and none of them ran"
        why = "a region runs when its module is called, not its forward, while gradients are recorded"
        yield _finding("no region ran", what, "the step called no region of lowtide", f"check for torch.no_grad(): {why}")


def _without_gradients(exam: Examination) -> Iterator[Finding]:
    idle = [region for region in exam.look.torch_calls if not region.recorded]
    if idle and len(idle) == len(exam.look.torch_calls):
        what = "torch.utils.checkpoint is called, but always while no gradients are recorded"
        yield _finding(
            "no gradients are recorded", what, f"{len(idle)} calls under torch.no_grad()", "take torch.no_grad() away from around it"
        )


def _flags(exam: Examination) -> Iterator[Finding]:
    flag = _flag_on(exam.model)
    if flag is None or exam.look.regions or exam.look.error is not None:
        return
    path, name, module = flag
    evidence = f"{path or type(module).__name__}: {name} is set, and no region of any library ran"
    if not module.training:
        yield _finding(
            "checkpointing in eval()", "checkpointing is switched on, but the model is in evaluation mode", evidence, "model.train()"
        )
    else:
        what = f"the flag {name} is on, but nothing follows it"
        yield _finding("a flag that is ignored", what, evidence, 'lowtide.apply(model, "full")')


def _flag_on(model: nn.Module) -> tuple[str, str, nn.Module] | None:
    for path, module in model.named_modules():
        for owner in (module, getattr(module, "config", None)):
            for name in _FLAGS:
                if getattr(owner, name, False) is True:
                    return path, name, module
    return None


def _finding(symptom: str, what: str, evidence: str, mend: str) -> Finding:
    return Finding(symptom, Severity.WARNING, what, evidence, mend)
