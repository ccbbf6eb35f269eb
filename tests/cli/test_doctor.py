"""``lowtide doctor``: findings and status, and silence."""

from __future__ import annotations

import json

ILL = """
from torch.utils.checkpoint import checkpoint

class Frozen(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x.detach(), use_reentrant=True)
        return x + self.blocks[0].up.weight.sum()

def ill():
    model = Frozen()
    x = torch.randn(64, 16)

    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    return Workload(model, step)
"""


def test_a_healthy_step_gets_no_word(invoke, script):
    result = invoke("doctor", f"{script()}:workload", "--policy", "full")
    assert (result.exit_code, result.stdout) == (0, ""), result.stdout


def test_findings_are_shown_and_errors_end_with_status_1(invoke, script):
    result = invoke("doctor", f"{script(ILL)}:ill")
    assert result.exit_code == 1, result.stderr
    shown = " ".join(result.stdout.split())
    assert "reentrant," in shown
    assert "use_reentrant=False" in shown


def test_findings_are_given_to_machines(invoke, script):
    result = invoke("doctor", f"{script()}:workload", "--limit", "100KB", "--json")
    assert result.exit_code == 1, result.stderr
    data = json.loads(result.stdout)
    [finding] = data["findings"]
    assert (finding["symptom"], finding["severity"]) == ("still out of memory", "error")
