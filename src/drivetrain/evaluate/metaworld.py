"""The Meta-World suite: `metaworld/<task>`, a Sawyer arm with scripted experts, in MuJoCo.

Conventions of the suite, fixed here once:

* State: the hand's position in metres and the gripper's opening (0 shut, 1 open). Objects are seen by camera only.
* Action: the hand's displacement, 1 meaning one centimetre a step, and the gripper's effort (+1 shuts); all in [-1, 1].
* Camera `corner2`, at the place where LeRobot's Meta-World environment puts it, (0.75, 0.075, 0.7), because it looks at
  the work closely and published data sets show that view. It is mounted upside down, so its picture is turned.
* Pictures are made for a CPU: shadows, reflections and multisampling are off (nine tenths of a picture's time in
  software), and the robot's meshes are thinned out. Images of up to SMALL_IMAGE pixels are drawn at twice their size and
  averaged.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.evaluate.simulator import Progress, SuiteInfo
from drivetrain.types import DrivetrainError, Observation

FPS = 80
MAX_STEPS = 500
CAMERA = "corner2"
CAMERA_POSITION = (0.75, 0.075, 0.7)
SMALL_IMAGE = 128
MESH_GRID = 0.008
"""Metres: finer detail of the robot's meshes is not drawn; a pixel of a 224-pixel image is about as wide."""
STATE_NAMES = ("hand_x", "hand_y", "hand_z", "gripper_opening")
ACTION_NAMES = ("delta_x", "delta_y", "delta_z", "gripper_effort")

INSTRUCTIONS = {
    "assembly": "put the ring onto the peg",
    "basketball": "drop the ball through the hoop",
    "bin-picking": "move the object from one bin to the other",
    "box-close": "put the lid on the box",
    "button-press": "press the button from the front",
    "button-press-topdown": "press the button from above",
    "button-press-topdown-wall": "reach over the wall and press the button from above",
    "button-press-wall": "reach around the wall and press the button from the front",
    "coffee-button": "press the button of the coffee machine",
    "coffee-pull": "pull the mug away from the coffee machine",
    "coffee-push": "push the mug under the coffee machine",
    "dial-turn": "turn the dial half way round",
    "disassemble": "lift the ring off the peg",
    "door-close": "close the door",
    "door-lock": "turn the lock to lock the door",
    "door-open": "open the door",
    "door-unlock": "turn the lock to unlock the door",
    "drawer-close": "close the drawer",
    "drawer-open": "open the drawer",
    "faucet-close": "turn the tap off",
    "faucet-open": "turn the tap on",
    "hammer": "drive the nail in with the hammer",
    "hand-insert": "put the hand into the hole",
    "handle-press": "press the handle down",
    "handle-press-side": "press the handle down from the side",
    "handle-pull": "pull the handle up",
    "handle-pull-side": "pull the handle up from the side",
    "lever-pull": "pull the lever up",
    "peg-insert-side": "insert the peg into the hole in the side",
    "peg-unplug-side": "pull the peg out of the side",
    "pick-out-of-hole": "lift the object out of the hole",
    "pick-place": "bring the object to the goal",
    "pick-place-wall": "lift the object over the wall and bring it to the goal",
    "plate-slide": "slide the plate into the goal",
    "plate-slide-back": "slide the plate back out of the goal",
    "plate-slide-back-side": "slide the plate out of the goal sideways",
    "plate-slide-side": "slide the plate into the goal sideways",
    "push": "push the object to the goal",
    "push-back": "push the object back to the goal",
    "push-wall": "push the object around the wall to the goal",
    "reach": "move the hand to the goal",
    "reach-wall": "move the hand around the wall to the goal",
    "shelf-place": "put the object on the shelf",
    "soccer": "push the ball into the net",
    "stick-pull": "pull the thermos with the stick",
    "stick-push": "push the thermos with the stick",
    "sweep": "sweep the object off the table",
    "sweep-into": "sweep the object into the hole",
    "window-close": "slide the window shut",
    "window-open": "slide the window open",
}


def choose_renderer() -> str:
    """Set MUJOCO_GL, unless the user did, before MuJoCo is first imported; returns its value ('' off Linux)."""
    if sys.platform == "linux" and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = "egl" if Path("/dev/nvidiactl").exists() else "osmesa"
    # One simulator process per core is faster than several threads of software rendering in each.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    return os.environ.get("MUJOCO_GL", "")


def rendering_remedy() -> str:
    """One line that says what to type when no picture can be made with the present setting."""
    used = os.environ.get("MUJOCO_GL", "the system's own")
    if used == "osmesa":
        return "MUJOCO_GL=osmesa needs a library. Type: sudo apt-get install libosmesa6   (or MUJOCO_GL=egl on a GPU)."
    return f"MUJOCO_GL={used} does not work here. Type: sudo apt-get install libosmesa6 && export MUJOCO_GL=osmesa"


def open_metaworld(task: str, image_size: int) -> MetaworldSimulator:
    """The simulator of a task named in INSTRUCTIONS."""
    return MetaworldSimulator(task, image_size)


class MetaworldSimulator:
    """One Meta-World task. Every reset builds a fresh environment, in 30 ms, so nothing is left of the last episode."""

    def __init__(self, task: str, image_size: int) -> None:
        choose_renderer()
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP

        self.info = SuiteInfo(
            suite=f"metaworld/{task}",
            instruction=INSTRUCTIONS[task],
            robot="sawyer",
            fps=FPS,
            cameras=(CAMERA,),
            state_names=STATE_NAMES,
            action_names=ACTION_NAMES,
            max_steps=MAX_STEPS,
        )
        self._make_environment = ALL_V3_ENVIRONMENTS[f"{task}-v3"]
        self._make_expert = ENV_POLICY_MAP[f"{task}-v3"]
        self._image_size = image_size
        self._picture: _Picture | None = None
        self._environment: Any = None
        self._expert: Any = None
        self._seen = np.zeros(0)

    def reset(self, state_id: int) -> Observation:
        """See Simulator.reset. The id seeds the placement of objects and goal."""
        if state_id < 0:
            raise DrivetrainError(f"initial state {state_id} does not exist: ids count from 0.")
        self._environment = environment = self._make_environment()
        self._expert = self._make_expert()
        # The package wants a pickled task, which fixes the placement; these five lines ask for a seeded one instead,
        # and show the goal to the expert (the policy never sees it: its state is the hand's alone).
        environment._set_task_called = True
        environment._freeze_rand_vec = False
        environment.seeded_rand_vec = True
        environment._partially_observable = False
        environment.__dict__.pop("sawyer_observation_space", None)
        environment.seed(state_id)
        camera = environment.model.camera(CAMERA)
        camera.pos[:] = CAMERA_POSITION
        self._seen, _ = environment.reset()
        return self.observe()

    def step(self, action: np.ndarray) -> Progress:
        """See Simulator.step. Values outside [-1, 1] are clipped."""
        assert action.shape == (len(ACTION_NAMES),), action.shape
        if not np.isfinite(action).all():
            raise DrivetrainError(f"the action {action.tolist()} is not finite, so the arm cannot carry it out.")
        clipped = np.clip(action, -1.0, 1.0).astype(np.float32)
        self._seen, reward, _, truncated, outcome = self._environment.step(clipped)
        success = bool(outcome["success"])
        return Progress(reward=float(reward), success=success, done=success or bool(truncated))

    def observe(self) -> Observation:
        """See Simulator.observe."""
        state = self._seen[: len(STATE_NAMES)].astype(np.float32)
        return Observation({CAMERA: self.render(self._image_size)}, state, self.info.instruction)

    def render(self, size: int) -> np.ndarray:
        """See Simulator.render."""
        if self._picture is None:
            self._picture = _Picture(self._make_environment().model)
        return self._picture.draw(self._environment.model, self._environment.data, size)

    def expert_action(self) -> np.ndarray:
        """See Simulator.expert_action. The experts overshoot the action range, so theirs is clipped to it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action = self._expert.get_action(self._seen)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def close(self) -> None:
        """See Simulator.close."""
        if self._picture is not None:
            self._picture.close()
            self._picture = None


class _Picture:
    """An off-screen renderer for every MuJoCo model compiled from the same file as `model`, which it takes over.

    MuJoCo's own Renderer belongs to one model, and making it takes half a second, since meshes and textures are
    uploaded; the pieces below are the same for all models of one file, so they are kept from episode to episode.
    """

    def __init__(self, model: Any) -> None:
        mujoco: Any = importlib.import_module("mujoco")  # after choose_renderer, which decides how it draws
        self._mujoco = mujoco
        self._drawn = 2 * SMALL_IMAGE
        _simplify_meshes(model)
        model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = self._drawn
        self._context_gl = mujoco.GLContext(self._drawn, self._drawn)
        self._context_gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._options, self._nudge = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = model.camera(CAMERA).id

    def draw(self, model: Any, data: Any, size: int) -> np.ndarray:
        """uint8 [size, size, 3], upright."""
        mujoco, fold = self._mujoco, 2 if size <= SMALL_IMAGE else 1
        drawn = fold * size
        if drawn != self._drawn:
            mujoco.mjr_resizeOffscreen(drawn, drawn, self._context)
            self._drawn = drawn
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._options, self._nudge, self._camera, everything, self._scene)
        view = mujoco.MjrRect(0, 0, drawn, drawn)
        mujoco.mjr_render(view, self._scene, self._context)
        pixels = np.empty((drawn, drawn, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, view, self._context)
        if fold > 1:
            wide = pixels.astype(np.uint16)
            total = wide[::2, ::2] + wide[1::2, ::2] + wide[::2, 1::2] + wide[1::2, 1::2]
            pixels = ((total + 2) >> 2).astype(np.uint8)
        # Rows come bottom first, which undoes half of the camera's turn; mirroring left and right is the other half.
        return np.ascontiguousarray(pixels[:, ::-1])

    def close(self) -> None:
        self._context.free()
        self._context_gl.free()


def _simplify_meshes(model: Any) -> None:
    """Merge the vertices of big meshes within MESH_GRID of each other: a quarter of 68,000 triangles looks the same.

    Only for a model that is drawn and never simulated, before its meshes are uploaded.
    """
    for mesh in np.flatnonzero(model.mesh_facenum > 1000):
        vertices = slice(model.mesh_vertadr[mesh], model.mesh_vertadr[mesh] + model.mesh_vertnum[mesh])
        first_face, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        faces = model.mesh_face[first_face : first_face + count]
        normals = model.mesh_facenormal[first_face : first_face + count]
        cells = np.round(model.mesh_vert[vertices] / MESH_GRID).astype(np.int64)
        _, representative, cell = np.unique(cells, axis=0, return_index=True, return_inverse=True)
        merged = np.sort(representative[cell.reshape(-1)][faces], axis=1)
        flat = (merged[:, 0] == merged[:, 1]) | (merged[:, 1] == merged[:, 2])
        _, kept = np.unique(merged, axis=0, return_index=True)
        kept = np.sort(kept[~flat[kept]])
        model.mesh_face[first_face : first_face + len(kept)] = representative[cell.reshape(-1)][faces[kept]]
        model.mesh_facenormal[first_face : first_face + len(kept)] = normals[kept]
        model.mesh_facenum[mesh] = len(kept)
