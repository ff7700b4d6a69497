"""The frames of one episode and camera, decoded in order and counted.

A frame is found by its number, never by the nearest time: frame k of an episode is the k-th frame from its start, and
the container's clock only has to agree to within half a frame. PyAV decodes: for whole episodes in order it is as fast
as torchcodec, and it takes a tenth of a second to import, where torchcodec brings torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import av
import av.container
import av.error
import numpy as np

from drivetrain.lake.findings import RefusedError
from drivetrain.lake.folder import missing_content
from drivetrain.lake.images import decode_image
from drivetrain.lake.rows import EpisodeRows, refuse
from drivetrain.lake.sources import MAX_DRIFT_FRAMES, Camera, EpisodeSource, Source


def episode_frames(source: Source, episode: EpisodeSource, camera: Camera, rows: EpisodeRows) -> Iterator[np.ndarray]:
    """One uint8 [height, width, 3] RGB image per row of the episode, in order.

    Raises RefusedError where the file cannot be decoded, has fewer or more frames, another size or another clock.
    """
    frames = _video(source, episode, camera) if camera.video else _stills(source, episode, camera, rows)
    for number, image in enumerate(frames):
        if image.shape != (camera.height, camera.width, 3):
            found = (
                f"{camera.key} is {image.shape[1]}x{image.shape[0]} pixels, "
                f"meta/info.json says {camera.width}x{camera.height}"
            )
            remedy = "Correct the shape in meta/info.json, or record the episode again."
            raise refuse(source, episode, "camera-size", found, remedy, number, _file(episode, camera))
        yield image


def _file(episode: EpisodeSource, camera: Camera) -> str:
    return episode.videos[camera.name].file if camera.video else episode.data_file


def _stills(source: Source, episode: EpisodeSource, camera: Camera, rows: EpisodeRows) -> Iterator[np.ndarray]:
    for number, data in enumerate(rows.images[camera.name]):
        try:
            yield decode_image(data)
        except (OSError, ValueError) as error:
            raise refuse(source, episode, "image", f"{camera.key}: {error}", "Record it again.", number) from None


def _video(source: Source, episode: EpisodeSource, camera: Camera) -> Iterator[np.ndarray]:
    file, other = episode.videos[camera.name].file, episode.videos[camera.name].shared_with
    if other >= 0:
        found = f"{camera.key}: the metadata give the same frames to this episode and to episode {other}"
        remedy = "Correct from_timestamp in meta/episodes; a merge of data sets may have written it wrongly."
        raise refuse(source, episode, "video-range", found, remedy, file=file)
    count = 0
    with _open(source, episode, file) as container:
        streams = container.streams.video
        if not streams:
            raise refuse(source, episode, "video", "the file has no video stream", "Encode it again.", file=file)
        stream = streams[0]
        stream.thread_type = "NONE"  # one core per task is what Ray was told; threads only fight over it
        first = _first_frame(source, episode, camera, stream.frames)
        start_time = float((stream.start_time or 0) * (stream.time_base or 0))
        if first > 0:
            seconds = start_time + (first - 0.5) / source.fps
            container.seek(int(seconds / float(stream.time_base or 1)), stream=stream)
        try:
            for frame in container.decode(stream):
                number = count if frame.time is None else round((frame.time - start_time) * source.fps) - first
                if number < 0:
                    continue
                if count == episode.length:
                    if episode.videos[camera.name].total == episode.length:
                        raise _wrong_count(source, episode, camera, "more than")
                    return
                if number != count:
                    raise _off_the_clock(source, episode, camera, count, number, stream.average_rate)
                yield frame.to_ndarray(format="rgb24")
                count += 1
        except av.error.FFmpegError as error:
            found = f"decoding stops after {count} of {episode.length} frames: {error}"
            raise refuse(source, episode, "video", found, "Copy or encode the file again.", count, file) from None
    if count < episode.length:
        raise _wrong_count(source, episode, camera, f"only {count} of")


def _first_frame(source: Source, episode: EpisodeSource, camera: Camera, frames_in_file: int) -> int:
    """The number, in its file, of the episode's first frame.

    A file that holds its listed episodes and nothing else is counted; then a drift of the offsets does not matter.
    """
    video = episode.videos[camera.name]
    by_time = video.start * source.fps
    if frames_in_file == video.total and abs(by_time - video.frame) < MAX_DRIFT_FRAMES:
        return video.frame
    return round(by_time)


@contextmanager
def _open(source: Source, episode: EpisodeSource, file: str) -> Iterator[av.container.InputContainer]:
    folder = source.folder
    if reason := missing_content(folder, file):
        raise refuse(source, episode, "video", reason, "Copy the file again.", file=file)
    data = None if folder.local else folder.open(file)
    try:
        container = av.open(folder.path(file) if data is None else data, mode="r")
    except (av.error.FFmpegError, OSError) as error:
        found = f"the file cannot be opened: {error}"
        raise refuse(source, episode, "video", found, "Copy or encode the file again.", file=file) from None
    try:
        yield container
    finally:
        container.close()
        if data is not None:
            data.close()


def _wrong_count(source: Source, episode: EpisodeSource, camera: Camera, amount: str) -> RefusedError:
    found = f"{camera.key} has {amount} {episode.length} frames, which the data have rows for"
    remedy = "Which row belongs to which frame is unknown: encode the video again, or record the episode again."
    return refuse(source, episode, "frame-count", found, remedy, file=episode.videos[camera.name].file)


def _off_the_clock(
    source: Source, episode: EpisodeSource, camera: Camera, count: int, number: int, rate
) -> RefusedError:
    found = f"{camera.key}: frame {count} stands at the time of frame {number}"
    found += f"; the video says {float(rate or 0):.3f} frames/s"
    remedy = f"Encode the video at {source.fps:g} frames/s, or correct fps in meta/info.json."
    return refuse(source, episode, "video-clock", found, remedy, count, episode.videos[camera.name].file)
