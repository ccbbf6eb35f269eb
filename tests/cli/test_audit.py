"""``lowtide audit``: a table, or JSON."""

from __future__ import annotations

import json

DROPPING = """
LOG = []

class Dropping(Block):
    def forward(self, x):
        LOG.append(1)
        return torch.dropout(super().forward(x), 0.1, True)

def dropping():
    model = Net()
    model.blocks[1] = Dropping(16)

    def step():
        model(torch.randn(8, 16)).sum().backward()

    return Workload(model, step)
"""


def test_what_regions_do_is_shown(invoke, script):
    result = invoke("audit", f"{script(DROPPING)}:dropping")
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert "1 risks in 4 regions" in shown
    assert "RISK" in shown
    assert "handled" in shown


def test_what_regions_do_is_given_to_machines(invoke, script):
    data = json.loads(invoke("audit", f"{script(DROPPING)}:dropping", "--policy", "full", "--batches", "1", "--json").stdout)
    assert data["risks"] == 0  # another class than its neighbours: "full" leaves it out
    data = json.loads(invoke("audit", f"{script(DROPPING)}:dropping", "--batches", "1", "--json").stdout)
    assert data["risks"] == 1
    [region] = [region for region in data["regions"] if region["region"] == "blocks.1"]
    assert [(o["kind"], o["what"]) for o in region["observations"]] == [
        ("global changed", "LOG"),
        ("random source", "the generator of torch"),
    ]
