"""The picture of bench gpu is drawn from our rows alone."""

from pathlib import Path

from neuron_moe.tools.pictures import draw_save_percent


def test_the_picture_shows_our_rows_of_the_first_size(tmp_path: Path) -> None:
    numbers = {"fwd_bwd_ms": 2.0, "peak_gib": 1.0, "routing": "random"}
    rows = [
        {"shape": shape, "T": tokens, "peer": peer, **numbers}
        for shape in "ab"
        for tokens in (64, 128)
        for peer in ("ours, save_percent=0", "ours, save_percent=100", "grouped_mm")
    ]
    rows.append({"shape": "a", "T": 1, "peer": "ours, graph", "routing": "random"})
    path = draw_save_percent(rows, tmp_path / "curve.png", title="measured")
    assert path.read_bytes().startswith(b"\x89PNG")
