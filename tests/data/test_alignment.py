"""From the lake to packs: every image, state and action chunk belongs to the sample it is packed with."""

import numpy as np
import pytest
from fixtures import action_rows, read_full_watermark, state_rows
from watermarked import ONE, TWO

from drivetrain.data.loader import PlannedSteps, load
from drivetrain.lake.lake import open_lake
from drivetrain.policies import make_processor
from drivetrain.policies.groot.config import tiny
from drivetrain.recipes.groot import groot_finetune_tiny
from drivetrain.train.main import plan_of
from drivetrain.types import DrivetrainError

HORIZON = groot_finetune_tiny().policy.horizon
FIXTURES = {"one": ONE, "two": TWO}


def planned(lake_folder, rank: int = 0, world: int = 1) -> PlannedSteps:
    run, lake = groot_finetune_tiny(), open_lake(str(lake_folder))
    processor = make_processor(run.policy, lake.datasets)
    return PlannedSteps(lake.uri, lake.version, plan_of(run, lake, processor), processor, HORIZON, rank, world)


def samples_of(steps: PlannedSteps, count: int):
    """(pack, slot, data set, episode, frame, images) of every real sample of `count` steps."""
    plan = steps.plan
    for k in range(count):
        for pack in steps[k].packs:
            first_image = 0
            for slot in np.flatnonzero(pack.weight.numpy() > 0):
                span = int(np.searchsorted(plan.offsets, int(pack.sample[slot]), side="right")) - 1
                frame = int(pack.sample[slot]) - int(plan.offsets[span])
                name = plan.spans.datasets[plan.spans.dataset[span]]
                cameras = int(plan.images[span])
                images = pack.images[first_image : first_image + cameras].numpy()
                first_image += cameras
                yield pack, slot, name, int(plan.spans.episode[span]), frame, images


def test_every_sample_is_whole(watermarked_lake):
    steps = planned(watermarked_lake)
    seen = set()
    for pack, slot, name, episode, frame, images in samples_of(steps, 12):
        seen.add((name, episode, frame))
        fixture, processor = FIXTURES[name], steps.processor
        for camera, image in enumerate(images):
            size = list(fixture.sizes.values())[camera]
            assert read_full_watermark(image, size) == (episode, frame, camera)
        state = processor.states[name].restore(pack.state[slot].numpy())
        np.testing.assert_allclose(state, state_rows(fixture, episode)[frame], atol=1e-3)
        rows = action_rows(fixture, episode)
        chunk = rows[np.minimum(np.arange(frame, frame + HORIZON), len(rows) - 1)]
        actions = processor.physical_actions(pack.actions[slot].numpy(), dataset=name)
        np.testing.assert_allclose(actions, chunk, atol=1e-3)
    assert len(seen) > 60  # of 86 steps: some are drawn twice across the epoch's end


def test_ranks_share_a_step_without_overlap(watermarked_lake):
    alone = planned(watermarked_lake)
    ranks = [planned(watermarked_lake, rank, 2) for rank in range(2)]
    for k in range(3):
        expected = [p.sample.tolist() for p in alone[k].packs]
        assert [r[k].packs[0].sample.tolist() for r in ranks] == expected


def test_more_ranks_than_packs_are_refused(watermarked_lake):
    with pytest.raises(DrivetrainError, match=r"--batch\.packs"):
        planned(watermarked_lake, 0, 4)


def test_workers_and_thread_give_the_same_packs(watermarked_lake):
    steps = planned(watermarked_lake)
    threaded = list(load(steps, 1, 4, workers=0, pin_memory=False))
    spawned = list(load(steps, 1, 4, workers=2, pin_memory=False))
    assert [s.step for s in threaded] == [s.step for s in spawned] == [1, 2, 3]
    for a, b in zip(threaded, spawned, strict=True):
        for x, y in zip(a.packs, b.packs, strict=True):
            assert (x.images == y.images).all() and (x.noise == y.noise).all() and (x.sample == y.sample).all()


def test_a_fault_in_the_loader_reaches_the_training_thread(watermarked_lake):
    steps = planned(watermarked_lake)
    steps.horizon = tiny().horizon + 1
    with pytest.raises(DrivetrainError, match="horizon"):
        list(load(steps, 0, 2, workers=0, pin_memory=False))
