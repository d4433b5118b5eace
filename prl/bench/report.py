"""The table of a benchmark."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from prl.config.schema_jobs import WHOLE_RUNS
from prl.runtime.people.report import is_number

WIDTH = 140  # characters, where the output is no terminal
GIB = 2**30


def print_report(document: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    result = document["result"]
    for line in headline(document):
        console.print(line, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in lines_of(document["target"], result):
        table.add_row(name, value)
    console.print(table)
    if "rates" in result:
        console.print(_rates(result["rates"]))
    if "profile" in result:
        for part in _profile(result["profile"]):
            console.print(part)


def headline(document: dict[str, Any]) -> list[str]:
    """What was measured, and on what."""
    config, environment = document["config"], document["environment"]
    choices = {k: v for k, v in config["choices"].items() if k in ("parallelism", "memory_recipe", "optim")}
    device = environment["device"]
    return [
        f"{document['target']}: {config['model']['name']}, {config['model']['dtype']}, fp8 {config['model']['fp8']}, "
        f"attn {config['model']['attn']}; {', '.join(f'{k} {v}' for k, v in choices.items())}",
        _work(document["target"], config),
        f"{device}, torch {environment['packages'].get('torch')}, CUDA {environment['cuda']}, git {environment['git']}",
    ]


def _work(target: str, config: dict[str, Any]) -> str:
    bench = config["bench"]
    steps = f"{bench['warmup_steps']} warm-up and {bench['steps']} measured steps"
    if target in WHOLE_RUNS:
        algo = config["algo"]
        return f"{algo['batch_size']} rollouts a step in groups of {algo['group_size']}; {steps}"
    return (
        f"rows of {config['seq_len']} tokens in documents of {bench['doc_len']} "
        f"({bench['lengths']}), {bench['micro_batches']} per rank and step; {steps}"
    )


def lines_of(target: str, result: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) pairs of the main table."""
    if target == "inference":
        return [("peak memory", f"{result['peak_allocated_bytes'] / GIB:.2f} GiB allocated")]
    if target in WHOLE_RUNS:
        numbers = [(name.replace("_", " "), f"{value:,.4g}") for name, value in result.items() if is_number(value)]
        curve = ", ".join(f"{reward:.3f} ({step}: {seconds:.1f} s)" for step, seconds, reward in result["held_out"])
        return numbers + ([("held-out reward (step)", curve)] if curve else [])
    lines = [
        ("tokens/s per GPU", f"{result['tokens_per_s_per_gpu']:,.0f} useful"),
        ("", f"{result['padded_tokens_per_s_per_gpu']:,.0f} with padding"),
        ("step", _seconds(result["step_s"])),
        *((f"  {name.replace('_', ' ')}", _seconds(values)) for name, values in result["phases_s"].items()),
        ("MFU", f"{result['mfu']:.1%} = {result['mfu_formula']}"),
        ("peak memory", _memory(result, "")),
        ("  with warm-up", _memory(result, "overall_")),
        ("  host", f"{result['host_peak_bytes'] / GIB:.2f} GiB"),
        ("ranks", str(result["ranks"])),
    ]
    return lines


def _seconds(values: dict[str, float]) -> str:
    return f"{values['median']:.4f} s median, {values['min']:.4f} min, {values['max']:.4f} max"


def _memory(result: dict[str, Any], prefix: str) -> str:
    allocated, reserved = (result[f"{prefix}peak_{kind}_bytes"] / GIB for kind in ("allocated", "reserved"))
    return f"{allocated:.2f} GiB allocated, {reserved:.2f} GiB reserved (largest rank)"


def _rates(rates: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("sequences", "tokens each", "tokens/s (median)", "min", "max"):
        table.add_column(heading, justify="right")
    for rate in rates:
        each = f"{rate['prompt_tokens']}+{rate['completion_tokens']}"
        values = rate["tokens_per_s"]
        table.add_row(str(rate["sequences"]), each, *(f"{values[k]:,.0f}" for k in ("median", "min", "max")))
    return table


def _profile(profile: dict[str, Any]) -> list[Table | str]:
    groups = Table(box=None, pad_edge=False)
    for heading in ("where the time goes", "share", "exposed"):
        groups.add_column(heading, justify="left" if heading.startswith("where") else "right")
    for name, shares in profile["groups"].items():
        groups.add_row(name, f"{shares['share']:.1%}", f"{shares['exposed']:.1%}")
    groups.add_row("idle", f"{profile['idle']:.1%}", f"{profile['idle']:.1%}")
    kernels = Table(box=None, pad_edge=False)
    for heading in ("kernel", "group", "calls", "share"):
        kernels.add_column(heading, justify="left" if heading in ("kernel", "group") else "right", no_wrap=True)
    for kernel in profile["top"]:
        kernels.add_row(kernel["name"][:80], kernel["group"], str(kernel["calls"]), f"{kernel['share']:.1%}")
    return [f"bound by {profile['bound_by']}", groups, kernels]
