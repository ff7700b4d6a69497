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

    options = {"crf": "26", "preset": "veryfast", "movflags": "+faststart"}
    last = None
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = None
        for picture in pictures:
            if stream is None:
                stream = container.add_stream("libx264", rate=VIDEO_FPS, options=options)
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt = "yuv420p"
            last = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(last))
        assert stream is not None and last is not None, "a video needs a picture"
        for _ in range(HOLD_PICTURES):
            last.pts = None
            container.mux(stream.encode(last))
        container.mux(stream.encode())
