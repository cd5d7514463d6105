from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from eagle_mlx.train.report import PICTURES, smooth, write_comparison, write_plots


def a_run() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(1, 6):
        rows.append(
            {
                **{"kind": "train", "tokens": 100 * i, "train_seconds": 0.5 * i, "loss": 5.0 / i},
                "accuracy_by_step": [0.1 * i, 0.05 * i],
            }
        )
        rows.append(
            {
                **{"kind": "eval", "tokens": 100 * i, "acceptance_length": 1 + i},
                **{"acceptance_by_position": [0.2, 0.1], "interval": 0.2},
            }
        )
    return rows


def test_plots_are_pictures(tmp_path: Path) -> None:
    write_plots(a_run(), tmp_path)
    written = list(tmp_path.iterdir())
    assert {file.name for file in written} == set(PICTURES)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)


@pytest.mark.parametrize("count", [3, 40])
def test_every_curve_has_a_readable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A few names fit into the picture. Many are to its right, in a wider picture, and cover no curve."""
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: drawn.update({file.name: self}))
    rows = [
        {
            **{"kind": "eval", "tokens": 100 * i, "acceptance_length": 1.5},
            **{"acceptance_by_position": [0.2, 0.1], "interval": 0.2},
        }
        for i in range(count)
    ]
    write_plots(rows, tmp_path)
    figure = drawn["acceptance_by_position.png"]
    [axes] = figure.axes
    legend = axes.get_legend() or figure.legends[0]
    names = [f"after {100 * i:,} tokens, τ 1.50" for i in range(count)]
    assert [text.get_text() for text in legend.get_texts()] == names
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    assert box.height <= figure.bbox.height
    assert count == 3 or box.x0 >= axes.get_window_extent().x1


def test_the_plot_of_tau_has_intervals_and_counts_tokens_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, drawn = a_run(), dict[str, Figure]()
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: drawn.update({file.name: self}))
    write_plots([{**row, "tokens": 50_000 * row["tokens"]} for row in rows], tmp_path)
    write_comparison({"a": rows}, tmp_path / "runs.png")
    for name in ("acceptance_length.png", "runs.png"):
        [bars] = drawn[name].axes[0].containers
        low, high = bars.lines[2][0].get_segments()[0][:, 1]  # type: ignore[attr-defined]
        assert high - low == pytest.approx(0.4)
    drawn["acceptance_length.png"].draw_without_rendering()
    labels = [label.get_text() for label in drawn["acceptance_length.png"].axes[0].get_xticklabels()]
    assert "20 M" in labels


def test_a_run_without_steps_has_only_the_pictures_of_measurements(tmp_path: Path) -> None:
    write_plots([], tmp_path)
    assert not any(tmp_path.iterdir())
    write_plots([row for row in a_run() if row["kind"] == "eval"], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"acceptance_by_position.png", "acceptance_length.png"}


def test_smoothing_weighs_the_first_values_correctly() -> None:
    assert smooth([3.0] * 200) == pytest.approx([3.0] * 200)
    assert smooth([1.0, 2.0]) == [1.0, 2.0]
    assert len(smooth([])) == 0
