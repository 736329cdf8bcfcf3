"""The papers' figures, drawn from a run's records and arrays; matplotlib is imported when one is asked for.

A figure that can't be drawn yet says why, by `NoFigureError`; the page repeats it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from train_ref.outcome import Outcome, Value
from train_ref.procedures import quarters
from train_ref.report import collapse_toy_figures, extreme_field_figures, noise_figures
from train_ref.report.drawing import BLUE, DPI, GREEN, GREY, RED, Array, Drawing, NoFigureError, panels
from train_ref.report.tables import groups, place_in_words
from train_ref.settings import Row
from tripletops import diagnostics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 2000  # of a scatter plot, chosen at random from more
QUARTERS = diagnostics.QUARTERS
MINING = {
    ("easy", "hard"): "EPHN",
    ("easy", "semihard"): "EPSHN",
    ("hard", "hard"): "HPHN",
    ("easy", "easy"): "EPEN",
}
# The field behind the measured movements: what 002 draws in Fig 2, with the stronger entanglement.
GAMMA, ENTANGLEMENT = 0.5, 0.8
FIELD_GRID = 501  # triplets a side, of which a measured one takes the nearest
FIELD_ARROWS, MEASURED_ARROWS = 11, 15  # along each axis; in a panel
PHOTOS = {"strips"}  # figures that show images of the data set: published only where the data set may be


def draw(name: str, drawing: Drawing) -> list[Path]:
    """The files of the figure `name`."""
    try:
        return FIGURES[name](drawing)
    except ImportError as error:
        raise NoFigureError(f"{error.name} is not installed: pip install tripletops[demo]") from None


def _grid(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """`count` panels in lines of at most `columns`."""
    columns = min(columns, count)
    figure, axes = panels(-(-count // columns), columns, width, height)
    flat = [each for line in axes for each in line]
    for unused in flat[count:]:
        unused.set_visible(False)
    return figure, flat[:count]


def _frame(axes: Axes) -> None:
    """A frame instead of axes: the numbers mean nothing."""
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set(visible=True, color=GREY, linewidth=0.6)


def _some(count: int, most: int) -> Array:
    """At most `most` of `count` rows, always the same ones, in order."""
    if count <= most:
        return numpy.arange(count)
    return numpy.sort(numpy.random.default_rng(0).choice(count, most, replace=False))


def _first_recall(outcome: Outcome, rows: Sequence[Row]) -> str:
    """The name of R@1 of the first split by the first labels."""
    for row in rows:
        for name in outcome.measures(row.key):
            if name.endswith("/R@1"):
                return name
    raise NoFigureError("no row of it has R@1 yet")


def _measure_in_words(measure: str) -> str:
    place, _, name = measure.rpartition("/")
    return f"{name}, {place_in_words(place)} (%)"


def _colours(count: int) -> list[Any]:
    import matplotlib

    return [matplotlib.colormaps["tab10" if count <= 10 else "tab20"](place % 20) for place in range(count)]


def plane(drawing: Drawing) -> list[Path]:
    """001, Fig 2: the embeddings in the plane, coloured by what training did not see."""
    rows = [row for row in drawing.outcome.rows if drawing.arrays(row) and drawing.settings(row).dim == 2]
    if not rows:
        raise NoFigureError("no row of two dimensions is finished yet")
    splits = [
        name for name in drawing.dataset(rows[0]).tests if f"embeddings {name}" in drawing.arrays(rows[0])
    ]
    figure, axes = panels(len(splits), len(rows), 3.6, 3.2)
    for column, row in enumerate(rows):
        dataset, arrays = drawing.dataset(row), drawing.arrays(row)
        label = drawing.settings(row).measured[0]
        for line, split in enumerate(splits):
            labels = dataset.tests[split].labels[label].numpy()
            kinds = numpy.unique(labels).tolist()
            _plane_panel(axes[line][column], arrays[f"embeddings {split}"], labels, kinds)
            axes[line][column].set_title(f"{row.name}: {split}", fontsize=10)
            if column == len(rows) - 1:
                axes[line][column].legend(
                    title=label,
                    fontsize=8,
                    title_fontsize=8,
                    markerscale=4,
                    loc="center left",
                    bbox_to_anchor=(1, 0.5),
                )
    return [drawing.save(figure, "plane")]


def _plane_panel(axes: Axes, points: Array, labels: Array, kinds: list[int]) -> None:
    chosen = _some(len(points), POINTS)
    points, colours = points[chosen].astype(float), _colours(10)
    # Points are drawn in the order of the data set. Class by class, the last class would hide the others.
    axes.scatter(
        points[:, 0], points[:, 1], s=3, linewidths=0, color=[colours[kind % 10] for kind in labels[chosen]]
    )
    for kind in kinds:
        axes.scatter([], [], s=3, linewidths=0, color=colours[kind % 10], label=str(kind))
    _frame(axes)
    axes.set_aspect("equal", adjustable="datalim")


def recall_by_epoch(drawing: Drawing) -> list[Path]:
    """001, Fig 3a: a line for each row, the mean over the seeds, and their range as a band."""
    outcome = drawing.outcome
    curves: dict[str, list[tuple[Row, dict[int, list[float]]]]] = {}
    measure = next(
        (
            name
            for record in outcome.records
            if "epoch" in record
            for name in record["measures"]
            if name.endswith("/R@1")
        ),
        "",
    )
    for group, rows in groups(outcome).items():
        found = [(row, outcome.by_epoch(row.key, measure)) for row in rows]
        if lines := [(row, by_epoch) for row, by_epoch in found if len(by_epoch) > 1]:
            curves[group] = lines
    if not curves:
        raise NoFigureError("no row of it has been measured after more than one epoch")
    figure, axes = _grid(len(curves), 3, 5.6, 3.8)
    for panel, (group, lines) in zip(axes, curves.items(), strict=True):
        bases = list(dict.fromkeys(row.name.removeprefix("EPS + ") for row, _ in lines))
        colours = dict(zip(bases, _colours(len(bases)), strict=True))
        for row, by_epoch in lines:
            colour = colours[row.name.removeprefix("EPS + ")]
            style = "-" if row.name.startswith("EPS + ") else "--"
            epochs, values = list(by_epoch), list(by_epoch.values())
            panel.plot(
                epochs, [statistics.fmean(each) for each in values], style, color=colour, label=row.name
            )
            panel.fill_between(
                epochs,
                [min(each) for each in values],
                [max(each) for each in values],
                color=colour,
                alpha=0.15,
                lw=0,
            )
        panel.set(title=group, xlabel="epoch", ylabel=_measure_in_words(measure))
        panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return [drawing.save(figure, "recall_by_epoch")]


def positives_in_batch(drawing: Drawing) -> list[Path]:
    """001, Fig 3b: recall against the number of positives in the batch; 0 stands for no EPS."""
    outcome = drawing.outcome
    rows = groups(outcome).get("Fig 3b", [])
    measure = _first_recall(outcome, rows)
    points = [(int(row.name.split()[0]), value) for row in rows if (value := outcome.value(row.key, measure))]
    counts, means = [count for count, _ in points], [value.mean for _, value in points]
    figure, [[axes]] = panels(1, 1, 5, 3.6)
    axes.errorbar(counts, means, [value.std for _, value in points], fmt="o-", color=BLUE, capsize=3)
    axes.set(
        xticks=counts, xlabel="positives in the batch (0: without EPS)", ylabel=_measure_in_words(measure)
    )
    return [drawing.save(figure, "positives_in_batch")]


class Line(NamedTuple):
    """A line of a plot; those of one family have one colour."""

    family: str
    label: str
    style: str = "-"


def trimmed(drawing: Drawing) -> list[Path]:
    """001, Fig 6: recall against the trimmed share; one panel per data set, one line per loss."""

    def line(row: Row) -> Line:
        loss = row.name.partition(",")[0]
        return Line(loss, loss)

    return _lines(drawing, "trimmed", "trimmed share (%)", line, lambda settings: 100 * settings.trim)


def group_size(drawing: Drawing) -> list[Path]:
    """002, Fig 4: recall against n; one panel per data set, one line per mining rule and order."""

    def line(row: Row) -> Line:
        settings = drawing.settings(row)
        rules = settings.positive, settings.negative
        mining = MINING.get(rules, "+".join(rules))
        second = settings.triplet == "second_order"
        return Line(mining, f"{mining}-{'2nd' if second else '1st'}", "-" if second else "--")

    axis = "n, images of a class in a batch"
    return _lines(drawing, "group_size", axis, line, lambda settings: settings.per_class, logarithmic=True)


def _lines(
    drawing: Drawing,
    name: str,
    axis: str,
    line: Callable[[Row], Line],
    place: Callable[[Any], float],
    logarithmic: bool = False,
) -> list[Path]:
    """R@1 against a setting: a row is a point of the line that `line` names, at `place`."""
    outcome = drawing.outcome
    panels: dict[str, tuple[str, dict[Line, list[tuple[float, Value]]]]] = {}
    for group, rows in groups(outcome).items():
        if not any(row.key in outcome.finals for row in rows):
            continue
        measure = _first_recall(outcome, rows)
        lines: dict[Line, list[tuple[float, Value]]] = {}
        for row in rows:
            if value := outcome.value(row.key, measure):
                lines.setdefault(line(row), []).append((place(drawing.settings(row)), value))
        panels[group] = measure, lines
    if not panels:
        raise NoFigureError("no row of it is finished yet")
    figure, axes = _grid(len(panels), 3, 4.2, 3.6)
    for panel, (group, (measure, lines)) in zip(axes, panels.items(), strict=True):
        families = list(dict.fromkeys(each.family for each in lines))
        for each, points in lines.items():
            colour = _colours(10)[families.index(each.family)]
            points.sort()
            stds = [value.std for _, value in points]
            panel.errorbar(
                [x for x, _ in points],
                [value.mean for _, value in points],
                stds if any(stds) else None,
                fmt=f"o{each.style}",
                color=colour,
                capsize=3,
                markersize=4,
                label=each.label,
            )
        ticks = sorted({x for points in lines.values() for x, _ in points})
        if logarithmic:
            panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set(title=group, xlabel=axis, ylabel=_measure_in_words(measure))
        panel.legend(fontsize=8, frameon=False)
    return [drawing.save(figure, name)]


def diameter(drawing: Drawing) -> list[Path]:
    """000, Fig 5: the diameter after training against the batch or the dimension, and the bound on it."""
    outcome = drawing.outcome
    drawn = {
        group: rows
        for group, rows in groups(outcome).items()
        if any(outcome.values(row.key, "diameter") for row in rows)
    }
    if not drawn:
        raise NoFigureError("no row of it is finished yet")
    figure, axes = _grid(len(drawn), 3, 4.2, 3.4)
    for panel, (group, rows) in zip(axes, drawn.items(), strict=True):
        settings = {row.key: drawing.settings(row) for row in rows}
        of_dim = len({each.dim for each in settings.values()}) > 1
        x_of = {
            row.key: each.dim if of_dim else each.batch
            for row, each in zip(rows, settings.values(), strict=True)
        }
        finals = [(x_of[row.key], value) for row in rows for value in outcome.values(row.key, "diameter")]
        panel.plot(
            *zip(*finals, strict=True),
            "o",
            color=RED,
            alpha=0.6,
            markersize=4,
            label="after training",
            zorder=3,
        )
        before = _means([(x_of[row.key], outcome.before(row.key, "diameter before")) for row in rows])
        panel.plot(list(before), list(before.values()), ":", color=GREY, label="before training")
        least = _means([(x_of[row.key], outcome.bounds(row.key)) for row in rows])
        panel.plot(list(least), list(least.values()), "--", color=BLUE, label="bound diam₀ − 2·L₀")
        top = max([value for _, value in finals] + list(before.values()))
        panel.set_ylim(-0.04 * top, 1.08 * top)
        panel.axhline(0, color=GREY, linewidth=0.6)
        panel.set_xscale("log", base=2)
        ticks = [2.0**power for power in range(1, 12) if min(before) <= 2**power <= max(before)]
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        margin = f"α={next(iter(settings.values())).margin:g}"
        panel.set_title(group if margin in group else f"{group}, {margin}" if group else margin, fontsize=10)
        panel.set(xlabel="embedding dimension d" if of_dim else "batch size N", ylabel="diameter")
    figure.legend(
        *axes[0].get_legend_handles_labels(), fontsize=8, frameon=False, ncols=3, loc="outside lower center"
    )
    return [drawing.save(figure, "diameter")]


def _means(lists: Sequence[tuple[int, list[float]]]) -> dict[int, float]:
    """The mean of all values at an x, in order of x."""
    found: dict[int, list[float]] = {}
    for x, values in lists:
        if values:
            found.setdefault(x, []).extend(values)
    return {x: statistics.fmean(found[x]) for x in sorted(found)}


def movement(drawing: Drawing) -> list[Path]:
    """002, Fig 3: where the triplets stood that moved into each quarter, first steps blue and last ones red,
    and how many there were, over the field of the row's loss. One file a group."""
    files = []
    for group, rows in groups(drawing.outcome).items():
        moves = {row.key: drawing.arrays(row).get("moves") for row in rows}
        drawn = [row for row in rows if moves[row.key] is not None]
        if not drawn:
            continue
        figure, axes = panels(len(drawn), len(QUARTERS) + 1, 2.1, 2.2)
        found = [each for each in moves.values() if each is not None]
        limits = _limits(numpy.concatenate([each[:, :2] for each in found]))
        for line, row in zip(axes, drawn, strict=True):
            points = moves[row.key]
            assert points is not None
            field = diagnostics.field(
                drawing.settings(row).triplet,
                gamma=GAMMA,
                p=ENTANGLEMENT,
                grid=FIELD_GRID,
                low=max(-1.0, limits[0]),  # a rounded similarity may be less
            )
            _movement_line(line, points, field)
            shares = [drawing.outcome.value(row.key, quarter) for quarter in QUARTERS]
            _movement_bars(line[-1], [share.mean if share else 0.0 for share in shares], field, points)
            line[0].set_ylabel(f"{row.name}\n$S_{{an}}$", fontsize=9)
        for panel, title in zip(axes[0], (*QUARTERS, "share, field's red (%)"), strict=True):
            panel.set_title(title, fontsize=10)
        for panel in axes[-1][:-1]:
            panel.set_xlabel("$S_{ap}$", fontsize=9)
        figure.suptitle(
            f"{group}: similarities before a step, by where it moved the triplet; first steps blue, last red."
            f"\nBehind: the field, γ={GAMMA:g}, p={ENTANGLEMENT:g}, shaded where it moves to that quarter",
            fontsize=10,
        )
        files.append(drawing.save(figure, _file_name("movement", group)))
    if not files:
        raise NoFigureError("no row of it is finished yet")
    return files


def _movement_line(axes: list[Axes], points: Array, field: diagnostics.Field) -> None:
    chosen = _some(len(points), POINTS)
    time, points = chosen / max(1, len(points) - 1), points[chosen]
    where = quarters(points)
    for panel, quarter in zip(axes, QUARTERS, strict=False):
        here = where[quarter]
        panel.scatter(
            points[here, 0], points[here, 1], c=time[here], cmap="coolwarm", vmin=0, vmax=1, s=4, linewidths=0
        )
        _measured_arrows(panel, points[here])
        _field_behind(panel, field, quarter)


def _measured_arrows(axes: Axes, points: Array) -> None:
    """Which way some triplets moved. All arrows have one length: the moves are too short to be seen."""
    points = points[numpy.abs(points[:, 2:]).max(1) > 0].astype(float)
    points = points[_some(len(points), MEASURED_ARROWS)]
    steps = points[:, 2:] / numpy.linalg.norm(points[:, 2:], axis=1, keepdims=True)
    axes.quiver(*points[:, :2].T, *steps.T, color="black", width=0.007, scale=8, zorder=3)


def _field_behind(axes: Axes, field: diagnostics.Field, quarter: str) -> None:
    """The field's arrows, light, and a shade where it moves triplets to this quarter."""
    field.draw(axes, "total", arrows=FIELD_ARROWS).set(alpha=0.3, zorder=0)
    there = diagnostics.quarter_of(field.total_ap, field.total_an) == QUARTERS.index(quarter)
    colour = diagnostics.QUARTER_COLOURS[quarter]
    axes.contourf(field.s_ap, field.s_an, there, levels=[0.5, 1.5], colors=[colour], alpha=0.13, zorder=0)
    low = axes.get_xlim()[0]
    ticks = [tick for tick in ((-1, 0, 1) if low < -0.5 else (0, 0.5, 1)) if tick >= low]
    axes.set(xticks=ticks, yticks=ticks, title="", xlabel="", ylabel="")


def _movement_bars(axes: Axes, shares: list[float], field: diagnostics.Field, points: Array) -> None:
    """The measured shares as bars, and as red ticks what the field says of the same triplets."""
    low, high = float(field.s_ap[0]), float(field.s_ap[-1])
    places = (points[:, :2].clip(low, high) - low) / (high - low) * (FIELD_GRID - 1)
    s_ap, s_an = places.round().astype(int).T
    expected = diagnostics.quarter_of(field.total_ap, field.total_an).numpy()[s_an, s_ap]
    axes.set(ylim=(0, 112), xticks=range(4), yticks=(0, 50, 100))
    axes.bar_label(axes.bar(range(4), shares, color=GREY, width=0.5), fmt="%.0f", fontsize=8)
    by_field = [100 * float((expected == place).mean()) for place in range(4)]
    beside = [place + 0.38 for place in range(4)]
    axes.plot(beside, by_field, "_", color=RED, markersize=8, markeredgewidth=3, clip_on=False)
    axes.set_xticklabels(["↗", "↖", "↙", "↘"], fontsize=12)


def _limits(points: Array) -> tuple[float, float]:
    """Of both axes of a scatter diagram: from 0 to 1, or wider where the points are."""
    return min(0.0, float(points.min())), max(1.0, float(points.max()))


def _similarities(axes: Axes, limits: tuple[float, float]) -> None:
    room = 0.03 * (limits[1] - limits[0])
    axes.plot(limits, limits, color=GREY, linewidth=0.6, zorder=0)
    axes.set(xlim=(limits[0] - room, limits[1] + room), ylim=(limits[0] - room, limits[1] + room))
    axes.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")


def _file_name(figure: str, group: str) -> str:
    plain = "".join(character if character.isalnum() else "-" for character in group.lower()).strip("-")
    return f"{figure}-{plain}" if plain else figure


def diagrams(drawing: Drawing) -> list[Path]:
    """002, Fig 6: every training image by its nearest positive and negative, epoch by epoch; red where the
    negative is nearer."""
    found_of = {row.key: drawing.outcome.diagrams(row.key) for row in drawing.outcome.rows}
    kept = {key: found for key, found in found_of.items() if found}
    if not kept:
        raise NoFigureError("no row of it is finished yet")
    epochs = sorted({epoch for found in kept.values() for epoch in found})
    limits = _limits(numpy.concatenate([array for found in kept.values() for array in found.values()]))
    figure, axes = panels(len(kept), len(epochs), 2.1, 2.25)
    for line, (key, found) in zip(axes, kept.items(), strict=True):
        for panel, epoch in zip(line, epochs, strict=True):
            if epoch not in found:
                panel.set_visible(False)
                continue
            points = found[epoch][_some(len(found[epoch]), POINTS)]
            wrong = points[:, 1] > points[:, 0]
            for which, colour in ((wrong, RED), (~wrong, BLUE)):
                panel.scatter(points[which, 0], points[which, 1], s=2, linewidths=0, color=colour, alpha=0.5)
            right = 100 * float((found[epoch][:, 1] < found[epoch][:, 0]).mean())
            panel.text(0.03, 0.97, f"{right:.0f} % below", transform=panel.transAxes, fontsize=7, va="top")
            _similarities(panel, limits)
            panel.set_title(f"epoch {epoch}", fontsize=9)
            panel.set_xlabel("$S_{ap}$", fontsize=9)
        line[0].set_ylabel(f"{key}\n$S_{{an}}$", fontsize=8)
    return [drawing.save(figure, "diagrams")]


TSNE_CLASSES, TSNE_POINTS = 10, 600


def tsne(drawing: Drawing) -> list[Path]:
    """001, Fig 5: t-SNE of the first training classes."""
    from sklearn.manifold import TSNE

    rows = [row for row in drawing.outcome.rows if "embeddings train" in drawing.arrays(row)]
    if not rows:
        raise NoFigureError("no row of it is finished yet")
    figure, axes = _grid(len(rows), 4, 2.7, 2.8)
    for panel, row in zip(axes, rows, strict=True):
        labels = drawing.dataset(row).train.labels[drawing.settings(row).target].numpy()
        first = numpy.flatnonzero(labels < TSNE_CLASSES)
        first = first[_some(len(first), TSNE_POINTS)]
        emb = drawing.arrays(row)["embeddings train"][first].astype(numpy.float32)
        perplexity = min(30, (len(first) - 1) / 3)
        points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(emb)
        colours = _colours(TSNE_CLASSES)
        panel.scatter(
            points[:, 0], points[:, 1], s=7, linewidths=0, color=[colours[label] for label in labels[first]]
        )
        _frame(panel)
        panel.set_title(row.key, fontsize=9)
    return [drawing.save(figure, "tsne")]


STRIP_QUERIES, STRIP_NEIGHBOURS = 6, 5
# In pixels: the least side of an image, the frame around it, the gap between the two rows' results.
STRIP_SIDE, STRIP_FRAME, STRIP_GAP = 64, 4, 24


def strips(drawing: Drawing) -> list[Path]:
    """001, Fig 4: what two rows find for the same queries, framed green where the class is right."""
    from matplotlib.figure import Figure

    pair = _strip_rows(drawing)
    dataset = drawing.dataset(pair[0])
    name, split = next(iter(dataset.tests.items()))
    labels = split.labels[drawing.settings(pair[0]).measured[0]].numpy()
    queries = numpy.sort(numpy.random.default_rng(0).choice(len(split), STRIP_QUERIES, replace=False))
    lines = [[_framed(split.pixels[int(query)].numpy(), "black")] for query in queries]
    side = len(lines[0][0])
    titles = {"query": side / 2}
    for row in pair:
        emb = drawing.arrays(row)[f"embeddings {name}"].astype(numpy.float32)
        titles[row.name] = sum(part.shape[1] for part in lines[0]) + STRIP_GAP + STRIP_NEIGHBOURS * side / 2
        for line, query in zip(lines, queries, strict=True):
            line.append(numpy.full((side, STRIP_GAP, 3), 255, numpy.uint8))
            distances = numpy.square(emb - emb[query]).sum(1)
            distances[query] = numpy.inf
            for found in numpy.argsort(distances, kind="stable")[:STRIP_NEIGHBOURS]:
                right = labels[found] == labels[query]
                line.append(_framed(split.pixels[int(found)].numpy(), GREEN if right else RED))
    mosaic = numpy.vstack([numpy.hstack(line) for line in lines])
    figure = Figure(figsize=(mosaic.shape[1] / DPI, len(mosaic) / DPI + 0.3))
    axes = figure.add_axes((0, 0, 1, len(mosaic) / DPI / (len(mosaic) / DPI + 0.3)))
    axes.imshow(mosaic, interpolation="none")
    axes.set_axis_off()
    for title, x in titles.items():
        axes.text(x, -6, title, ha="center", fontsize=9)
    return [drawing.save(figure, "strips", photos=True)]


def _strip_rows(drawing: Drawing) -> tuple[Row, Row]:
    """A loss without and with EPS, or else the first two rows, of those whose embeddings were kept."""
    outcome = drawing.outcome
    kept = {
        row.key: row
        for row in outcome.rows
        if any(name != "embeddings train" for name in drawing.arrays(row))
    }
    if len(kept) < 2:
        raise NoFigureError("it needs two finished rows")
    for key, row in kept.items():
        if f"EPS + {key}" in kept:
            return row, kept[f"EPS + {key}"]
    first, second, *_ = kept.values()
    return first, second


def _framed(pixels: Array, frame: str) -> Array:
    """(side, side, 3) bytes from (channels, height, width) ones, grey or coloured."""
    from matplotlib.colors import to_rgb

    times = -(-STRIP_SIDE // pixels.shape[-1])
    image = numpy.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)
    image = image.repeat(times, 0).repeat(times, 1)
    side = len(image) + 2 * STRIP_FRAME
    framed = numpy.full((side, side, 3), [round(255 * part) for part in to_rgb(frame)], numpy.uint8)
    framed[STRIP_FRAME:-STRIP_FRAME, STRIP_FRAME:-STRIP_FRAME] = image
    return numpy.pad(framed, ((2, 2), (2, 2), (0, 0)), constant_values=255)


FIGURES: dict[str, Callable[[Drawing], list[Path]]] = {
    "plane": plane,
    "recall_by_epoch": recall_by_epoch,
    "positives_in_batch": positives_in_batch,
    "trimmed": trimmed,
    "diameter": diameter,
    "movement": movement,
    "group_size": group_size,
    "diagrams": diagrams,
    "tsne": tsne,
    "strips": strips,
    **collapse_toy_figures.FIGURES,
    **noise_figures.FIGURES,
    **extreme_field_figures.FIGURES,
}
CAPTIONS = {
    "plane": "The first seed's embeddings in the plane. Colours are the classes that training did not see.",
    "recall_by_epoch": "Recall by epoch: mean over the seeds, and their range as a band.",
    "positives_in_batch": "Recall against the number of positives in the batch; 0 is without EPS.",
    "trimmed": "Recall against the share of the anchors, those with the highest loss, that is left out.",
    "diameter": "The diameter after training, a point a repeat; dashed the bound, dotted what it was before.",
    "movement": "Where the triplets stood that a step moved into each quarter, and how many of all did. "
    "Black arrows are the directions of some of the moves. Behind them is the field of the row's loss by "
    f"002's equations 7–12, with γ={GAMMA:g} and p={ENTANGLEMENT:g}: its arrows, light, and a shade where it "
    "moves to the same quarter. Red ticks in the last column are the shares that it expects of the same "
    "triplets.",
    "group_size": "Recall against the images of a class in a batch.",
    "diagrams": "Every training image by its similarity to its nearest positive and its nearest negative.",
    "tsne": "t-SNE of the first ten training classes, a colour each.",
    "strips": "The five nearest images for the same six queries; green frames have the query's class.",
    **collapse_toy_figures.CAPTIONS,
    **noise_figures.CAPTIONS,
    **extreme_field_figures.CAPTIONS,
}
