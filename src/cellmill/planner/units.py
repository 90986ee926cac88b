"""Bytes of a gigabyte and of number formats, and the work of a backward pass."""

GB = 1e9  # bytes of a gigabyte
FLOAT32_BYTES = 4  # bytes of a float32 number
HALF_BYTES = 2  # bytes of a float16 or bfloat16 number
# A backward pass has the FLOPs of two forward passes: one for the gradients of inputs, and one for the
# gradients of weights (Kaplan et al. 2020, section 2.1).
FORWARDS_PER_BACKWARD = 2
