"""GR00T's data side: decoding, normalising, prompts, noise, and the way back to physical actions."""

from __future__ import annotations

import dataclasses
import io
import pickle

import numpy as np
import pytest
from groot_samples import micro
from PIL import Image

from drivetrain.data.draws import groot_time, stream
from drivetrain.data.normalise import scaler
from drivetrain.policies.groot.processor import GrootProcessor
from drivetrain.run import from_json, to_json
from drivetrain.types import DatasetInfo, DrivetrainError, FeatureStatistics, Observation, Step


def statistics(low: list[float], high: list[float]) -> FeatureStatistics:
    low_, high_ = np.array(low), np.array(high)
    middle = (low_ + high_) / 2
    inner = {
        "q01": low_ * 0.9 + high_ * 0.1,
        "q10": middle,
        "q50": middle,
        "q90": middle,
        "q99": low_ * 0.1 + high_ * 0.9,
    }
    return FeatureStatistics(count=10, mean=middle, std=high_ - low_, min=low_, max=high_, **inner)


def dataset(name: str = "cups", cameras: tuple[str, ...] = ("top", "wrist"), size: int = 32) -> DatasetInfo:
    return DatasetInfo(
        name=name,
        source="made by a test",
        robot="arm",
        fps=30,
        cameras=cameras,
        image_size=size,
        state_names=("a", "b", "c"),
        action_names=("a", "b", "c", "d"),
        episodes=1,
        steps=10,
        statistics={
            "observation.state": statistics([-1, 0, 5], [1, 10, 5]),
            "action": statistics([-2, 0, 0.5, 0.9995], [2, 4, 0.5, 1.0005]),
        },
    )


def png(value: int, size: int = 32) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def step(**changes) -> Step:
    actions = np.tile(np.float32([1, 3, 0.5, 1.0]), (5, 1))
    made = Step(
        dataset="cups",
        episode=0,
        frame=3,
        task="lift the cup",
        images=(png(10), png(200)),
        state=np.float32([0.5, 10, 5]),
        actions=actions,
        valid=np.ones(5, bool),
    )
    return dataclasses.replace(made, **changes)


def processor(draws: int = 2, **changes) -> GrootProcessor:
    return GrootProcessor(micro(embodiments={"cups": 2}, **changes), {"cups": dataset()}, draws)


def test_sample_is_normalised_padded_and_masked():
    sample = processor().sample(step(), id=7, epoch=1, seed=0)
    assert np.allclose(sample.state[:3], [0.5, 1, 0]) and not sample.state[3:].any()
    assert np.allclose(sample.actions[:, :4], [0.5, 0.5, 0, 0]) and not sample.actions[:, 4:].any()
    assert sample.action_mask[:, :4].all() and not sample.action_mask[:, 4:].any()
    assert sample.noise.shape == (2, 5, 32) and sample.time.shape == (2,) and sample.embodiment == 2
    assert [int(i.mean()) for i in sample.images] == [10, 200]
    assert (sample.tokens[sample.image_tokens] == 256).all() and (sample.tokens == 256).sum() == 2 * 16
    assert bytes(sample.tokens[32:-1].astype(np.uint8)) == b"lift the cup"


@pytest.mark.parametrize("task", ["", "lift", "a" * 5000, "グラスを持ち上げる " * 40])
@pytest.mark.parametrize("cameras", [0, 1, 3])
def test_token_count_is_known_without_reading(task, cameras):
    names = ("top", "wrist", "left")[:cameras]
    made = GrootProcessor(micro(), {"cups": dataset(cameras=names)})
    sample = made.sample(step(task=task, images=(png(0),) * cameras), id=0, epoch=0, seed=0)
    assert made.token_count(cameras, task) == len(sample.tokens)
    assert len(sample.image_tokens) == cameras * 16
    assert sample.tokens[-1] == 257, "the end of the prompt is never cut"
    assert made.prompt.is_cut(task) == (len(task.strip().encode()) > 96)


def test_physical_actions_are_the_exact_inverse():
    made = processor()
    rng = np.random.default_rng(0)
    physical = rng.uniform([-3, -1, 0.4, 0], [3, 5, 0.6, 2], (5, 4)).astype(np.float32)
    sample = made.sample(step(actions=physical), id=0, epoch=0, seed=0)
    assert np.allclose(made.physical_actions(sample.actions, dataset="cups"), physical, rtol=1e-6, atol=1e-6)


def test_constant_dimensions_stay_in_range_in_training_and_inference():
    """A dimension that is always 0.5, and one that moves by 0.001 about 1: neither explodes when the robot strays."""
    made = scaler(dataset(), "action", 32)
    assert made.constant.tolist() == [False, False, True, True]
    assert np.abs(made.normalise(np.float32([[0, 0, 0.6, 0.0]]), 32)).max() <= 1.0
    assert np.allclose(made.restore(np.zeros((1, 32), np.float32))[0, 2:], [0.5, 1.0])
    assert made.restore(made.normalise(np.float32([[2, 4, 0.5, 1]]), 32)).tolist() == [[2, 4, 0.5, 1]]


def test_quantile_ranges_do_not_cut():
    made = scaler(dataset(), "action", 32, "quantiles")
    assert made.normalise(np.float32([[2, 4, 0.5, 1]]), 32)[0, 0] == pytest.approx(1.25)


def test_missing_or_wrong_statistics_are_errors():
    info = dataset()
    without = dataclasses.replace(info, statistics={"setA.action": info.statistics["action"]})
    with pytest.raises(DrivetrainError, match="no statistics of 'observation\\.state'"):
        GrootProcessor(micro(), {"cups": without})
    short = dataclasses.replace(info, action_names=("a", "b"))
    with pytest.raises(DrivetrainError, match="2 dimensions"):
        GrootProcessor(micro(), {"cups": short})
    nan = dataclasses.replace(
        info, statistics={**info.statistics, "action": statistics([0, 0, np.nan, 0], [1, 1, 1, 1])}
    )
    with pytest.raises(DrivetrainError, match=r"\[2\] \(c\)"):
        GrootProcessor(micro(), {"cups": nan})
    with pytest.raises(DrivetrainError, match="takes 2"):
        GrootProcessor(micro(action_width=2), {"cups": info})
    with pytest.raises(DrivetrainError, match="not given the data set 'plates'"):
        processor().physical_actions(np.zeros((5, 32), np.float32), dataset="plates")


def test_bad_steps_are_named():
    made = processor()
    with pytest.raises(DrivetrainError, match="cups episode 0 frame 3: an image of"):
        made.sample(step(images=(png(0), png(0, 40))), id=0, epoch=0, seed=0)
    with pytest.raises(DrivetrainError, match="1 images, 2 cameras"):
        made.sample(step(images=(png(0),)), id=0, epoch=0, seed=0)
    with pytest.raises(DrivetrainError, match="not finite: dimension 1"):
        made.sample(step(state=np.float32([0, np.nan, 0])), id=0, epoch=0, seed=0)


def test_observation_gives_the_same_inputs_as_the_stored_step():
    made = processor()
    stored = made.sample(step(), id=0, epoch=0, seed=0)
    images = {"wrist": np.full((32, 32, 3), 200, np.uint8), "top": np.full((32, 32, 3), 10, np.uint8)}
    live = made.observe(Observation(images, np.float32([0.5, 10, 5]), "lift the cup"), dataset="cups", seed=0)
    for name in ("tokens", "image_tokens", "images", "state", "action_mask"):
        assert np.array_equal(getattr(stored, name), getattr(live, name)), name
    assert not live.actions.any()
    wide = {camera: np.full((48, 96, 3), 99, np.uint8) for camera in images}
    seen = made.observe(Observation(wide, np.float32([0, 0, 0]), ""), dataset="cups", seed=0).images
    assert seen.shape == (2, 32, 32, 3) and (seen[:, 8:24] == 99).all() and not seen[:, :7].any()
    with pytest.raises(DrivetrainError, match="lacks wrist"):
        made.observe(Observation({"top": images["top"]}, np.zeros(3, np.float32), ""), dataset="cups", seed=0)
    with pytest.raises(DrivetrainError, match="no camera front"):
        made.observe(
            Observation({**images, "front": images["top"]}, np.zeros(3, np.float32), ""), dataset="cups", seed=0
        )


def test_images_are_resized_to_the_policy():
    made = GrootProcessor(micro(), {"cups": dataset(size=48)})
    assert made.sample(step(images=(png(7, 48), png(9, 48))), id=0, epoch=0, seed=0).images.shape == (2, 32, 32, 3)


def test_noise_depends_on_seed_epoch_sample_and_draw_alone():
    made, again = processor(draws=3), pickle.loads(pickle.dumps(processor(draws=1)))
    first = made.sample(step(), id=5, epoch=2, seed=9)
    same = again.sample(step(state=np.float32([0, 0, 0])), id=5, epoch=2, seed=9)
    assert np.array_equal(first.noise[:1], same.noise) and np.array_equal(first.time[:1], same.time)
    others = [{"id": 6, "epoch": 2, "seed": 9}, {"id": 5, "epoch": 3, "seed": 9}, {"id": 5, "epoch": 2, "seed": 8}]
    drawn = [first.noise[0], first.noise[1], first.noise[2], *(made.sample(step(), **o).noise[0] for o in others)]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.4


def test_flow_times_follow_the_published_distribution():
    times = np.array([groot_time(stream(0, 0, i)) for i in range(4000)])
    assert times.min() > -0.0011 and times.max() <= 1 and times.dtype == np.float32
    # u ~ Beta(1.5, 1) has P(u < x) = x^1.5
    expected = 1 - (0.999 * (1 - np.linspace(0, 1, 11))) ** 1.5
    assert np.allclose([(times < t).mean() for t in np.linspace(0, 1, 11)], expected, atol=0.03)


def test_state_survives_json():
    made = processor()
    again = GrootProcessor(made.config, from_json(dict[str, DatasetInfo], to_json(made.datasets)), made.draws)
    one, other = (p.sample(step(), id=1, epoch=0, seed=0) for p in (made, again))
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name
    assert again.datasets["cups"].cameras == ("top", "wrist")


def test_published_template(tmp_path):
    """With a word-level tokenizer the prompt reads as the published one; only the instruction is cut."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package `tokenizers` is optional")
    special = ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
    words = [
        "system",
        "user",
        "assistant",
        "You",
        "are",
        "a",
        "helpful",
        ".",
        "<",
        "image",
        "1",
        "2",
        ">",
        "lift",
        "cup",
    ]
    vocabulary = {w: i for i, w in enumerate(["?", *special, *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    made.save(str(tmp_path / "tokenizer.json"))
    config = micro()
    language = dataclasses.replace(config.language, tokenizer=str(tmp_path), image_token=5, task_tokens=3)
    made_processor = GrootProcessor(dataclasses.replace(config, language=language), {"cups": dataset()})
    sample = made_processor.sample(step(task="lift cup lift cup"), id=0, epoch=0, seed=0)
    whole = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        + "".join(f"<image {i}><img>{'<IMG_CONTEXT>' * 16}</img>" for i in (1, 2))
        + "lift cup lift<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sample.tokens.tolist() == made.encode(whole).ids
    assert made_processor.token_count(2, "lift cup lift cup") == len(sample.tokens)
