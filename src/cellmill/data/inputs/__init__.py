"""Formats of counts: one module per format behind one contract (`cellmill.data.inputs.source`)."""
