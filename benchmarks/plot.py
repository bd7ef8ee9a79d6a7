"""Draws reports of `benchmarks.decode` as one SVG: how many times faster than the peer, a bar for each test.

Owns the drawing. Must not know how anything was measured. Bars start at 0; the line at 1 is the peer.

    python -m benchmarks.plot docs/benchmarks.svg q4_k.json q8_0.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import median

from benchmarks import results
from benchmarks.results import Report

WIDTH, LEFT, RIGHT = 760, 190, 150
ROW, BAR, TITLE, MARGIN = 18, 12, 44, 16
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
.title { font-weight: 600 }
.label { text-anchor: end }
.small { fill: #57606a; font-size: 11px }
.bar { fill: #2f6fb4 }
.slower { fill: #c2703d }
.axis { stroke: #57606a; stroke-width: 1 }
.paper { fill: #ffffff }
"""


def bars(report: Report) -> list[tuple[str, float, float, float]]:
    """(label, ratio, ours, theirs) of every test both ran, in tokens per second."""
    rows = []
    for test in dict.fromkeys(result.test for result in report.results):
        for threads in dict.fromkeys(result.threads for result in report.results):
            ratio = report.ratio(threads, test)
            if ratio is not None:
                ours, theirs = (median(report.rates(name, threads, test)) for name in report.contenders[:2])
                rows.append((f"{test}, {threads} thread{'s' if threads > 1 else ''}", ratio, ours, theirs))
    return rows


def svg(reports: list[Report]) -> str:
    drawn = [(report, bars(report)) for report in reports]
    longest = max((ratio for _, rows in drawn for _, ratio, _, _ in rows), default=1.0)
    unit = (WIDTH - LEFT - RIGHT) / max(longest, 1.0)
    height = MARGIN + sum(TITLE + ROW * len(rows) for _, rows in drawn)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
    lines = [head, f"<style>{STYLE}</style>", f'<rect class="paper" width="{WIDTH}" height="{height}"/>']
    top = 0.0
    for report, rows in drawn:
        lines += _group(report, rows, top, unit)
        top += TITLE + ROW * len(rows)
    return "\n".join([*lines, "</svg>", ""])


def _group(report: Report, rows: list[tuple[str, float, float, float]], top: float, unit: float) -> Iterator[str]:
    peer = report.contenders[1] if len(report.contenders) > 1 else "no peer"
    about = ", ".join(str(report.about[key]) for key in ("date", "machine") if key in report.about)
    yield _text(MARGIN, top + 22, f"{report.model}: times the speed of {peer}", "title")
    yield _text(MARGIN, top + 36, about, "small")
    first = top + TITLE
    for i, (label, ratio, ours, theirs) in enumerate(rows):
        y = first + ROW * i
        yield _text(LEFT - 8, y + BAR - 1, label, "label")
        yield f'<rect class="{"bar" if ratio >= 1 else "slower"}" x="{LEFT}" y="{y}" width="{unit * ratio:.1f}" height="{BAR}"/>'
        yield _text(LEFT + unit * ratio + 6, y + BAR - 1, f"{ratio:.2f}", "")
        yield _text(LEFT + unit * ratio + 44, y + BAR - 1, f"{ours:.0f} : {theirs:.0f} tok/s", "small")
    x = LEFT + unit
    yield f'<line class="axis" x1="{x:.1f}" y1="{first - 3}" x2="{x:.1f}" y2="{first + ROW * len(rows) - 3}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw benchmark reports as an SVG.")
    parser.add_argument("out", type=Path)
    parser.add_argument("reports", type=Path, nargs="+", help="files that benchmarks.decode --json wrote")
    args = parser.parse_args()
    args.out.write_text(svg([results.load(path) for path in args.reports]))


if __name__ == "__main__":
    main()
