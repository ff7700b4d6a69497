from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from drivetrain.evaluate import metaworld
from drivetrain.evaluate.simulator import check_suite, open_simulator
from drivetrain.evaluate.workers import await_ready, spawn_workers
from drivetrain.types import DrivetrainError

SUITE = "metaworld/button-press-topdown"


@pytest.fixture(scope="module")
def simulator():
    opened = open_simulator(SUITE, 64)
    yield opened
    opened.close()


def trace(simulator, state_id: int) -> str:
    """A fingerprint of the first observation and of what ten fixed actions lead to."""
    first = simulator.reset(state_id)
    digest = hashlib.sha256(first.images["corner2"].tobytes() + first.state.tobytes())
    random = np.random.default_rng(5)
    for _ in range(10):
        progress = simulator.step(random.uniform(-1, 1, 4).astype(np.float32))
        digest.update(np.float64(progress.reward).tobytes() + simulator.observe().state.tobytes())
    digest.update(simulator.observe().images["corner2"].tobytes())
    return digest.hexdigest()


def test_an_initial_state_depends_on_its_id_alone(simulator) -> None:
    np.random.seed(0)
    first = {state_id: trace(simulator, state_id) for state_id in (0, 1, 2)}
    assert len(set(first.values())) == 3
    np.random.seed(1)
    again = {state_id: trace(simulator, state_id) for state_id in (2, 0, 1, 0)}
    assert again == first
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_simulator import SUITE, trace; from drivetrain.evaluate.simulator import open_simulator\n"
        "print(trace(open_simulator(SUITE, 64), 1))"
    )
    other = subprocess.run([sys.executable, "-c", code, __file__.rpartition("/")[0]], capture_output=True, text=True)
    assert other.stdout.strip() == first[1], other.stderr


def test_images_are_upright_and_show_the_work(simulator) -> None:
    image = simulator.reset(0).images["corner2"]
    assert image.shape == (64, 64, 3) and image.dtype == np.uint8 and image.std() > 20
    red = (image[..., 0].astype(int) - image[..., 1] - image[..., 2]) > 20
    brown = (np.abs(image.astype(int) - [115, 90, 75]) < 25).all(axis=2)
    rows = np.arange(64)[:, None]
    assert (rows * red).sum() / red.sum() < (rows * brown).sum() / brown.sum(), "the arm hangs above the table"
    yellow = (image[..., 0] > 150) & (image[..., 2] < 80) & (image[..., 1] > 100)
    assert yellow.any(), "the button's box is in view"


def test_state_and_action_conventions(simulator) -> None:
    before = simulator.reset(0).state
    for _ in range(10):
        simulator.step(np.array([0, 0, 1, 0], np.float32))
    moved = simulator.observe().state - before
    assert 0.05 < moved[2] < 0.11 and abs(moved[0]) < 0.01, "delta_z = 1 lifts the hand about a centimetre a step"
    for _ in range(20):
        simulator.step(np.array([0, 0, 0, 1], np.float32))
    assert simulator.observe().state[3] < before[3] - 0.2, "effort +1 shuts the gripper"


def test_actions_that_are_not_finite_are_refused(simulator) -> None:
    simulator.reset(0)
    with pytest.raises(DrivetrainError, match="not finite"):
        simulator.step(np.array([np.nan, 0, 0, 0], np.float32))


def test_every_task_of_the_package_has_an_instruction_and_no_other() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert {f"{task}-v3" for task in metaworld.INSTRUCTIONS} == set(ALL_V3_ENVIRONMENTS)


def test_unknown_suites_name_the_closest() -> None:
    with pytest.raises(DrivetrainError, match="metaworld/button-press-topdown"):
        check_suite("metaworld/buton-press-topdown")
    with pytest.raises(DrivetrainError, match="Closest"):
        check_suite("libero/kitchen")
    with pytest.raises(DrivetrainError, match="PYTHONPATH"):
        check_suite("no_such_module:open/reach")


def test_a_users_own_renderer_setting_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert metaworld.choose_renderer() == "egl"
    assert "libosmesa6" in metaworld.rendering_remedy()


def test_a_simulator_that_cannot_draw_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DrivetrainError, match=r"exit code 11(.|\n)*Type: sudo apt-get"):
        await_ready(spawn_workers("faulty_simulators:open_blind/reach", 64, 1))


def test_a_simulator_that_hangs_while_drawing_is_an_error_with_a_remedy() -> None:
    workers = spawn_workers(SUITE, 64, 1)
    workers[0].deadline = 0.0
    with pytest.raises(DrivetrainError, match=r"fell silent(.|\n)*Type: "):
        await_ready(workers)
