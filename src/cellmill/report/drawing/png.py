"""Bitmaps of static pictures: PNGs with a palette, a sixth as large as with 32-bit pixels."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
import vl_convert

MAX_COLOURS = 128
# codes of the PNG format
INDEXED = 3  # colour type: pixels are indices into a palette
SUB_FILTER = 1  # filter "Sub" of a line: pixels are differences from their left neighbours


def draw_png(svg: str, scale: float) -> bytes:
    """The SVG as a PNG with `scale` pixels for each pixel of the SVG."""
    return shrink_png(vl_convert.svg_to_png(svg, scale=scale))


def shrink_png(png: bytes) -> bytes:
    """The PNG, whose pixels have 32 bits, with a palette.

    Channels keep their upper 4 bits. The palette has the MAX_COLOURS most frequent colours; each
    other colour becomes the nearest of these. A PNG whose lines do not all have the filter
    SUB_FILTER is returned unchanged.
    """
    width, height = struct.unpack(">II", png[16:24])
    compressed = b"".join(data for kind, data in _iterate_chunks(png) if kind == b"IDAT")
    content = np.frombuffer(zlib.decompress(compressed), np.uint8)
    # a line has the code of its filter, then 4 bytes per pixel
    lines = content.reshape(height, 1 + 4 * width)
    if not (lines[:, 0] == SUB_FILTER).all():
        return png
    # undo the filter; sums wrap at 256
    pixels = lines[:, 1:].reshape(height, width, 4).cumsum(axis=1, dtype=np.uint8)
    palette, indices = _choose_colours(pixels >> 4)
    colours = 17 * palette  # 15 becomes 255
    unfiltered = np.insert(indices, 0, 0, axis=1)  # each line begins with 0, for no filter
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, INDEXED, 0, 0, 0),
        b"PLTE": colours[:, :3].tobytes(),
        b"tRNS": colours[:, 3].tobytes(),
        b"IDAT": zlib.compress(unfiltered.tobytes()),
        b"IEND": b"",
    }
    shrunk = png[:8]  # signature
    for kind, data in chunks.items():
        checksum = zlib.crc32(kind + data)
        shrunk += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
    return shrunk


def _choose_colours(channels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The palette, the most frequent colour first, and each pixel's index in it.

    The palette is (colours, 4) uint8, the indices are (height, width) uint8. `channels` are red,
    green, blue and alpha, each from 0 to 15, (height, width, 4) uint8.
    """
    # a colour's code has 4 bits for each channel
    shifts = np.array([12, 8, 4, 0])
    colour_codes = (channels.astype(np.int64) << shifts).sum(axis=2)
    colour_codes[channels[..., 3] == 0] = 0  # one code for all transparent pixels
    counts = np.bincount(colour_codes.ravel(), minlength=1 << 16)
    used = np.flatnonzero(counts)  # codes of colours that occur
    order = np.argsort(-counts[used], kind="stable")
    used = used[order]
    colours = ((used[:, None] >> shifts) & 15).astype(np.int16)
    palette = colours[:MAX_COLOURS]
    offsets = colours[:, None] - palette  # (used colours, palette, channels)
    squared_distances = np.einsum("upc,upc->up", offsets, offsets)
    index_by_code = np.zeros(1 << 16, np.uint8)
    index_by_code[used] = squared_distances.argmin(axis=1)
    return palette.astype(np.uint8), index_by_code[colour_codes]


def _iterate_chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, data) of each chunk: 4 bytes of length, 4 of kind, the data, a checksum of 4."""
    begin = 8
    while begin < len(png):
        n_bytes = int.from_bytes(png[begin : begin + 4], "big")
        end = begin + 8 + n_bytes
        kind = png[begin + 4 : begin + 8]
        yield kind, png[begin + 8 : end]
        begin = end + 4
