from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from drivetrain.evaluate.report import report, write_report
from drivetrain.evaluate.results import EpisodeResult, write_results
from drivetrain.evaluate.video import write_video
from drivetrain.types import DrivetrainError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS = f"{QUIET} --disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr".split()

# Added to a copy of the page: notes what went wrong, and at the end what the browser made of the videos.
PROBE = """<script>
window.faults = [];
addEventListener('error', e => faults.push(String(e.message)));
addEventListener('securitypolicyviolation', e => faults.push('blocked ' + e.blockedURI));
const look = () => {
  const videos = [...document.querySelectorAll('video')];
  if (videos.every(v => v.readyState > 0) || performance.now() > 8000) {
    const probe = document.body.appendChild(document.createElement('pre'));
    probe.id = 'probe';
    probe.textContent = JSON.stringify({faults, ready: videos.map(v => v.readyState), wide: videos.map(v => v.videoWidth),
      overflow: document.documentElement.scrollWidth - innerWidth});
  } else setTimeout(look, 100);
};
addEventListener('load', look);
</script>"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run's folder as training, evaluation and summary leave it: 200 logged steps, a resume, two evaluations."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train").mkdir()
    settings = {"recipe": "groot_<demo>", "steps": 200, "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.95]}}
    (folder / "train" / "run.json").write_text(json.dumps(settings))
    lines = []
    for step in range(1, 201):
        times = {"step_seconds": 0.2, "data_wait_seconds": 0.01, "compute_seconds": 0.19, "time": 1e9 + step}
        rates = {"samples_per_second": 320.0, "tokens_per_second": 3e4, "fill": 0.97}
        values = {"loss": 2.0 / step, "learning_rate": 1e-3 / step, "grad_norm": 1.0}
        lines.append(json.dumps({"step": step} | values | rates | times))
        if step == 120:
            lines.append(json.dumps({"event": "resumed", "step": 100}))
            lines += lines[100:120]
    (folder / "train" / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 201, "lo')
    for name, successes in (("trained", 17), ("blind", 2)):
        results = []
        for state in range(20):
            outcome = "success" if state < successes else "time-out"
            video = f"state-{state}.mp4" if state in (0, 19) else ""
            results.append(EpisodeResult("metaworld/reach", state, 0, outcome, 50, 10.0, 1.0, 5.0, video))
        write_results(folder / "evaluation" / name, results, 10.0)
        for state in (0, 19):
            pictures = [np.full((96, 96, 3), 40 + 20 * t, np.uint8) for t in range(10)]
            write_video(folder / "evaluation" / name / f"state-{state}.mp4", pictures)
    (folder / "summary.json").write_text(json.dumps({"seconds": 411.5, "resumed_at_step": 100}))
    return folder


def test_the_page_carries_everything_and_fetches_nothing(run_folder, tmp_path) -> None:
    write_report(tmp_path / "report.html", run_folder)
    text = (tmp_path / "report.html").read_text()
    assert "17 of 20, 95 % interval 64 to 95 %" in text and "2 of 20" in text
    assert text.count("data:video/mp4;base64,") == 4 and "groot_&lt;demo&gt;" in text and "<demo>" not in text
    assert ("optimizer.betas" in text and "411" in text) or "412 s" in text
    outside = [u for u in re.findall(r'(?:src|href)="([^"]{0,80})', text) if not u.startswith("data:")]
    assert outside == [] and "http://" not in text and "https://" not in text
    loss = next(block for block in text.split("<figure>") if "<b>Loss</b>" in block)
    points = json.loads(re.search(r"data-points='([^']*)'", loss).group(1).replace("&quot;", '"'))
    assert points["x"] == list(range(1, 201)), (
        "steps logged twice because of the resume count once, cut lines not at all"
    )
    assert points["y"]["logged"][99] == 0.02 and ">resumed<" in loss


def test_absent_parts_are_left_out(run_folder, tmp_path) -> None:
    report([run_folder / "evaluation" / "trained"], tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text()
    assert "Success in simulation" in text
    for heading in ("Training", "Configuration", "Data", "Quarantine", "Error on held-out"):
        assert f"<h2>{heading}" not in text
    with pytest.raises(DrivetrainError, match="neither a run"):
        report([tmp_path / "nothing"], tmp_path / "two.html")


def test_open_loop_errors_stand_in_for_simulation(run_folder, tmp_path) -> None:
    errors = {"definition": "as defined", "samples": 9, "episodes": 2, "policy": 0.25, "mean_action": 0.8}
    more = {"repeat_state": None, "per_dimension": {"a": 0.25}, "per_step": [0.25], "left_out": ["gripper"]}
    (tmp_path / "open_loop.json").write_text(json.dumps(errors | more))
    write_report(tmp_path / "report.html", tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "0.250" in text and "0.800" in text and "gripper" in text and "hold the present" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install it to test the page in a browser")
@pytest.mark.parametrize("width", [500, 1400])
def test_a_browser_shows_the_page(run_folder, tmp_path, width) -> None:
    from PIL import Image

    write_report(tmp_path / "report.html", run_folder)
    text = (tmp_path / "report.html").read_text()
    (tmp_path / "probed.html").write_text(text.replace("<title>", PROBE + "<title>", 1))
    shot = tmp_path / "shot.png"
    common = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2400"]
    address = (tmp_path / "probed.html").as_uri()
    dom = subprocess.run(
        [*common, "--virtual-time-budget=10000", "--dump-dom", address], capture_output=True, text=True, timeout=120
    )
    found = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', dom.stdout).group(1))
    assert found["faults"] == [] and not re.search(r"CONSOLE.*(error|Refused|Uncaught)", dom.stderr, re.IGNORECASE)
    assert len(found["ready"]) == 4 and min(found["ready"]) > 0 and found["wide"] == [96] * 4
    assert found["overflow"] <= 0, "nothing sticks out sideways"
    assert "17 of 20, 95 % interval 64 to 95 %" in dom.stdout
    subprocess.run([*common, f"--screenshot={shot}", address], capture_output=True, timeout=120, check=True)
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape[:2] == (2400, width) and pixels.std() > 10, "the page is not blank"
    blue = (pixels[..., 2] - pixels[..., 0]) > 80
    assert blue.sum() > 1000, "bars and curves are drawn"
