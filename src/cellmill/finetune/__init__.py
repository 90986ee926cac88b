"""Fine-tuning methods behind one contract: a transform of the model before it is laid out, and what
trains.
"""
