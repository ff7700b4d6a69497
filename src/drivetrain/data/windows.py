"""A shuffle that reads storage nearly in sequence: fragments in random order, samples shuffled within a few fragments.

A full shuffle makes every step a random read over the whole data set. Here an epoch visits the fragments of storage in
a keyed random order, `window` of them at a time, and permutes the samples of a window among each other. So at any
moment only `window` fragments are being read, and a node's cache needs to hold no more. Like the full permutation it
is evaluated by index, and it is a bijection of an epoch's samples.
"""

from __future__ import annotations

import numpy as np

from drivetrain.data.permutation import key, permute, unpermute


def permute_windows(index: np.ndarray, n: int, name: int, fragment: int, window: int) -> np.ndarray:
    """Where the windowed shuffle of range(n) named by the key `name` sends each index. int64 [m] -> int64 [m].

    fragment: samples per storage fragment.   window: fragments that are shuffled together.
    """
    fragments = -(-n // fragment)
    short = fragments * fragment - n  # the last fragment lacks so many samples
    order = key(name, 1)
    short_place = int(unpermute(np.array([fragments - 1]), fragments, order)[0])
    short_group = short_place // window
    whole = window * fragment

    # places before the group that holds the short fragment are unaffected by it; later groups start `short` earlier
    index = np.asarray(index, dtype=np.int64)
    after = index >= (short_group + 1) * whole - short
    group = (index + np.where(after, short, 0)) // whole
    out = np.empty_like(index)
    for g in np.unique(group).tolist():
        here = group == g
        places = np.arange(g * window, min((g + 1) * window, fragments))
        if g == short_group:  # the short fragment goes last, so that the others stay aligned
            places = np.append(places[places != short_place], short_place)
        size = len(places) * fragment - (short if g == short_group else 0)
        start = g * whole - (short if g > short_group else 0)
        local = permute(index[here] - start, size, key(name, 2, g))
        out[here] = permute(places, fragments, order)[local // fragment] * fragment + local % fragment
    return out
