"""Bytes of number formats and of a gigabyte, and FLOPs of a backward pass."""

GB = 1e9
FLOAT32_BYTES = 4
HALF_BYTES = 2  # float16 or bfloat16
# a backward pass has the FLOPs of two forward passes: one for the gradients of inputs, and one for
# the gradients of weights (Kaplan et al. 2020, section 2.1)
FORWARDS_PER_BACKWARD = 2
