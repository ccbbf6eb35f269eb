"""The reentrant form where it breaks, and backward functions of the user's that fail in a replayed graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.verify._regions import module_behind, names_for
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Finding, Severity

_NOT_BY_BACKWARD = (".grad()", "`inputs` parameter", "not have been used in the graph")
_MEND = "use_reentrant=False"


def find(exam: Examination) -> Iterator[Finding]:
    """What breaks."""
    reentrant = [region for region in exam.look.torch_calls if region.reentrant]
    name_of = names_for(exam.model)
    lost = [r for r in reentrant if r.recorded and not r.inputs_need_gradients and _trains(module_behind(r.function))]
    if lost:
        what = f"{name_of(lost[0].function)!r} has trainable weights but no input that needs gradients: its weights get none"
        yield _finding("reentrant, frozen inputs", what, f"{len(lost)} of {len(reentrant)} reentrant calls")
    text = "" if exam.look.error is None else str(exam.look.error)
    if reentrant and any(sign in text for sign in _NOT_BY_BACKWARD):
        yield _finding("reentrant, torch.autograd.grad", "the reentrant form works with .backward() alone", " ".join(text.split())[:300])
    wrapped = next((m for m in exam.model.modules() if isinstance(m, DistributedDataParallel)), None)
    if reentrant and wrapped is not None and ("marked" in text or wrapped.find_unused_parameters):
        what = "the reentrant form runs backward inside backward, so that DistributedDataParallel counts gradients twice or not at all"
        evidence = " ".join(text.split())[:300] or "find_unused_parameters=True with reentrant regions"
        yield _finding("reentrant, DistributedDataParallel", what, evidence)
    if exam.look.custom and exam.look.regions:
        what = f"the backward at {exam.look.custom} fails where its region is replayed, and not without"
        mend = "read ctx.saved_tensors once, and keep no tensor on ctx but by save_for_backward; or lowtide.checkpoint in place of torch's"
        evidence = f"{type(exam.look.error).__name__}: {' '.join(text.split())[:300]}"
        yield Finding("custom backward fails", Severity.ERROR, what, evidence, mend)


def _trains(module: nn.Module | None) -> bool:
    return module is not None and any(parameter.requires_grad for parameter in module.parameters())


def _finding(symptom: str, what: str, evidence: str) -> Finding:
    return Finding(symptom, Severity.ERROR, what, evidence, _MEND)
