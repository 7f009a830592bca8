"""Draws what benchmarks wrote: ``python -m benchmarks.pictures FILE.json...`` makes ``FILE.svg`` beside each.

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

HOW_TO_GET_IT = "pictures need matplotlib: pip install 'aioshm[docs]'"

FIGURES = {
    "messages_per_s": "messages per second (longer is better)",
    "p50_us": "microseconds, median (shorter is better)",
}
"""Of those that a report may have, the first one is drawn."""

_OURS, _OTHERS = "#3f51b5", "#9fa8da"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report's first figure, a panel for each case, medians with their spread."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "aioshm", "font.size": 9})
    from matplotlib import pyplot as plt

    figure = next(name for name in FIGURES if any(name in result["figures"] for result in report["results"]))
    cases: dict[tuple[str, int], list[tuple[str, dict[str, float]]]] = {}
    for result in report["results"]:
        if figure in result["figures"]:
            key = result["case"], result["readers"]
            cases.setdefault(key, []).append((result["contestant"], result["figures"][figure]))
    height = 0.55 + sum(0.4 + 0.2 * len(found) for found in cases.values())
    canvas, panels = plt.subplots(
        len(cases),
        1,
        figsize=(7.5, height),
        layout="constrained",
        squeeze=False,
        height_ratios=[0.4 + 0.2 * len(found) for found in cases.values()],
    )
    for panel, ((case, readers), found) in zip(panels[:, 0], cases.items(), strict=True):
        names = [name for name, _ in found]
        medians = [values["median"] for _, values in found]
        spread = [
            [values["median"] - values["min"] for _, values in found],
            [values["max"] - values["median"] for _, values in found],
        ]
        colours = [_OURS if name.startswith("aioshm") else _OTHERS for name in names]
        panel.barh(names, medians, color=colours, xerr=spread, error_kw={"elinewidth": 0.8, "ecolor": "#555"})
        for place, value in enumerate(medians):
            panel.annotate(
                f" {value:,.0f}" if value >= 100 else f" {value:.3g}",
                (max(value, medians[place] + spread[1][place]), place),
                va="center",
                fontsize=8,
            )
        panel.invert_yaxis()
        panel.margins(x=0.14)
        panel.set_title(f"{case}, {readers} reader{'s' * (readers > 1)}", loc="left", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="x", labelsize=7)
        panel.xaxis.set_major_formatter("{x:,.0f}")
    machine = report["machine"]
    canvas.suptitle(FIGURES[figure], fontsize=10)
    canvas.supxlabel(
        f"{machine['cpu']}, {machine['usable_cpus']} CPUs, {machine['python']}, pyzmq {machine['pyzmq']}, "
        f"{machine['loop']}; {machine['date']}",
        fontsize=7,
        color="#555",
    )
    plt.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(canvas)


def main(arguments: Sequence[str]) -> int:
    """Draw each report."""
    if not arguments:
        print(__doc__)
        return 2
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(HOW_TO_GET_IT, file=sys.stderr)
        return 1
    for name in arguments:
        path = Path(name)
        draw(json.loads(path.read_text()), path.with_suffix(".svg"))
        print(path.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
