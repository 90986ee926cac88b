"""Bytes of number formats and of a gigabyte."""

GB = 1e9
FLOAT32_BYTES = 4
HALF_BYTES = 2  # float16 or bfloat16
