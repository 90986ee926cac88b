"""Picture of the workflow's rules, from top to bottom, with what each makes: docs/rules.svg.

snakemake --rulegraph | python tools/rule_graph.py > docs/rules.svg
"""

import re
import sys
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

WORKFLOW = Path(__file__).resolve().parents[1] / "workflow"
COLOURS = {"data": "#2f6f9f", "train": "#00796b", "evaluate": "#a35a00", "report": "#7b4397"}
"""Colour of the rules of each file in workflow/rules/."""
BOX_WIDTH = 104
BOX_HEIGHT = 26
ROW_HEIGHT = 42
ARC_WIDTH = 13
"""Width of an edge that passes one rule; an edge that passes n is n times as wide. In pixels, as
all sizes.
"""
TEXT_WIDTH = 400
STYLE = (
    "text{font:13px ui-sans-serif,system-ui,sans-serif}"
    ".name{fill:#fff;text-anchor:middle}"
    ".output{fill:#333;font:12px ui-monospace,monospace}"
    "path{fill:none;stroke-width:1.4}"
)

Edges = list[tuple[str, str]]


def read_edges(dot: str) -> Edges:
    """Edges (rule, rule that reads its output) of Snakemake's rule graph, without the target."""
    names = dict(re.findall(r'^\s*(\d+)\[label = "(\w+)"', dot, re.M))
    pairs = [
        (names[source], names[reader])
        for source, reader in re.findall(r"^\s*(\d+) -> (\d+)", dot, re.M)
    ]
    return sorted(pair for pair in pairs if pair[1] not in ("all", "default"))


def in_order(edges: Edges) -> list[str]:
    """Rules, each after those whose output it reads."""
    readers: dict[str, set[str]] = {}
    for source, reader in edges:
        readers.setdefault(reader, set()).add(source)
    return list(TopologicalSorter(dict(sorted(readers.items()))).static_order())


def first_outputs() -> dict[str, tuple[str, str]]:
    """File of workflow/rules/ that defines each rule, and the rule's first output."""
    found = {}
    for path in sorted((WORKFLOW / "rules").glob("*.smk")):
        rules = re.split(r"^rule (\w+):\n", path.read_text(encoding="utf-8"), flags=re.M)[1:]
        for name, body in zip(rules[::2], rules[1::2], strict=True):
            output = re.search(r'^    output:\n(?:.*\n)*?.*?"([^"]+)"', body, re.M)
            assert output, f"rule {name} has no output"
            found[name] = (path.stem, output[1])
    return found


def draw(edges: Edges) -> str:
    """Return the picture as SVG: a box for each rule, a straight edge to the next, an arc past
    others.
    """
    order = in_order(edges)
    outputs = first_outputs()
    at = {name: row * ROW_HEIGHT + BOX_HEIGHT / 2 + 8 for row, name in enumerate(order)}
    passed = {(a, b): order.index(b) - order.index(a) - 1 for a, b in edges}
    left = ARC_WIDTH * max(passed.values()) + 20
    width = left + BOX_WIDTH + TEXT_WIDTH
    height = len(order) * ROW_HEIGHT
    middle = left + BOX_WIDTH / 2
    text = left + BOX_WIDTH + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' role="img" aria-labelledby="title">',
        f'<title id="title">Rules of the workflow: {escape(", ".join(order))}</title>',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" style="fill:#666;stroke:none"/></marker>',
    ]
    for (source, reader), count in passed.items():
        colour = COLOURS[outputs[source][0]]
        if count:
            start = at[source] + 5
            end = at[reader] - 5
            far = left - ARC_WIDTH * count
            curve = f"M{left},{start:g} C{far},{start:g} {far},{end:g} {left - 1},{end:g}"
        else:
            curve = (
                f"M{middle:g},{at[source] + BOX_HEIGHT / 2:g} V{at[reader] - BOX_HEIGHT / 2 - 1:g}"
            )
        lines.append(f'<path d="{curve}" stroke="{colour}" marker-end="url(#head)"/>')
    for name in order:
        room, output = outputs[name]
        lines += [
            f'<rect x="{left}" y="{at[name] - BOX_HEIGHT / 2:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"'
            f' fill="{COLOURS[room]}"/>',
            f'<text class="name" x="{middle:g}" y="{at[name] + 4:g}">{escape(name)}</text>',
            f'<text class="output" x="{text}" y="{at[name] + 4:g}">{escape(output)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(draw(read_edges(sys.stdin.read())))
