"""What tools/prove.py makes of a run."""

from __future__ import annotations

import prove
import pytest


@pytest.mark.parametrize(("step_ms", "tokens_per_s"), [(500.0, 16.0), (None, None)])
def test_a_run_whose_plan_never_stood_has_no_time(step_ms: float | None, tokens_per_s: float | None) -> None:
    summary = {
        **dict.fromkeys(prove.SUMMARY_FIELDS),
        "device_peak_bytes": 2 << 30, "host_leased_peak_bytes": 0, "host_booked_bytes": 0, "saved_peak_bytes": None,
        "layers": [{"layer": 0, "swapped_out_bytes": 8}], "losses": ["0x1p+0"], "steps": [{"num_rescues": 3}],
    }  # fmt: skip
    result = {
        "summary": summary, "planning": None, "unstable_steps": [], "tokens_per_step": 8, "step_ms_median": step_ms
    }  # fmt: skip
    row = prove.measured(result)
    assert row["tokens_per_s"] == tokens_per_s
    assert (row["device_peak_gib"], row["layer_out_bytes"], row["rescues_by_step"]) == (2.0, {"0": 8}, [3])
