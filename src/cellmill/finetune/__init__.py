"""Fine-tuning methods: which parameters train, at which rate, and what is added to the model.

`method.py` has the contract and the methods `full`, `partial` and `head_only`; `lora.py` has `lora`.
"""
