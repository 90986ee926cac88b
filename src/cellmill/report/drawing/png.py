"""Bitmaps of static pictures.

They are PNGs with a palette. A PNG with 32-bit pixels would be six times as large.
"""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
import vl_convert

MAX_COLOURS = 128  # a palette has at most this many colours; more would compress worse
# Codes of the PNG format.
INDEXED = 3  # colour type of pixels that are indices into a palette
SUB_FILTER = 1  # filter "Sub": pixels of a line are differences from their left neighbours
SIGNATURE_BYTES = 8  # a PNG begins with a signature of this length


def draw_png(svg: str, scale: float) -> bytes:
    """Draw the SVG as a PNG, with `scale` pixels for each pixel of the SVG."""
    return shrink_png(vl_convert.svg_to_png(svg, scale=scale))


def shrink_png(png: bytes) -> bytes:
    """Encode a 32-bit PNG again, with a palette.

    Each channel of a colour is rounded down to 4 bits. The palette has the MAX_COLOURS most frequent
    colours. Every other colour becomes the nearest colour of the palette. The PNG is returned
    unchanged if one of its lines has another filter than SUB_FILTER.
    """
    # read the lines of pixels; the width and height are at fixed places of the first chunk
    width, height = struct.unpack(">II", png[16:24])
    compressed = b"".join(data for kind, data in _iterate_chunks(png) if kind == b"IDAT")
    content = np.frombuffer(zlib.decompress(compressed), np.uint8)
    # each line has one byte with the code of its filter, then 4 bytes per pixel
    lines = content.reshape(height, 1 + 4 * width)
    if not (lines[:, 0] == SUB_FILTER).all():
        return png

    # Undo the filter: a pixel is the sum of the differences up to it. Sums wrap at 256, as in PNG.
    pixels = lines[:, 1:].reshape(height, width, 4).cumsum(axis=1, dtype=np.uint8)
    palette, indices = _choose_colours(pixels >> 4)
    colours = 17 * palette  # back from 4 bits to 8, so that 15 becomes 255

    # write the new PNG; the line of indices begins with 0, the code for no filter
    unfiltered = np.insert(indices, 0, 0, axis=1)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, INDEXED, 0, 0, 0),
        b"PLTE": colours[:, :3].tobytes(),
        b"tRNS": colours[:, 3].tobytes(),
        b"IDAT": zlib.compress(unfiltered.tobytes()),
        b"IEND": b"",
    }
    shrunk = png[:SIGNATURE_BYTES]
    for kind, data in chunks.items():
        checksum = zlib.crc32(kind + data)
        shrunk += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
    return shrunk


def _choose_colours(channels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose a palette for a picture. Return the palette, and each pixel's index in the palette.

    `channels` are the red, green, blue and alpha of each pixel, from 0 to 15, (height, width, 4)
    uint8. The palette is (colours, 4) uint8, with the most frequent colour first. The indices are
    (height, width) uint8.
    """
    # a colour's code has 16 bits, 4 bits for each channel
    shifts = np.array([12, 8, 4, 0])
    pixel_codes = (channels.astype(np.int64) << shifts).sum(axis=2)  # (height, width)
    # all transparent pixels get the same code, because their colour is not visible
    pixel_codes[channels[..., 3] == 0] = 0

    # codes of the colours that occur, the most frequent first: (used colours,)
    n_pixels = np.bincount(pixel_codes.ravel(), minlength=1 << 16)
    used_codes = np.flatnonzero(n_pixels)
    order = np.argsort(-n_pixels[used_codes], kind="stable")
    used_codes = used_codes[order]

    # the nearest colour of the palette for each used colour, by the distance in the four channels
    colours = ((used_codes[:, None] >> shifts) & 15).astype(np.int16)  # (used colours, 4)
    palette = colours[:MAX_COLOURS]
    offsets = colours[:, None] - palette  # (used colours, palette, 4)
    squared_distances = np.einsum("upc,upc->up", offsets, offsets)  # (used colours, palette)
    index_by_code = np.zeros(1 << 16, np.uint8)
    index_by_code[used_codes] = squared_distances.argmin(axis=1)
    return palette.astype(np.uint8), index_by_code[pixel_codes]


def _iterate_chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over (kind, data) of each chunk, in the order of the file.

    A chunk has 4 bytes with the length of its data, 4 bytes with its kind, the data, and a checksum
    of 4 bytes.
    """
    begin = SIGNATURE_BYTES
    while begin < len(png):
        n_bytes = int.from_bytes(png[begin : begin + 4], "big")
        end = begin + 8 + n_bytes
        kind = png[begin + 4 : begin + 8]
        yield kind, png[begin + 8 : end]
        begin = end + 4
