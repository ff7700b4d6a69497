"""LeRobot data sets on disk: v2.0, v2.1 and v3.0 folders read into one plain description.

Only metadata is read here. `rows.py` reads the numbers of an episode, `frames.py` its images.
The layouts are those of LeRobot 0.6.1 (v3.0) and 0.3.x (v2.0, v2.1).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.lake.findings import Finding
from drivetrain.lake.folder import Folder, folder_of
from drivetrain.lake.metafiles import fill, integer, json_objects, read_json, read_parquet, read_schema
from drivetrain.types import DrivetrainError

STATE, ACTION = "observation.state", "action"
IMAGE_PREFIX = "observation.images."
MAX_FPS = 1000.0
MAX_DRIFT_FRAMES = 1.5  # by which the offsets of a file may be off before they mean something else
VERSIONS = ("v2.0", "v2.1", "v3.0")


@dataclass(frozen=True)
class Camera:
    """One RGB camera. `name`: the key without `observation.images.`; `video`: False for stills in Parquet."""

    name: str
    key: str
    height: int
    width: int
    video: bool


@dataclass(frozen=True)
class VideoRange:
    """Where an episode's frames are in a video file.

    start: seconds on the file's clock, as the metadata say.
    frame: how many frames the file's earlier episodes have; exact where the file holds nothing but listed episodes.
    total: how many frames all listed episodes of the file have.
    shared_with: another episode that claims some of the same frames; -1 if none does.
    """

    file: str
    start: float
    frame: int
    total: int
    shared_with: int = -1


@dataclass(frozen=True)
class EpisodeSource:
    """One episode as the metadata describe it. `videos`: camera name -> range; empty for images in Parquet."""

    index: int
    length: int
    tasks: tuple[str, ...]
    data_file: str
    videos: dict[str, VideoRange]


@dataclass(frozen=True)
class Source:
    """A LeRobot data set without its rows. `findings` are about the data set as a whole."""

    folder: Folder
    name: str
    version: str
    robot: str
    fps: float
    cameras: tuple[Camera, ...]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    tasks: dict[int, str]
    episodes: tuple[EpisodeSource, ...]
    findings: tuple[Finding, ...] = ()


def read_source(uri: str, name: str | None = None) -> Source:
    """The description of the LeRobot data set at `uri`; `name` is its name in the lake, the folder's own by default.

    Raises DrivetrainError where there is no data set, or its metadata cannot be trusted as a whole.
    """
    folder = folder_of(uri)
    try:
        there = folder.exists("meta/info.json")
    except Exception as error:  # every kind of storage has errors of its own
        raise DrivetrainError(f"{folder.uri} cannot be read: {error}. Check the address and your access.") from None
    if not there:
        raise DrivetrainError(_not_a_data_set(folder, uri))
    info = read_json(folder, "meta/info.json")
    if not isinstance(info, dict) or not isinstance(info.get("features"), dict):
        raise DrivetrainError(f'{folder.path("meta/info.json")} holds no "features". Give a LeRobot data set.')
    version = _version(folder, info)
    features = info["features"]
    cameras, notices = _cameras(folder, features)
    source = Source(
        folder=folder,
        name=name or folder.name,
        version=version,
        robot=str(info.get("robot_type") or "unknown"),
        fps=_fps(folder, info),
        cameras=cameras,
        state_names=_dimension_names(folder, features, STATE),
        action_names=_dimension_names(folder, features, ACTION),
        tasks=_tasks_v3(folder) if version == "v3.0" else _tasks_v2(folder),
        episodes=(),
        findings=notices,
    )
    if version == "v3.0":
        episodes = _count_frames(list(_episodes_v3(source, info)), source.fps)
    else:
        episodes = list(_episodes_v2(source, info))
    episodes.sort(key=lambda e: e.index)
    for before, after in itertools.pairwise(episodes):
        if before.index == after.index:
            raise DrivetrainError(
                f"{folder.uri}: the metadata list episode {after.index} twice. Remove one of the two."
            )
    if not episodes:
        raise DrivetrainError(f"{folder.uri} holds no episode. Record some, or give another folder.")
    return replace(source, episodes=tuple(episodes), findings=(*notices, *_counts(source, info, episodes)))


def camera_name(key: str) -> str:
    """`observation.images.top` -> `top`; a key of another form is its own name."""
    return key.removeprefix(IMAGE_PREFIX)


def camera_key(name: str) -> str:
    """The feature key that `camera_name` shortened."""
    return name if name.startswith("observation.") else IMAGE_PREFIX + name


# --- what kind of data set


def _not_a_data_set(folder: Folder, typed: str) -> str:
    if folder.local and not folder.fs.exists(folder.uri):
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", typed):
            hint = f" For the data set of that name on the Hugging Face Hub give hf://datasets/{typed}."
        return f"{folder.uri} does not exist. Give the folder of a LeRobot data set.{hint}"
    return (
        f"{folder.uri} is not a LeRobot data set: it has no meta/info.json. "
        "Give the folder that holds meta/, data/ and videos/."
    )


def _version(folder: Folder, info: Mapping[str, Any]) -> str:
    """The version on which layout and version field agree."""
    said = str(info.get("codebase_version", ""))
    said = said if said.startswith("v") else f"v{said}"
    old = folder.exists("meta/episodes.jsonl")
    new = bool(folder.glob("meta/episodes/**/*.parquet")) or folder.exists("meta/tasks.parquet")
    if old and new:
        raise DrivetrainError(
            f"{folder.uri} holds two layouts, meta/episodes.jsonl (v2) and meta/episodes/*.parquet (v3.0), and "
            f"info.json says {said}. Remove the files of the layout that is out of date."
        )
    if not old and not new:
        raise DrivetrainError(
            f"{folder.uri} has no list of episodes, neither meta/episodes.jsonl (v2) nor meta/episodes/ (v3.0). "
            "Copy the whole meta folder; if recording was cut off, finish it with LeRobot's finalize()."
        )
    if said not in VERSIONS:
        raise DrivetrainError(
            f'{folder.uri}: info.json says codebase_version "{said}"; {", ".join(VERSIONS)} can be read. '
            "Convert it with LeRobot's scripts (lerobot.scripts.convert_dataset_v21_to_v30 and its forerunners)."
        )
    layout = "v3.0" if new else "v2.0 or v2.1"
    if said not in layout:
        right = "v3.0" if new else "v2.1"
        raise DrivetrainError(
            f"{folder.uri}: info.json says {said}, but the files are laid out as {layout}. "
            f'If the files are right, set "codebase_version": "{right}" in meta/info.json.'
        )
    return said


def _fps(folder: Folder, info: Mapping[str, Any]) -> float:
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not math.isfinite(fps) or not 0 < fps <= MAX_FPS:
        raise DrivetrainError(
            f"{folder.path('meta/info.json')}: fps is {fps!r}; it must be a number above 0 and up to {MAX_FPS:.0f}. "
            'Set "fps" to the rate of the recording.'
        )
    return float(fps)


def _cameras(folder: Folder, features: Mapping[str, Any]) -> tuple[tuple[Camera, ...], tuple[Finding, ...]]:
    """RGB cameras in the order of the features; depth maps are left out with a notice."""
    cameras, notices = [], []
    for key, feature in features.items():
        if feature.get("dtype") not in ("video", "image"):
            continue
        details = {**(feature.get("info") or {}), **(feature.get("video_info") or {})}
        height, width, channels = _image_shape(folder, key, feature)
        if details.get("video.is_depth_map") or details.get("is_depth_map") or channels != 3:
            found = f"the camera {key} is a depth map" if channels == 3 else f"the camera {key} has {channels} channels"
            remedy = "Only RGB images are taken into the lake; the rest of the data set is."
            notices.append(Finding(folder.uri, -1, -1, "camera-kind", "meta/info.json", found, remedy, "notice"))
            continue
        cameras.append(Camera(camera_name(key), key, height, width, feature["dtype"] == "video"))
    return tuple(cameras), tuple(notices)


def _image_shape(folder: Folder, key: str, feature: Mapping[str, Any]) -> tuple[int, int, int]:
    """(height, width, channels). The order of `shape` is told by `names`, or by where the 1, 3 or 4 stands."""
    shape = feature.get("shape")
    if not isinstance(shape, list | tuple) or len(shape) != 3 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise DrivetrainError(
            f"{folder.path('meta/info.json')}: the camera {key} has shape {shape!r}. Set it to [height, width, 3]."
        )
    names = feature.get("names")
    first = isinstance(names, list | tuple) and bool(names) and names[0] in ("channel", "channels")
    if first or (shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)):
        return shape[1], shape[2], shape[0]
    return shape[0], shape[1], shape[2]


def _dimension_names(folder: Folder, features: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """One name per dimension; names that are null, nested or of the wrong number become `key[i]`."""
    if key not in features:
        raise DrivetrainError(
            f"{folder.uri} has no feature {key!r}; it has {', '.join(features)}. "
            f"Rename the column that holds it to {key!r} in the data and in meta/info.json."
        )
    shape = features[key].get("shape")
    if not isinstance(shape, list | tuple) or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 1:
        raise DrivetrainError(f"{folder.path('meta/info.json')}: {key} has shape {shape!r}. Set it to [dimensions].")
    names = _flat(features[key].get("names"))
    if len(names) != shape[0] or len(set(names)) != len(names):
        short = "state" if key == STATE else "action"
        return tuple(f"{short}[{i}]" for i in range(shape[0]))
    return tuple(names)


def _flat(names: Any) -> list[str]:
    if isinstance(names, str):
        return [names]
    if isinstance(names, dict):
        if all(isinstance(v, int) for v in names.values()):
            return sorted(names, key=names.__getitem__)
        return [leaf for value in names.values() for leaf in _flat(value)]
    if isinstance(names, list | tuple):
        return [leaf for value in names for leaf in _flat(value)]
    return []


# --- v2.0 and v2.1: one Parquet file, and one video per camera, for each episode


def _tasks_v2(folder: Folder) -> dict[int, str]:
    return _task_table(folder, "meta/tasks.jsonl", json_objects(folder, "meta/tasks.jsonl"))


def _episodes_v2(source: Source, info: Mapping[str, Any]) -> Iterable[EpisodeSource]:
    file = "meta/episodes.jsonl"
    data_path = info.get("data_path") or "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video_path = (
        info.get("video_path") or "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    )
    chunk_size = int(info.get("chunks_size") or 1000)
    for number, row in enumerate(json_objects(source.folder, file), start=1):
        index = integer(source.folder, file, row, "episode_index", number)
        place = {"episode_chunk": index // chunk_size, "episode_index": index}
        yield EpisodeSource(
            index=index,
            length=integer(source.folder, file, row, "length", number),
            tasks=tuple(str(t) for t in row.get("tasks") or ()),
            data_file=_safe(source.folder, fill(source.folder, data_path, place)),
            videos={
                camera.name: VideoRange(
                    file=_safe(source.folder, fill(source.folder, video_path, {**place, "video_key": camera.key})),
                    start=0.0,
                    frame=0,
                    total=row["length"],
                )
                for camera in source.cameras
                if camera.video
            },
        )


# --- v3.0: many episodes per file


def _tasks_v3(folder: Folder) -> dict[int, str]:
    file = "meta/tasks.parquet"
    rows = read_parquet(folder, file)
    text = next((c for c in ("task", "__index_level_0__") if c in rows.column_names), None)
    if text is None or "task_index" not in rows.column_names:
        raise DrivetrainError(f"{folder.path(file)} has no columns task and task_index. Write it again with LeRobot.")
    return _task_table(
        folder, file, rows.select(["task_index", text]).rename_columns(["task_index", "task"]).to_pylist()
    )


def _episodes_v3(source: Source, info: Mapping[str, Any]) -> Iterable[EpisodeSource]:
    folder = source.folder
    data_path = info.get("data_path") or "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video_path = info.get("video_path") or "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    for file in folder.glob("meta/episodes/**/*.parquet"):
        columns = [c for c in read_schema(folder, file).names if not c.startswith("stats/")]
        rows = read_parquet(folder, file, columns)
        for number, row in enumerate(rows.to_pylist(), start=1):
            place = {k: integer(folder, file, row, f"data/{k}", number) for k in ("chunk_index", "file_index")}
            videos = {}
            for camera in source.cameras:
                if not camera.video:
                    continue
                prefix = f"videos/{camera.key}"
                at: dict[str, Any] = {
                    k: integer(folder, file, row, f"{prefix}/{k}", number) for k in ("chunk_index", "file_index")
                }
                start = row.get(f"{prefix}/from_timestamp")
                if not isinstance(start, float) or not math.isfinite(start) or start < 0:
                    raise DrivetrainError(f"{folder.path(file)}, row {number}: {prefix}/from_timestamp is {start!r}.")
                path = fill(folder, video_path, {**at, "video_key": camera.key})
                videos[camera.name] = VideoRange(_safe(folder, path), start, frame=0, total=0)
            yield EpisodeSource(
                index=integer(folder, file, row, "episode_index", number),
                length=integer(folder, file, row, "length", number),
                tasks=tuple(str(t) for t in row.get("tasks") or ()),
                data_file=_safe(folder, fill(folder, data_path, place)),
                videos=videos,
            )


def _count_frames(episodes: list[EpisodeSource], fps: float) -> list[EpisodeSource]:
    """Fill in `frame`, `total` and `shared_with`: time offsets summed as floats drift, counts do not."""
    files: dict[tuple[str, str], list[EpisodeSource]] = {}
    for episode in episodes:
        for camera, video in episode.videos.items():
            files.setdefault((camera, video.file), []).append(episode)
    for (camera, _), members in files.items():
        members.sort(key=lambda e: e.videos[camera].start)
        total, before = sum(e.length for e in members), 0
        for episode in members:
            episode.videos[camera] = replace(episode.videos[camera], frame=before, total=total)
            before += episode.length
        for a, b in itertools.pairwise(members):
            if (b.videos[camera].start - a.videos[camera].start) * fps < a.length - MAX_DRIFT_FRAMES:
                a.videos[camera] = replace(a.videos[camera], shared_with=b.index)
                b.videos[camera] = replace(b.videos[camera], shared_with=a.index)
    return episodes


def _task_table(folder: Folder, file: str, rows: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    tasks: dict[int, str] = {}
    for number, row in enumerate(rows, start=1):
        index, text = integer(folder, file, row, "task_index", number), row.get("task")
        if not isinstance(text, str):
            raise DrivetrainError(f"{folder.path(file)}, row {number}: task is {text!r}, not a text. Correct it.")
        tasks[index] = text
    return tasks


def _safe(folder: Folder, relative: str) -> str:
    folder.path(relative)
    return relative


def _counts(source: Source, info: Mapping[str, Any], episodes: list[EpisodeSource]) -> list[Finding]:
    """Totals of info.json that the list of episodes contradicts."""
    found = []
    for key, counted in (("total_episodes", len(episodes)), ("total_frames", sum(e.length for e in episodes))):
        said = info.get(key)
        if isinstance(said, int) and said != counted:
            text = f"info.json says {key} = {said}, the list of episodes has {counted}"
            remedy = (
                f"If the list is complete, set {key} to {counted}; if not, a recording was cut off: copy or finish it."
            )
            found.append(Finding(source.folder.uri, -1, -1, "totals", "meta/info.json", text, remedy))
    return found
