"""Bits or experts: sizes of experts in fewer bits, a store with fewer experts a token, the page's tables."""

import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.quant.formats import ExpertLayout, MatrixSpec, WeightFormat
from stoker.store.reader import open_store

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bits_or_experts
import bits_page


def test_an_expert_in_fewer_bits() -> None:
    """The 30B shape's: 3 matrices of 768 x 2048, group 64, two scales of 16 bits a group."""
    wide = MatrixSpec(768, 2048, WeightFormat("affine", 4, 64))
    layout = ExpertLayout.plan(wide, wide, MatrixSpec(2048, 768, WeightFormat("affine", 4, 64)))
    assert bits_or_experts.sized(layout, 4).record_bytes == layout.record_bytes == 2_654_208
    weights = 3 * 768 * 2048
    for bits in (3, 2):
        exact = weights * bits // 8 + weights // 64 * 4
        assert 0 <= bits_or_experts.sized(layout, bits).record_bytes - exact < 4096


def test_a_store_with_fewer_experts_a_token(mini: Path) -> None:
    full = open_store(mini)
    with bits_or_experts.fewer_experts(mini, 1) as place:
        fewer = open_store(place)
        assert fewer.config["num_experts_per_tok"] == 1 != full.config["num_experts_per_tok"]
        assert fewer.expert_bytes == full.expert_bytes
    assert open_store(mini).config == full.config and not place.exists()


def row(bits: int, k: int, gib: int, tok_s: float) -> dict[str, Any]:
    return {"bits": bits, "experts_a_token": k, "budget_gib": gib, "decode_tok_s": tok_s, "resident_share": 0.5}


def test_the_page_says_what_is_measured_and_what_modelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [(4, 8), (4, 6), (4, 4), (4, 2), (3, 8), (2, 8)]
    speed = {
        "modelled": [row(bits, k, gib, gib * 8 / k) for bits, k in cells for gib in (4, 8)],
        "measured": [row(4, 8, 4, 3.21)],
    }
    lines = bits_page.speed_table(speed)
    assert lines[0] == "| bits | experts a token | 4 GiB, modelled | 4 GiB, measured | 8 GiB, modelled |"
    assert lines[2] == "| 4 | 8 | 4.00 (50%) | 3.21 | 8.00 (50%) |"
    assert lines[3] == "| 4 | 6 | 5.33 (50%) |  | 10.67 (50%) |"
    quality = {
        "e32k4": {
            "rows": [
                {"bits": 16, "rounded": "all matrices", "experts_a_token": 4, "ratio": 1.0, "ratio_95": [1.0, 1.0]},
                {"bits": 16, "rounded": "all matrices", "experts_a_token": 2, "ratio": 1.5, "ratio_95": [1.4, 1.6]},
                {"bits": 3, "rounded": "experts", "experts_a_token": 4, "ratio": 1.1, "ratio_95": [1.0, 1.2]},
            ]
        }
    }
    both = bits_page.both_table(speed, quality)
    assert "| 3 bits | 100% | x 1.100 (1.000 to 1.200) | x 1.00 | x 1.00 |" in both
    assert "| 4 bits | 50% | x 1.500 (1.400 to 1.600) | x 2.00 | x 2.00 |" in both
    assert any("25%" in line and "not measured" in line for line in both)
    assert "not measured yet" in bits_page.both_table(speed, None)[2]
    page = Path(bits_page.PAGE).read_text()
    for name in ("both", "speed", "quality"):
        assert page.count(f"<!-- {name}: ") == page.count(f"<!-- end of {name} -->") == 1
