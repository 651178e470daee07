"""The results of the paper's experiments as files: claims, tables, and Figures 1 to 6 from these
tables, as images with Matplotlib and as interactive pages with plotly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.base.errors import require_extra
from coterie.base.labels import labels_of
from coterie.base.types import Array, Flags, Ints
from coterie.lab.experiments import paper
from coterie.lab.experiments.paper import EIGHT, FLAT, OURS, PRINTED, REFITTED, SQUARED, WINDOW
from coterie.lab.experiments.paper_claims import Claim
from coterie.output import runs
from coterie.output.plots import separator_ends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tables = Mapping[str, paper.Table]

HEADINGS = ("number", "experiment", "claim", "paper", "here, seed 0", "over seeds", "verdict")
CLUSTERS = ("#1f77b4", "#d95f02", "#2ca02c")
SHARED = "#7b3294"
COLOURS = {OURS: "#b2182b", REFITTED: "#ef8a62", SQUARED: "#2166ac", "oracle": "#000000",
           "local": "#777777", "global": "#777777"}
DASHES = {"oracle": ("--", "dash"), "local": (":", "dot"), "global": ("-.", "dashdot")}
CURVES = ("#b2182b", "#ef8a62", "#2166ac", "#000000")
TITLES = {1: "Figure 1: training data of Experiment 1, with the best separator of each cluster",
          2: "Figure 2: mean test accuracy",
          3: "Figure 3: mean distance between models of one true cluster",
          4: "Figure 4: data of Experiments 2 and 3, with the best separator of each cluster",
          5: "Figure 5: Algorithm 1 and others, distance from the optimum",
          6: "Figure 6: models along lambda"}
MARKERS = {1: ("o", "circle-open"), -1: ("x", "x-thin-open")}  # of Matplotlib, and of plotly
AXES = {2: "mean test accuracy", 3: "mean distance"}
FLOOR = 1e-10  # smaller gaps are rounding errors


def check() -> None:
    """Raise MissingExtra if a library is missing, before anything is computed."""
    _matplotlib()
    _plotly()


def _matplotlib() -> type[Figure]:
    with require_extra("matplotlib", "reproduce", "Drawing figures"):
        from matplotlib.figure import Figure
    return Figure


def _plotly() -> tuple[Any, Callable[..., Any]]:
    with require_extra("plotly", "reproduce", "Writing interactive figures"):
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    return go, make_subplots


def write(folder: Path, results: paper.Results, checked: Sequence[Claim]) -> list[Path]:
    """Write claims.csv, claims.md, a CSV file per table, and a PNG and an HTML file per figure.

    Parameters
    ----------
    folder
        The folder for the files; created if needed.
    results
        The results of `reproduce`.
    checked
        The claims of `claims(results)`.

    Returns
    -------
    list[Path]
        The files.

    Raises
    ------
    MissingExtra
        If Matplotlib or plotly is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = results.tables()
    written = [write_table(folder / f"{name}.csv", table) for name, table in tables.items()]
    rows = paper.table_of(HEADINGS, [(*claim[:-1], claim.verdict.value) for claim in checked])
    written.append(write_table(folder / "claims.csv", rows))
    (folder / "claims.md").write_text(markdown(checked), encoding="utf-8")
    return [*written, folder / "claims.md", *save(folder, tables)]


def write_table(path: Path, table: paper.Table) -> Path:
    """Write a table as CSV, with numbers in Python's notation, which is exact."""
    path.write_bytes(runs.table(table, zip(*table.values(), strict=True)))
    return path


def markdown(checked: Sequence[Claim]) -> str:
    """The claims as a Markdown table."""
    lines = [f"| | {' | '.join(HEADINGS[1:])} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join(map(str, claim[:-1]))} | {claim.verdict.value} |"
              for claim in checked]
    return "\n".join(lines) + "\n"


def picture(number: int, tables: Tables) -> Figure:
    """Draw one of the six figures with Matplotlib."""
    figure: Figure = _FIGURES[number][0](number, tables)
    return figure


def page(number: int, tables: Tables) -> Any:
    """Draw one of the six figures with plotly."""
    return _FIGURES[number][1](number, tables)


def save(folder: Path, tables: Tables) -> list[Path]:
    """Write all figures as figure-1.png, figure-1.html, ... and the plotly.min.js that the pages
    share.
    """
    written = []
    for number in TITLES:
        image, html = folder / f"figure-{number}.png", folder / f"figure-{number}.html"
        picture(number, tables).savefig(image)
        page(number, tables).write_html(html, include_plotlyjs="directory", full_html=True)
        written += [image, html]
    return written


def _lines(table: paper.Table, reach: float, rows: Flags | None = None) -> Array:
    models = np.array([table[name] for name in ("w1", "w2", "b")]).T
    models = models if rows is None else models[rows]
    return separator_ends(models, paper.LOSS.intercept_sign, reach)


def _reach(points: paper.Table) -> float:
    return float(np.hypot(points["x"], points["y"]).max()) * 1.05


def _clouds(points: paper.Table, wanted: Iterable[int]) -> Iterator[tuple[int, int, Any, Any]]:
    """The points of each cluster that is wanted and each label: cluster, label, x and y."""
    clusters, labels, x, y = (np.array(points[name]) for name in ("cluster", "label", "x", "y"))
    for cluster in wanted:
        for label in MARKERS:
            rows = (clusters == cluster) & (labels == label)
            yield cluster, label, x[rows].tolist(), y[rows].tolist()


def _figure(width: float, height: float) -> Figure:
    return _matplotlib()(figsize=(width, height), layout="constrained", dpi=150)


def _open_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")


# Figures 1 and 4


def _data(number: int, tables: Tables) -> Figure:
    points, optimal = tables[f"figure-{number}-points"], tables[f"figure-{number}-separators"]
    figure, reach = _figure(6.4, 6.2), _reach(points)
    axes = figure.subplots()
    for k, ends in enumerate(_lines(optimal, reach)):
        for _, label, x, y in _clouds(points, [k]):
            axes.scatter(x, y, s=14, marker=MARKERS[label][0], color=CLUSTERS[k % 3], alpha=0.6,
                         linewidth=0.9)
        axes.plot(*ends.T, color=CLUSTERS[k % 3], linestyle="--", linewidth=2.2,
                  label=f"cluster {k + 1}")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    axes.set_title(f"{TITLES[number]}\no: +1,  x: -1", fontsize=10)
    return figure


def _data_page(number: int, tables: Tables) -> Any:
    go, _ = _plotly()
    points, optimal = tables[f"figure-{number}-points"], tables[f"figure-{number}-separators"]
    figure, reach = go.Figure(), _reach(points)
    for k, ends in enumerate(_lines(optimal, reach)):
        for _, label, x, y in _clouds(points, [k]):
            marker = {"color": CLUSTERS[k % 3], "symbol": MARKERS[label][1], "size": 6}
            figure.add_scatter(x=x, y=y, mode="markers", name=f"cluster {k + 1}, {label:+d}",
                               marker=marker)
        figure.add_scatter(x=ends[:, 0].tolist(), y=ends[:, 1].tolist(), mode="lines",
                           name=f"cluster {k + 1}, best separator",
                           line={"color": CLUSTERS[k % 3], "dash": "dash", "width": 3})
    figure.update_xaxes(range=[-reach, reach])
    figure.update_yaxes(range=[-reach, reach], scaleanchor="x")
    return _with_layout(figure, number, height=700, width=850)


# Figures 2 and 3


def _names(number: int) -> tuple[str, ...]:
    return (OURS, REFITTED, SQUARED, *(reversed(FLAT) if number == 2 else ()))


def _over_lam(number: int, tables: Tables) -> Figure:
    table, own = tables[f"figure-{number}"], tables[f"figure-{number}-own-strength"]
    figure, lams = _figure(11.5, 4.8), np.array(table["lam"])
    for axes, mean in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        axes.axvspan(*WINDOW, color="#fdd870", linewidth=0, label="the paper's window")
        for name in _names(number):
            line = np.array(table[f"{name}, mean" if mean else name])
            axes.plot(lams, line, color=COLOURS[name], linestyle=DASHES.get(name, ("-", ""))[0],
                      linewidth=1.7, label=name, zorder=3)
            if mean:
                sd = np.array(table[f"{name}, sd"])
                axes.fill_between(lams, np.maximum(line - sd, 0.0), line + sd, color=COLOURS[name],
                                  alpha=0.15, linewidth=0)
        gammas = np.array(own["gamma"])
        line = np.array(own[f"{SQUARED}, mean" if mean else SQUARED])
        weaker = gammas <= lams[0] * 1.001  # for larger values the line is the same
        axes.plot(gammas[weaker], line[weaker], color=COLOURS[SQUARED], linewidth=1.2,
                  linestyle=(0, (1, 1)), label=f"{SQUARED}, smaller strengths")
        axes.set(xscale="log", xlim=(1e-5, 1e3), xlabel="lambda")
        axes.set_title("mean and standard deviation over seeds" if mean else "seed 0", fontsize=10)
        _open_axes(axes)
        if number == 3:
            axes.set_yscale("symlog", linthresh=1e-5)
            axes.set_ylim(0.0, None)
        if not mean:
            axes.set_ylabel(AXES[number])
            axes.legend(fontsize=8, framealpha=0.95,
                        loc="center left" if number == 2 else "lower left")
    figure.suptitle(TITLES[number], fontsize=11)
    return figure


def _over_lam_page(number: int, tables: Tables) -> Any:
    _, make_subplots = _plotly()
    table, own = tables[f"figure-{number}"], tables[f"figure-{number}-own-strength"]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.03,
                           subplot_titles=("seed 0", "mean and standard deviation over seeds"))
    lams = table["lam"]
    for column, mean in ((1, False), (2, True)):
        cell = {"row": 1, "col": column}
        for name in _names(number):
            line = np.array(table[f"{name}, mean" if mean else name])
            shape = {"color": COLOURS[name], "dash": DASHES.get(name, ("", "solid"))[1]}
            if mean:
                sd = np.array(table[f"{name}, sd"])
                low, high = np.maximum(line - sd, 0.0)[::-1].tolist(), (line + sd).tolist()
                figure.add_scatter(x=[*lams, *lams[::-1]], y=[*high, *low], legendgroup=name,
                                   showlegend=False, hoverinfo="skip", fill="toself",
                                   fillcolor=COLOURS[name], opacity=0.15, line={"width": 0},
                                   mode="lines", **cell)
            figure.add_scatter(x=lams, y=line.tolist(), name=name, legendgroup=name, line=shape,
                               showlegend=not mean, mode="lines", **cell)
        figure.add_scatter(x=own["gamma"], y=own[f"{SQUARED}, mean" if mean else SQUARED],
                           legendgroup="own", name=f"{SQUARED}, separate grid",
                           showlegend=not mean, mode="lines+markers", marker={"size": 3},
                           line={"color": COLOURS[SQUARED], "width": 1, "dash": "dot"}, **cell)
        figure.add_vrect(x0=WINDOW[0], x1=WINDOW[1], fillcolor="#fdd870", opacity=0.6, line_width=0,
                         layer="below", **cell)
    figure.update_xaxes(type="log", range=[-5, 3], title_text="lambda", exponentformat="power")
    figure.update_yaxes(title_text=AXES[number], row=1, col=1)
    figure.update_layout(hovermode="x unified")
    if number == 3:  # a linear scale shows zeros, a logarithmic one shows ratios
        scales = [{"label": scale, "method": "relayout",
                   "args": [{"yaxis.type": scale, "yaxis2.type": scale}]}
                  for scale in ("linear", "log")]
        figure.update_layout(updatemenus=[{"type": "buttons", "direction": "right", "x": 1.0,
                                           "y": 1.18, "xanchor": "right", "buttons": scales}])
    return _with_layout(figure, number, height=560)


# Figure 5


def _curves(tables: Tables) -> list[tuple[str, Array, Array]]:
    table = tables["figure-5"]
    names, shares = np.array(table["algorithm"]), np.array(table["share of users"])
    curves = []
    for name in dict.fromkeys(table["algorithm"]):
        rows = names == name
        rounds, gaps = np.array(table["round"])[rows], np.array(table["gap"])[rows]
        shown = (rounds > 0) & (np.concatenate([[True], gaps[:-1] > FLOOR]))
        share = float(shares[rows][0])
        label = name if share == 1.0 else f"{name}, {share:.0%} of the users per round"
        curves.append((label, rounds[shown], np.maximum(gaps[shown], FLOOR)))
    return curves


def _gaps(number: int, tables: Tables) -> Figure:
    figure = _figure(8.4, 5.0)
    axes = figure.subplots()
    for colour, (name, rounds, gaps) in zip(CURVES, _curves(tables), strict=True):
        thick = name.startswith(f"{PRINTED}, 40")
        axes.loglog(rounds, gaps, color=colour, linewidth=2.4 if thick else 1.6, label=name)
    axes.set(xlabel="round", ylabel="F - F*, in the convention of (C)", ylim=(FLOOR / 2, None))
    _open_axes(axes)
    axes.legend(fontsize=8, framealpha=0.95)
    axes.set_title(TITLES[number], fontsize=10)
    return figure


def _gaps_page(number: int, tables: Tables) -> Any:
    go, _ = _plotly()
    figure = go.Figure()
    for colour, (name, rounds, gaps) in zip(CURVES, _curves(tables), strict=True):
        figure.add_scatter(x=rounds.tolist(), y=gaps.tolist(), name=name, mode="lines",
                           line={"color": colour})
    figure.update_xaxes(type="log", title_text="round", exponentformat="power", dtick=1)
    figure.update_yaxes(type="log", title_text="F - F*, in the convention of (C)",
                        exponentformat="power", dtick=2)
    return _with_layout(figure, number, height=560, width=1000)


# Figure 6


def _panel(tables: Tables, lam: float, method: str) -> tuple[Flags, str]:
    """The rows of a panel, and its title with the number of models."""
    table, summary = tables["figure-6"], tables["figure-6-summary"]
    rows = (np.array(table["lam"]) == lam) & (np.array(table["method"]) == method)
    columns = (summary[name] for name in ("models", "lam", "seed", "ellipses"))
    count = next(n for n, *key in zip(*columns, strict=True) if key == [lam, 0, "second"])
    return rows, f"lambda = {lam:g}: {count} model{'s' * (count != 1)}"


def _kinds(table: paper.Table, rows: Flags) -> Ints:
    """The true cluster of each of these users; -1 if a user of another cluster has the same model.
    """
    models = np.array([table[name] for name in ("w1", "w2", "b")]).T[rows]
    owner, labels = np.array(table["cluster"])[rows], labels_of(models)
    pure = np.array([len(set(owner[labels == k].tolist())) == 1 for k in range(labels.max() + 1)])
    return np.where(pure[labels], owner, -1)


def _multiples(number: int, tables: Tables) -> Figure:
    points, table = tables["figure-4-points"], tables["figure-6"]
    reach = _reach(points)
    figure = _figure(13.0, 7.2)
    for axes, lam in zip(figure.subplots(2, 4, sharex=True, sharey=True).flat, EIGHT, strict=True):
        for k, label, x, y in _clouds(points, range(3)):
            axes.scatter(x, y, s=4, marker=MARKERS[label][0], color=CLUSTERS[k], alpha=0.3,
                         linewidth=0.5)
        rows, _ = _panel(tables, lam, SQUARED)
        for ends in _lines(table, reach, rows):
            axes.plot(*ends.T, color="0.45", linewidth=0.6, zorder=3)
        for ends in _lines(tables["figure-4-separators"], reach):
            axes.plot(*ends.T, color="black", linewidth=1.1, linestyle="--", zorder=4)
        rows, title = _panel(tables, lam, OURS)
        for k, ends in zip(_kinds(table, rows), _lines(table, reach, rows), strict=True):
            axes.plot(*ends.T, color=CLUSTERS[k] if k >= 0 else SHARED, linewidth=1.6, zorder=5)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=7)
    figure.suptitle(f"{TITLES[number]} (colour: this method, purple if clusters share a model; "
                    "grey: squared penalty; dashed: best separators)", fontsize=11)
    return figure


def _multiples_page(number: int, tables: Tables) -> Any:
    _, make_subplots = _plotly()
    points, table = tables["figure-4-points"], tables["figure-6"]
    reach = _reach(points)
    figure = make_subplots(rows=2, cols=4, horizontal_spacing=0.02, vertical_spacing=0.07,
                           subplot_titles=[_panel(tables, lam, OURS)[1] for lam in EIGHT])

    named: set[str] = set()

    def add(ends: Array, name: str, cell: dict[str, int], **line: Any) -> None:
        """Add many lines as one trace, with breaks between them; the legend has each name once."""
        if not len(ends):
            return
        x, y = ([v for a, b in ends[:, :, c].tolist() for v in (a, b, None)] for c in (0, 1))
        figure.add_scatter(x=x, y=y, name=name, legendgroup=name, showlegend=name not in named,
                           mode="lines", line=line, **cell)
        named.add(name)

    for panel, lam in enumerate(EIGHT):
        cell, first = {"row": panel // 4 + 1, "col": panel % 4 + 1}, panel == 0
        for k, label, x, y in _clouds(points, range(3)):
            marker = {"color": CLUSTERS[k], "symbol": MARKERS[label][1], "size": 3}
            figure.add_scatter(x=x, y=y, mode="markers", opacity=0.35, hoverinfo="skip",
                               name=f"cluster {k + 1}, {label:+d}", showlegend=first,
                               legendgroup=f"points {k}{label}", marker=marker, **cell)
        rows, _ = _panel(tables, lam, SQUARED)
        add(_lines(table, reach, rows), SQUARED, cell, color="#737373", width=1)
        best = _lines(tables["figure-4-separators"], reach)
        add(best, "best separators", cell, color="black", width=1.5, dash="dash")
        rows, _ = _panel(tables, lam, OURS)
        kinds, ends = _kinds(table, rows), _lines(table, reach, rows)
        for k in range(-1, 3):
            name = f"cluster {k + 1}" if k >= 0 else "several clusters"
            add(ends[kinds == k], f"{OURS}, {name}", cell, width=2.5,
                color=CLUSTERS[k] if k >= 0 else SHARED)
    figure.update_xaxes(range=[-reach, reach], showticklabels=False)
    figure.update_yaxes(range=[-reach, reach], showticklabels=False)
    return _with_layout(figure, number, height=760)


def _with_layout(figure: Any, number: int, **size: int) -> Any:
    figure.update_layout(title_text=TITLES[number], template="plotly_white", **size)
    return figure


#: The drawing of each figure by Matplotlib, and by plotly.
_FIGURES: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {
    1: (_data, _data_page), 2: (_over_lam, _over_lam_page), 3: (_over_lam, _over_lam_page),
    4: (_data, _data_page), 5: (_gaps, _gaps_page), 6: (_multiples, _multiples_page)}
