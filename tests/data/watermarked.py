"""The watermarked data sets of this room's tests."""

from fixtures import Tiny

ONE = Tiny(lengths=(12, 20, 16), sizes={"observation.images.front": (64, 64)})
TWO = Tiny(lengths=(18, 9, 11))
