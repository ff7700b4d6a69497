"""pi-0.5's data side: prompts and the state in them, normalising, noise, and the way back to physical actions."""

from __future__ import annotations

import dataclasses
import io
import pickle

import numpy as np
import pytest
from pi05_samples import micro
from PIL import Image

from drivetrain.data.draws import pi05_time, stream
from drivetrain.data.pack import pack
from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.groot.config import tiny as groot_tiny
from drivetrain.policies.pi05.config import Pi05Config, tiny
from drivetrain.policies.pi05.processor import Pi05Processor
from drivetrain.policies.pi05.prompt import Prompt, bins
from drivetrain.recipes import RECIPES
from drivetrain.run import Run, from_json, policy_from_json, to_json
from drivetrain.types import DatasetInfo, DrivetrainError, FeatureStatistics, Observation, PackShape, Step


def statistics(low: list[float], high: list[float]) -> FeatureStatistics:
    """Quantiles at `low` and `high`; extremes far beyond them, which must not matter."""
    q01, q99 = np.array(low, np.float64), np.array(high, np.float64)
    middle = (q01 + q99) / 2
    return FeatureStatistics(
        count=10, mean=middle, std=q99 - q01, min=q01 - 50, max=q99 + 50,
        q01=q01, q10=middle, q50=middle, q90=middle, q99=q99,
    )  # fmt: skip


def dataset(name: str = "cups", cameras: tuple[str, ...] = ("top", "wrist"), dims: int = 3) -> DatasetInfo:
    return DatasetInfo(
        name=name,
        source="made by a test",
        robot="arm",
        fps=30,
        cameras=cameras,
        image_size=32,
        state_names=tuple("abcdefgh"[:dims]),
        action_names=("a", "b", "c", "d"),
        episodes=1,
        steps=10,
        statistics={
            "observation.state": statistics([-1, 0, 5, -1, -1, -1, -1, -1][:dims], [1, 10, 6, 1, 1, 1, 1, 1][:dims]),
            "action": statistics([-2, 0, 0.5, -1], [2, 4, 0.5, 1]),
        },
    )


def png(value: int, size: int = 32) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def step(**changes) -> Step:
    made = Step(
        dataset="cups",
        episode=0,
        frame=3,
        task="lift the cup",
        images=(png(10), png(200)),
        state=np.float32([0.5, 10, 5]),
        actions=np.tile(np.float32([1, 3, 0.5, 1.0]), (10, 1)),
        valid=np.ones(10, bool),
    )
    return dataclasses.replace(made, **changes)


def processor(draws: int = 2, **changes) -> Pi05Processor:
    return Pi05Processor(micro(**changes), {"cups": dataset()}, draws)


def text(tokens: np.ndarray, images: int) -> str:
    """What a byte-level prompt says after its images and its first token."""
    assert tokens[images] == 257
    return bytes(tokens[images + 1 :].astype(np.uint8)).decode()


def test_sample_is_prompted_normalised_padded_and_masked():
    sample = processor().sample(step(task=" lift_the\ncup "), id=7, epoch=1, seed=0)
    assert text(sample.tokens, 32) == "Task: lift the cup, State: 192 255 0;\nAction: "
    assert sample.image_tokens.tolist() == list(range(32)) and (sample.tokens[:32] == 256).all()
    assert np.allclose(sample.actions[:, :4], [0.5, 0.5, 0, 1]) and not sample.actions[:, 4:].any()
    assert sample.action_mask[:, :4].all() and not sample.action_mask[:, 4:].any()
    assert sample.noise.shape == (2, 10, 12) and sample.time.shape == (2,)
    assert [int(i.mean()) for i in sample.images] == [10, 200]


def test_all_dimensions_count_where_openpi_counts_them():
    sample = processor(loss_over="all").sample(step(), id=0, epoch=0, seed=0)
    assert sample.action_mask.all() and not sample.actions[:, 4:].any() and sample.noise[..., 4:].any()


def test_bins_are_those_of_the_released_code_and_clipped():
    values = np.linspace(-1, 1.02, 1001, dtype=np.float32)
    assert np.array_equal(bins(values), np.digitize(values, bins=np.linspace(-1, 1, 256 + 1)[:-1]) - 1)
    assert bins(np.float32([-1.5, -1, 0, 1, 1.5])).tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_refused(bad):
    with pytest.raises(DrivetrainError, match="not finite: dimension 1"):
        processor().sample(step(state=np.float32([0, bad, 0])), id=0, epoch=0, seed=0)


def test_prompt_without_state():
    made = processor(state_in_prompt=False)
    sample = made.sample(step(), id=0, epoch=0, seed=0)
    assert text(sample.tokens, 32) == "lift the cup\n"
    assert made.token_count(2, "lift the cup") == len(sample.tokens)


TASKS = ["", "go", " ".join(["lift"] * 60), " ".join(["lift"] * 400), "a" * 5000, "グラスを持ち上げる " * 40]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("state_in_prompt", [True, False])
def test_only_the_task_is_shortened(task, state_in_prompt):
    """State and answer marker are whole, and the planned length is never exceeded."""
    made = processor(state_in_prompt=state_in_prompt)
    for state in ([0, 0, 5], [0.9, 9, 5.9], [-1, 5, 5.5]):
        sample = made.sample(step(task=task, state=np.float32(state)), id=0, epoch=0, seed=0)
        assert len(sample.tokens) <= made.token_count(2, task) <= 32 + 224
        said = bytes(sample.tokens[33:].astype(np.uint8)).decode(errors="replace")
        if state_in_prompt:
            normal = made.states["cups"].normalise(np.float32(state), 3)
            assert said.endswith(f", State: {' '.join(map(str, bins(normal)))};\nAction: ")
            said = said.removeprefix("Task: ").split(", State: ")[0]
        assert task.strip().startswith(said.rstrip("\n"))
        assert made.prompt.is_cut(task, 3) == (len(said.rstrip("\n")) < len(task.strip()))


def test_planned_length_is_reached_by_the_widest_state():
    made = processor()
    sample = made.sample(step(state=np.float32([0.9, 9, 5.9])), id=0, epoch=0, seed=0)
    assert made.token_count(2, "lift the cup") == len(sample.tokens)
    narrow = made.sample(step(state=np.float32([-1, 0, 5])), id=1, epoch=0, seed=0)
    assert len(narrow.tokens) == len(sample.tokens) - 6
    shape = PackShape(tokens=2 * len(sample.tokens), samples=2, images=4)
    assert int(pack([narrow, sample], shape).cu_tokens.diff()[-1]) == 6, "the difference goes to the tail"


def test_planned_length_follows_the_widest_robot_with_so_many_cameras():
    arms = {"cups": dataset(), "plates": dataset("plates", dims=8), "one": dataset("one", ("top",), 2)}
    made = Pi05Processor(micro(), arms)
    assert made.token_count(2, "go") == Pi05Processor(micro(), {"plates": arms["plates"]}).token_count(2, "go")
    assert made.token_count(1, "go") == Pi05Processor(micro(), {"one": arms["one"]}).token_count(1, "go")


def test_a_state_too_long_for_the_prompt_is_an_error():
    config = micro()
    short = dataclasses.replace(config, gemma=dataclasses.replace(config.gemma, text_tokens=30))
    with pytest.raises(DrivetrainError, match="text-tokens"):
        Pi05Processor(short, {"cups": dataset()}).token_count(2, "go")


def test_a_tokenizer_of_the_users_own_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the package `tokenizers` is optional")
    characters = {c: i + 3 for i, c in enumerate("0123456789 ,:;\nTaskStecAionlfhup")}
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **characters, "?": 60}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    config = micro()
    gemma = dataclasses.replace(config.gemma, tokenizer=str(tmp_path), begin_token=2, image_token=0)
    prompt = Prompt(dataclasses.replace(config, gemma=gemma))
    tokens, places = prompt.tokens(1, "lift the cup", np.float32([0.5, -1]))
    assert tokens[:17].tolist() == [0] * 16 + [2] and places.tolist() == list(range(16))
    assert tokens[17:].tolist() == made.encode("Task: lift the cup, State: 192 0;\nAction: ").ids
    assert prompt.bound(1, "lift the cup", 2) == len(tokens) + 2


def test_physical_actions_are_the_exact_inverse():
    made = processor()
    physical = np.random.default_rng(0).uniform([-3, -1, 0.4, 0], [3, 5, 0.6, 2], (10, 4)).astype(np.float32)
    sample = made.sample(step(actions=physical), id=0, epoch=0, seed=0)
    assert np.allclose(made.physical_actions(sample.actions, dataset="cups"), physical, rtol=1e-6, atol=1e-6)
    assert np.abs(sample.actions).max() > 1, "values beyond the quantiles are not cut"


@pytest.mark.parametrize("name", ["q01", "q99"])
@pytest.mark.parametrize("values", [np.zeros(0), np.full(4, np.nan)])
def test_missing_quantiles_are_named(name, values):
    info = dataset()
    lacking = dataclasses.replace(info.statistics["action"], **{name: values})
    info = dataclasses.replace(info, statistics={**info.statistics, "action": lacking})
    with pytest.raises(DrivetrainError, match=f"'cups': the statistics of 'action' lack {name}"):
        Pi05Processor(micro(), {"cups": info})


def test_observation_gives_the_same_inputs_as_the_stored_step():
    made = processor()
    stored = made.sample(step(), id=0, epoch=0, seed=0)
    images = {"wrist": np.full((32, 32, 3), 200, np.uint8), "top": np.full((32, 32, 3), 10, np.uint8)}
    live = made.observe(Observation(images, np.float32([0.5, 10, 5]), "lift the cup"), dataset="cups", seed=0)
    for name in ("tokens", "image_tokens", "images", "state", "action_mask"):
        assert np.array_equal(getattr(stored, name), getattr(live, name)), name
    assert not live.actions.any()
    with pytest.raises(DrivetrainError, match="lacks wrist"):
        made.observe(Observation({"top": images["top"]}, np.zeros(3, np.float32), ""), dataset="cups", seed=0)


def test_bad_steps_are_named():
    made = processor()
    with pytest.raises(DrivetrainError, match="cups episode 0 frame 3: an image of"):
        made.sample(step(images=(png(0), png(0, 40))), id=0, epoch=0, seed=0)
    with pytest.raises(DrivetrainError, match="1 images, 2 cameras"):
        made.sample(step(images=(png(0),)), id=0, epoch=0, seed=0)
    with pytest.raises(DrivetrainError, match="horizon is 10"):
        made.sample(step(actions=np.zeros((9, 4), np.float32)), id=0, epoch=0, seed=0)


def test_noise_depends_on_seed_epoch_sample_and_draw_alone():
    made, again = processor(draws=3), pickle.loads(pickle.dumps(processor(draws=1)))
    first = made.sample(step(), id=5, epoch=2, seed=9)
    same = again.sample(step(state=np.float32([0, 0, 5])), id=5, epoch=2, seed=9)
    assert np.array_equal(first.noise[:1], same.noise) and np.array_equal(first.time[:1], same.time)
    others = [{"id": 6, "epoch": 2, "seed": 9}, {"id": 5, "epoch": 3, "seed": 9}, {"id": 5, "epoch": 2, "seed": 8}]
    drawn = [*first.noise, *(made.sample(step(), **o).noise[0] for o in others)]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.4


def test_flow_times_follow_the_published_distribution():
    times = np.array([pi05_time(stream(0, 0, i)) for i in range(4000)])
    assert times.min() >= 0.001 and times.max() <= 1 and times.dtype == np.float32
    # u ~ Beta(1.5, 1) has P(u < x) = x^1.5
    at = np.linspace(0.001, 1, 11)
    assert np.allclose([(times < t).mean() for t in at], ((at - 0.001) / 0.999) ** 1.5, atol=0.03)


# --- runs of either policy as JSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_of_any_recipe_survives_json(name):
    run = RECIPES[name]()
    assert run.recipe == name and from_json(Run, to_json(run)) == run
    assert to_json(from_json(Run, to_json(run))) == to_json(run)


def test_policies_tell_each_other_apart_in_json():
    for config in (tiny(), groot_tiny(), Pi05Config(), GrootConfig(horizon=50)):
        assert policy_from_json(to_json(config)) == config
    with pytest.raises(DrivetrainError, match="kind 'pi9', which is none of groot, pi05"):
        policy_from_json(to_json(tiny()).replace('"pi05"', '"pi9"'))
    with pytest.raises(DrivetrainError, match="kind None"):
        policy_from_json('{"horizon": 3}')
    with pytest.raises(DrivetrainError, match="no field 'embodiments'"):
        policy_from_json(to_json(groot_tiny()).replace('"groot"', '"pi05"'))


def test_recipes_say_what_is_published():
    full, tiny_twin = RECIPES["pi05_finetune"](), RECIPES["pi05_libero_tiny"]()
    optimizer = full.optimizer
    assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup_steps) == (2.5e-5, 2.5e-6, 1000)
    assert optimizer.betas == (0.9, 0.95) and optimizer.clip_norm == 1.0 and full.steps == 30_000
    assert isinstance(tiny_twin.policy, Pi05Config) and tiny_twin.policy.horizon == 10
    assert tiny_twin.policy.loss_over == "all" and not tiny_twin.policy.state_in_prompt
