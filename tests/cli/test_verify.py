"""``lowtide verify``: verdict and status, alone and with several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

FAULTY = """
import os
import lowtide
import torch.distributed as dist
from lowtide import is_replaying

RANK = int(os.environ.get("RANK", "1"))
LOG = []

class Faulty(Block):
    def forward(self, x):
        mode = os.environ.get("FAULT", "values")
        x = super().forward(x)
        if is_replaying() and RANK == 1 and mode == "raises":
            raise ValueError("only in a replay")
        if RANK == 1 and mode == "logs":
            LOG.append(1)
        return torch.sin(x * (2.0 if is_replaying() and RANK == 1 and mode == "values" else 1.0))

def faulty():
    model = Net()
    model.blocks[1] = Faulty(16)
    if "RANK" in os.environ:
        dist.is_initialized() or dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        lowtide.apply(model, lowtide.policy.by_layer_type(dict.fromkeys(("Block", "Faulty"), lambda site: lowtide.Decision.RECOMPUTE)))
    x = torch.randn(64, 16)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return Workload(model, step)
"""


def test_equal_ends_with_status_0(invoke, script):
    result = invoke("verify", f"{script()}:workload", "--steps", "2", "--three-way", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["equal"], data["repeatable"], data["steps"]) == (True, True, 2)
    assert data["precision"]["dtype"] == "bfloat16"
    assert data["regions"] == [f"blocks.{index}" for index in range(4)]


def test_different_ends_with_status_1_and_says_what_differs(invoke, script):
    result = invoke("verify", f"{script(FAULTY)}:faulty", "--steps", "1")
    assert result.exit_code == 1, result.stderr
    shown = " ".join(result.stdout.split())
    assert "DIFFERENT" in shown
    assert "the first op whose replay differs: aten.sin.default" in shown


def test_a_saved_plan_is_put_in_force(invoke, script, tmp_path):
    target = f"{script()}:workload"
    assert invoke("fit", target, "--budget", "95%", "--plan", "plan.json").exit_code == 0
    result = invoke("verify", target, "--plan", "plan.json", "--steps", "1", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["regions"]


def test_what_cannot_be_is_refused(refused, script):
    target = str(script("raise AssertionError('loaded')")) + ":workload"
    assert "both given" in refused("verify", target, "--plan", "p.json", "--policy", "full")
    assert "policy" in refused("verify", f"{script()}:workload", "--policy", "everything")


DRIVER = """
import json, sys
from typer.testing import CliRunner
from lowtide.cli import app

def main():
    dist.init_process_group("gloo")
    found = {}
    for mode in ("none", "values", "logs"):
        os.environ["FAULT"] = mode
        for command in (["verify", "--steps", "1"], ["audit", "--batches", "1"], ["doctor"]):
            if mode != "logs" or command[0] == "audit":
                run = CliRunner().invoke(app, [command[0], f"{__file__}:faulty", *command[1:], "--timeout", "300", "--json"])
                found[f"{mode} {command[0]}"] = [run.exit_code, run.stdout]
    everyone = [None, None]
    dist.all_gather_object(everyone, found)
    dist.barrier()
    dist.destroy_process_group()  # a process that ends with a thread of gloo's still at work is aborted
    if RANK == 0:
        print(json.dumps(everyone))

if __name__ == "__main__":
    main()
"""


def in_two_processes(*arguments: str, **environment: str) -> tuple[int, str]:
    """The status and the output, of processes whose rendezvous has no server, so that tests may run beside each other."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env={**os.environ, **environment})
    return done.returncode, done.stdout or done.stderr


def test_a_fault_of_one_process_is_the_verdict_of_all(script):
    """The replay raises in one process; the other is left waiting in a collective, and gives up."""
    run = "-m", "lowtide.cli", "verify", f"{script(FAULTY)}:faulty", "--steps", "1", "--timeout", "15", "--json"
    status, output = in_two_processes(*run, FAULT="raises")
    data = json.loads(output)
    assert status == 1
    assert not data["equal"]
    assert data["summary"].startswith("rank 1: ")
    assert "ValueError: only in a replay" in data["summary"]
    assert len(data["ranks"]) == 2


def test_processes_verify_audit_and_examine_together(script):
    """The same verdict and status in each; the first one prints it."""
    status, output = in_two_processes(str(script(FAULTY + DRIVER)))
    assert status == 0, output
    first, second = json.loads(output.splitlines()[-1])
    statuses = dict.fromkeys(first, 0) | {"values verify": 1, "values doctor": 1}
    assert {name: code for name, (code, _) in first.items()} == {name: code for name, (code, _) in second.items()} == statuses
    assert {name: text for name, (_, text) in second.items() if text} == {}
    said = {name: json.loads(text) for name, (_, text) in first.items()}
    assert said["none verify"]["equal"]
    assert len(said["none verify"]["ranks"]) == 2
    assert said["values verify"]["summary"].startswith("rank 1: ")
    assert [verdict.startswith("equal") for verdict in said["values verify"]["ranks"]] == [True, False]
    assert said["values verify"]["replays"][0]["op"] == "aten.sin.default"
    assert said["none doctor"]["findings"] == []
    assert [finding["symptom"] for finding in said["values doctor"]["findings"]] == ["other gradients"]
    assert said["none audit"]["ranks"] == [0, 0]
    assert said["values audit"]["ranks"] == [0, 1]
    assert risks(said["values audit"]) == [("module.blocks.1", "replay differs")]
    assert said["logs audit"]["ranks"] == [0, 1]
    assert risks(said["logs audit"]) == [("module.blocks.1", "global changed")]


def risks(report):
    return [(region["region"], o["kind"]) for region in report["regions"] for o in region["observations"] if not o["handled"]]
