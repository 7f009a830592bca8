"""Draws reports: ``python -m benchmarks.pictures FILE.json...`` makes ``FILE.svg`` beside each.

    python -m benchmarks.throughput --json docs/assets/throughput.json
    python -m benchmarks.pictures docs/assets/*.json

Machine, versions and date are the report's own, and stand in the picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.framework.crew import BenchmarkError

HOW_TO_GET_IT = "pictures need matplotlib: pip install 'aioshm[docs]', or `make bench-rivals`"
SUFFIXES = (".svg", ".png", ".pdf")

FIGURES = {
    "volume_gb_per_s": "GB/s",
    "messages_per_s": "messages per second",
    "p50_us": "microseconds, median",
    "reader_cpu_percent": "CPU of the reader, in % of a core",
}
"""The figures that are drawn; messages/s only where there is no GB/s."""

_OURS, _OTHERS = "#3f51b5", "#9fa8da"


class NoPictureError(BenchmarkError):
    """A picture cannot be drawn; the text says why."""


def check(path: Path) -> None:
    """Raise `NoPictureError` unless a picture can be drawn into a file of this name."""
    if path.suffix not in SUFFIXES:
        raise NoPictureError(f"a picture's name ends in {', '.join(SUFFIXES)}, not {path.suffix or path}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPictureError(HOW_TO_GET_IT) from None


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a panel for each case and figure of a report, medians with their spread."""
    check(path)
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "aioshm", "font.size": 9})
    from matplotlib import pyplot as plt

    panels: dict[tuple[str, int, str], list[tuple[str, dict[str, float]]]] = {}
    for result in report["results"]:
        figures = result["figures"]
        for figure in FIGURES:
            if figure in figures and not (figure == "messages_per_s" and "volume_gb_per_s" in figures):
                key = result["case"], result["readers"], figure
                panels.setdefault(key, []).append((result["contestant"], figures[figure]))
    if not panels:
        raise NoPictureError("nothing that could be drawn was measured")
    heights = [0.5 + 0.2 * len(found) for found in panels.values()]
    canvas, axes = plt.subplots(
        len(panels),
        1,
        figsize=(7.5, 0.3 + sum(heights)),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    for panel, ((case, readers, figure), found) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_panel(panel, found)
        panel.set_title(f"{case}, {readers} reader{'s' * (readers > 1)}: {FIGURES[figure]}", loc="left", fontsize=9)
    machine = report["machine"]
    canvas.supxlabel(
        f"{machine['cpu']}, {machine['usable_cpus']} CPUs, {machine['python']}, pyzmq {machine['pyzmq']}, "
        f"{machine['loop']}; {machine['date']}",
        fontsize=7,
        color="#555",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, facecolor="white")
    plt.close(canvas)


def _draw_panel(panel: Any, found: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Draw a bar for each contestant, with its spread."""
    names = [name for name, _ in found]
    medians = [values["median"] for _, values in found]
    spread = [
        [values["median"] - values["min"] for _, values in found],
        [values["max"] - values["median"] for _, values in found],
    ]
    colours = [_OURS if name.startswith("aioshm") else _OTHERS for name in names]
    panel.barh(names, medians, color=colours, xerr=spread, error_kw={"elinewidth": 0.8, "ecolor": "#555"})
    for place, value in enumerate(medians):
        text = f" {value:,.0f}" if value >= 100 else f" {value:.3g}"
        panel.annotate(text, (value + spread[1][place], place), va="center", fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.14)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="x", labelsize=7)
    panel.xaxis.set_major_formatter("{x:,.7g}")


def main(arguments: Sequence[str]) -> int:
    """Draw each report."""
    if not arguments:
        print(__doc__)
        return 2
    for name in arguments:
        path = Path(name).with_suffix(".svg")
        try:
            draw(json.loads(Path(name).read_text()), path)
        except NoPictureError as error:
            print(error, file=sys.stderr)
            return 1
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
