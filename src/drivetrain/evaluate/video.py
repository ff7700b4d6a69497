"""Videos that any browser plays: H.264, yuv420p, MP4 with its index in front."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

VIDEO_FPS = 30
"""Pictures per second of playback. Simulators step faster (Meta-World at 80), so an episode is seen in slow motion."""

HOLD_PICTURES = 15
"""The last picture stays for half a second, so that how an episode ended can be seen."""


def write_video(path: Path, pictures: Iterable[np.ndarray]) -> None:
    """Write uint8 [height, width, 3] pictures, at least one and of even size, as an MP4 file."""
    import av

    options = {"crf": "26", "preset": "veryfast"}
    frame, count = None, 0
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=VIDEO_FPS, options=options)
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            if frame is None:
                stream.height, stream.width = picture.shape[:2]
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = count
            count += 1
            container.mux(stream.encode(frame))
        assert frame is not None, "a video needs a picture"
        for _ in range(HOLD_PICTURES):
            frame.pts = count
            count += 1
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
