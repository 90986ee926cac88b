"""One module for each stage: it composes the parts and computes nothing. The only place where parts
meet.
"""
