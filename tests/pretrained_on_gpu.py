"""conf/experiment/math_qwen3_4b at full size on one GPU, from a checkpoint in the hub's layout that this makes itself.

    python tests/pretrained_on_gpu.py --out DIRECTORY             # one GPU of 80 GB or more; 8 GB + 16 GB of disk, no network
    python tests/pretrained_on_gpu.py --out DIRECTORY --scale tiny   # on a CPU, with the built-in engine
    python tests/pretrained_on_gpu.py --out DIRECTORY max_steps=4 seq_len=8192    # further overrides come last

Needs prl[vllm,math]. Beyond what one GPU forces (colocated, ipc, a smaller batch) the experiment is run as it is. The
checkpoint's numbers are random, so that answers end at max_tokens and rewards are 0. Ends with a table; DIRECTORY gets the
console, logs, metrics and plan.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hub_layout import (
    SHARD_BYTES,
    TINY_SHARD_BYTES,
    card_overrides,
    data_set_of,
    experiment,
    make_data_set,
    make_model,
    model_config,
)

ROOT = Path(__file__).parent.parent
EXPERIMENT = "math_qwen3_4b"
ONE_GPU = [
    *("deployment=colocated", "deployment.num_infer_gpus=1", "deployment.num_train_gpus=1", "weight_transport=ipc"),
    *("algo.batch_size=32", "algo.group_size=8", "seq_len=4096", "inference.max_model_len=4096", "max_steps=2"),
    *("inference.sampling.max_tokens=2048", "inference.max_concurrent_rollouts=64", "eval.num_tasks=16"),
    *("ckpt=none", "ckpt.export_hf=true", "logging=none"),  # a checkpoint of 4B would be 48 GB
]
ON_CPU = [
    *("inference=torch", "deployment.device=cpu", "weight_transport=shared_memory", "inference.sampling.max_tokens=32"),
    *("ckpt=default", "ckpt.interval=1"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="for the table, the console, logs and metrics")
    parser.add_argument("--work", type=Path, help="for checkpoint, run and export; OUT/work unless given")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    asked, overrides = parser.parse_known_args()
    if asked.probe:
        return probe(asked.probe, asked.scale)
    wanted = ["datasets", "math_verify", "hydra", *(["vllm"] if asked.scale == "full" else [])]
    if absent := [name for name in wanted if find_spec(name) is None]:
        print(f"not installed: {', '.join(absent)} (pip install -e '.[vllm,math]')")
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    table: list[tuple[str, str]] = []
    failed = measure(asked.out, (asked.work or asked.out / "work").absolute(), asked.scale, overrides, table)
    width = max(len(name) for name, _ in table)
    text = "\n".join(f"{name:{width}}  {value}" for name, value in table)
    (asked.out / "table.txt").write_text(text + "\n")
    print(f"\n{text}", flush=True)
    return failed


def measure(out: Path, work: Path, scale: str, overrides: list[str], table: list[tuple[str, str]]) -> int:
    config = experiment(EXPERIMENT)
    repo, home, run = str(config.model.path), work / "hf_home", work / "run"
    sizes, began = model_config(repo, scale), time.monotonic()
    snapshot, nbytes = make_model(home, repo, sizes, TINY_SHARD_BYTES if scale == "tiny" else SHARD_BYTES)
    make_data_set(home, data_set_of(config), 2000)
    table.append((f"checkpoint made, {nbytes / 1e9:.3f} GB", f"{time.monotonic() - began:.1f} s"))
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path()}
    reading = subprocess.run(
        [sys.executable, __file__, "--out", out, "--scale", scale, "--probe", snapshot],
        env=env, stdout=subprocess.PIPE, text=True, timeout=300,
    )  # fmt: skip
    table.append(("weights read alone", reading.stdout.strip() or f"exit code {reading.returncode}"))
    shutil.rmtree(run, ignore_errors=True)
    chosen = [*ONE_GPU, *card_overrides(repo, sizes), *(ON_CPU if scale == "tiny" else []), *overrides]
    command = [sys.executable, "-m", "prl.rl", f"+experiment={EXPERIMENT}", *chosen, f"output_dir={run}"]
    print("HF_HOME=" + str(home), "HF_HUB_OFFLINE=1", *command[1:], flush=True)
    code, ready, peak = watch(command, env, run, out / "console.txt")
    print((out / "console.txt").read_text()[-6000:], flush=True)
    keep(run, out)
    table += [(f"{role} ready after", f"{seconds:.1f} s") for role, seconds in sorted(ready.items())]
    table += step_rows(run)
    if peak:
        table.append(("peak of the whole GPU", f"{peak / 1024:.1f} GiB"))
    if code == 0:
        table.append(("export", check_export(run / "export", snapshot)))
    table.append(("exit code of prl.rl", str(code)))
    return code or reading.returncode


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def watch(command: list[str], env: dict[str, str], run: Path, console: Path) -> tuple[int, dict[str, float], int]:
    """Run it; its exit code, seconds until each role was ready, and the most MiB that the GPU had in use."""
    ready: dict[str, float] = {}
    peak, began = 0, time.monotonic()
    with console.open("w") as output:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.5)
            peak = max(peak, memory_in_use())
            for role, state in read_json(run / "status.json").get("roles", {}).items():
                if state["state"] in ("ready", "running"):
                    ready.setdefault(role, time.monotonic() - began)
    return process.returncode, ready, peak


def memory_in_use() -> int:
    """MiB, of the first GPU; 0 without."""
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return 0


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def keep(run: Path, out: Path) -> None:
    for name in ("logs", "metrics"):
        if (run / name).is_dir():
            shutil.copytree(run / name, out / name, dirs_exist_ok=True, symlinks=False)
    for name in ("plan.json", "status.json", "env.json", "hours.json"):
        if (run / name).is_file():
            shutil.copy2(run / name, out / name)


def step_rows(run: Path) -> list[tuple[str, str]]:
    """What each step took, by the metrics of the trainer and the orchestrator."""
    table = []
    for row in metrics(run, "orchestrator"):
        if "eval_s" in row:
            length = row.get("eval/hf_math/completion_tokens", 0.0)
            table.append((f"evaluation at step {row['step']}", f"{row['eval_s']:.1f} s, {length:.0f} tokens an answer"))
        if "tokens_per_s" in row:
            told = f"{row['rollouts']} of {row['completion_tokens']:.0f} tokens in {row['since_last_step_s']:.1f} s"
            table.append((f"rollouts of step {row['step']}", f"{told}, {row['tokens_per_s']:,.0f} tokens/s"))
        if "weight_update_s" in row:
            table.append((f"weights {row['policy_version']} into the engine", f"{row['weight_update_s']:.2f} s"))
    for row in metrics(run, "trainer.0"):
        parts = "forward_backward", "optim", "publish", "wait_for_batch"
        told = ", ".join(f"{part} {row.get(f'{part}_s', 0.0):.2f}" for part in parts)
        speed = f"{row['train_tokens_per_s']:,.0f} trained tokens/s, mismatch KL {row['mismatch_kl_mean']:.2g}"
        table.append((f"trainer's step {row['step']}", f"{row['step_s']:.1f} s ({told}), {speed}"))
        table.append((f"trainer's peak, step {row['step']}", f"{row['peak_memory_bytes'] / 2**30:.1f} GiB"))
    return table


def metrics(run: Path, role: str) -> list[dict[str, Any]]:
    path = run / "metrics" / f"{role}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# --- what the files hold against what is held -------------------------------------------------------------------------


def probe(snapshot: Path, scale: str) -> int:
    """Read the checkpoint as a trainer does, in float32, and compare every tensor with the files'."""
    from prl.config.config_json import check_card
    from prl.models.checkpoints.reading import load_model, read_tensors
    from prl.models.checkpoints.writing import hf_tensors

    repo = snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
    card = experiment(EXPERIMENT, *card_overrides(repo, read_json(snapshot / "config.json"))).model.card
    check_card(snapshot, card)
    device = torch.device("cuda" if scale == "full" else "cpu")
    torch.zeros(1, device=device)
    began = time.monotonic()
    model = load_model(snapshot, card, torch.float32, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    held = dict(hf_tensors(model))
    files = {name: tensor for name, tensor in read_tensors(snapshot) if name != "lm_head.weight" or name in held}
    same = sum(torch.equal(held[name], tensor[:].to(device).float()) for name, tensor in files.items())
    print(f"{seconds:.1f} s to {device.type}; {same} of {len(files)} tensors as in the files, {len(held)} held")
    return 0 if same == len(files) == len(held) else 1


def check_export(export: Path, snapshot: Path) -> str:
    """What transformers says of the export, and how far training has moved it."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(str(export), dtype=torch.float32, output_loading_info=True)
    wrong = sum(len(told[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    name = "model.layers.0.self_attn.q_proj.weight"
    (before,) = [f for f in sorted(snapshot.glob("*.safetensors")) if name in safe_open(f, "pt").keys()][:1]  # noqa: SIM118
    moved = (model.get_parameter(name).float() - safe_open(before, "pt").get_tensor(name).float()).abs().max()
    ids = torch.arange(8)[None]
    finite = bool(torch.isfinite(model(ids).logits).all()) if model.num_parameters() < 1e8 else "not asked"
    return f"transformers loads it, {wrong} keys amiss, q_proj of layer 0 moved by {moved:.2g}, logits finite: {finite}"


if __name__ == "__main__":
    sys.exit(main())
