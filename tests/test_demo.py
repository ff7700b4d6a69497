"""The whole path, through the real command: on a small data set of one's own here, and as `make demo` runs it (slow)."""

import json
import subprocess
import sys

import pytest
from fixtures import Tiny, write_v21


def run_demo(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", "demo", *arguments, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_on_a_data_set_of_ones_own(tmp_path):
    tiny = Tiny(lengths=(24, 20, 16, 20), sizes={"observation.images.front": (64, 64)})
    source = write_v21(tmp_path / "mine", tiny)
    result = run_demo("--dataset", str(source), "--out", str(tmp_path / "out"), "--steps", "12")
    assert 6 <= result["resumed_at_step"] < 12
    assert set(result["open_loop"]) >= {"policy", "mean_action", "repeat_state"}
    assert result["open_loop"]["episodes"] == 2
    assert result["trained"] is None
    for name in ("lake", "checkpoint", "policy", "report"):
        assert result[name].startswith(str(tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "<svg" in page


def test_a_folder_that_is_no_data_set_leaves_nothing_behind(tmp_path):
    (tmp_path / "empty").mkdir()
    command = [
        sys.executable,
        "-m",
        "drivetrain",
        "demo",
        "--dataset",
        str(tmp_path / "empty"),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert str(tmp_path / "empty") in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trained_policy_succeeds_because_it_sees(tmp_path):
    result = run_demo("--out", str(tmp_path / "out"))
    assert result["trained"]["successes"] >= 14
    assert result["untrained"]["successes"] <= 2
    assert result["blind"]["successes"] <= result["trained"]["successes"] / 2
    assert 0 < result["resumed_at_step"] < 450
