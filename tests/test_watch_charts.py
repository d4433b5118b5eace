"""The lines of a chart of prl.watch, drawn by node without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import prl.watch

ASSETS = Path(prl.watch.__file__).parent / "assets"
DOCUMENT = """
class Node {
  constructor(name) { this.name = name; this.attributes = {}; this.children = []; this.style = {}; }
  append(...found) { this.children.push(...found); }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  addEventListener() {}
  all(name) {
    const nodes = this.children.filter((c) => c instanceof Node);
    return nodes.flatMap((c) => [...(c.name === name ? [c] : []), ...c.all(name)]);
  }
}
const document = { createElementNS: (_, name) => new Node(name), createElement: (name) => new Node(name) };
"""
DRAW = """
const lines = Array.from({ length: 24 }, (_, i) => ({ name: `g${i}`, points: [[0, i], [1, i + 1]] }));
const drawn = chart("reward", lines);
const shown = (node) => [node.attributes.stroke, node.attributes["stroke-dasharray"] || ""];
const names = drawn.all("span").filter((n) => n.attributes.class === "name");
console.log(JSON.stringify([drawn.all("path").map(shown), names.map((n) => shown(n.all("line")[0]))]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_each_of_24_groups_has_a_line_of_its_own_and_the_legend_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "draw.js"
    code = [(ASSETS / name).read_text().split("document.addEventListener")[0] for name in ("dom.js", "charts.js")]
    script.write_text("\n".join([DOCUMENT, *code, DRAW]))
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    paths, legend = json.loads(done.stdout)
    assert len({tuple(look) for look in paths}) == 24
    assert legend == paths
