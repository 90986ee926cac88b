"""The `profile` family: a multilayer perceptron on the expression profile."""
